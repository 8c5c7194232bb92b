"""The command `momentprop`: one small file per verb."""

from __future__ import annotations

import sys

from momentprop.errors import MissingExtraError

_EXTRA = ("typer", "rich")


def main() -> None:
    """Entry point. Says what to install if the command's own dependencies are missing."""
    try:
        from momentprop.cli.app import app
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA:
            raise
        print(f"momentprop: {MissingExtraError(package, 'cli')}", file=sys.stderr)
        sys.exit(1)
    app()
