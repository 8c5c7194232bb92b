"""Names what can be wrong with data, besides a damaged file."""

from __future__ import annotations

from momentprop.errors import DataError


class MissingDataError(DataError):
    """A data set is in none of the places where it was looked for."""


class DownloadError(DataError):
    """A data set could not be downloaded."""
