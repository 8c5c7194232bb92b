"""Downloads: verified before they get their name, so that a file in the cache is whole."""

from __future__ import annotations

import hashlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from momentprop_reproduction.data.errors import DownloadError
from momentprop_reproduction.data.storing import replacing

Progress = Callable[[int], None]  # is told the number of bytes that came since the last time
_CHUNK = 1 << 18
_SECONDS = 60  # without a single byte
_ADVICE = "Try again; without a network, copy the data from elsewhere and let MOMENTPROP_DATA name its folder"


def download(url: str, path: Path, sha256: str, progress: Progress | None = None) -> None:
    """Download a file to `path`. If the connection breaks or the checksum differs, `path` stays as it was."""
    digest = hashlib.sha256()
    with replacing(path) as file:
        for chunk in chunks(url):
            digest.update(chunk)
            file.write(chunk)
            if progress:
                progress(len(chunk))
        verify(url, digest.hexdigest(), sha256)


def fetch(url: str) -> bytes:
    """The content of a small file."""
    return b"".join(chunks(url))


def verify(what: str, found: str, expected: str) -> None:
    """Refuse what does not have the published checksum."""
    if found != expected:
        raise DownloadError(
            f"{what} has the SHA-256 checksum {found}, not {expected}: it was damaged on the way, or is no "
            f"longer the same data. Nothing was kept. {_ADVICE}"
        )


def chunks(url: str) -> Iterator[bytes]:
    """The content piece by piece; an error when the server announced more than it sent."""
    received = 0
    try:
        with urllib.request.urlopen(url, timeout=_SECONDS) as response:
            announced = response.headers.get("Content-Length")
            while chunk := response.read(_CHUNK):
                received += len(chunk)
                yield chunk
    # URLError and timeouts are OSErrors; ValueError is for an address that is none
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        code = f"{error.code} " if isinstance(error, urllib.error.HTTPError) else ""
        raise DownloadError(f"{url} cannot be downloaded ({code}{reason}). {_ADVICE}") from error
    if announced is not None and received != int(announced):
        raise DownloadError(f"{url} broke off after {received} of {announced} bytes. {_ADVICE}")
