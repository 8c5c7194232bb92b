"""Finds data, and the folders where downloads and decoded images are kept.

Data is looked for in a folder that the caller names, and in no other; without one, in the folder that the
environment variable MOMENTPROP_DATA names, and then among the downloads. The cache is the folder that
MOMENTPROP_CACHE names, otherwise `momentprop` in the platform's folder for caches; it may be deleted at any
time.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from momentprop_reproduction.data.errors import MissingDataError


def cache_folder() -> Path:
    """The folder for everything that can be downloaded or computed again."""
    if named := os.environ.get("MOMENTPROP_CACHE"):
        return Path(named).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "momentprop"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "momentprop"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "momentprop"


def download_folder() -> Path:
    """The folder that downloads go to and are found in."""
    return cache_folder() / "downloads"


def search_path(root: str | os.PathLike[str] | None = None) -> list[Path]:
    """The places to look in, first one first. A place that was named but does not exist is an error."""
    named = [(root, "the given path")] if root is not None else []
    if root is None and (variable := os.environ.get("MOMENTPROP_DATA")):
        named = [(variable, "MOMENTPROP_DATA")]
    places = []
    for value, origin in named:
        place = Path(value).expanduser()
        if not place.exists():
            raise MissingDataError(f"{place} ({origin}) does not exist; name a folder that holds the data")
        places.append(place)
    return places if root is not None else [*places, download_folder()]


def missing(name: str, layouts: list[str], places: list[Path]) -> MissingDataError:
    """The error for data that is in none of the places."""
    return MissingDataError(
        f"{name} is not there: found none of {', '.join(layouts)} in {' or '.join(map(str, places))}. "
        f"Download it with `momentprop data get {name}`, or let MOMENTPROP_DATA name a folder that holds it."
    )
