"""Says what a result was made with."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from momentprop.version import __version__

_PACKAGES = ("torch", "numpy", "scikit-learn", "matplotlib")


def versions() -> dict[str, str]:
    """Return versions of momentprop, Python and the installed packages that numbers and figures depend on."""
    found = {"momentprop": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
