"""What a result was made with."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from momentprop.version import __version__

_PACKAGES = ("torch", "numpy", "scikit-learn", "matplotlib")


def versions() -> dict[str, str]:
    """Of momentprop, Python and the packages that numbers and figures depend on, where installed."""
    found = {"momentprop": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
