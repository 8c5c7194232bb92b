"""The files inside a tar archive, read one after the other; nothing is extracted to the disk."""

from __future__ import annotations

import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from momentprop.errors import DataError


def files_inside(
    archive: Path, wanted: Callable[[PurePosixPath], bool], advice: str
) -> Iterator[tuple[PurePosixPath, bytes]]:
    """Name and content of the wanted files, in the archive's order, whatever its compression.

    An archive cut off between two files can look whole: the caller counts what it got.
    """
    try:
        with tarfile.open(archive, "r|*") as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                if member.isfile() and wanted(path):
                    file = tar.extractfile(member)
                    assert file is not None
                    yield path, file.read()
    except (OSError, EOFError, tarfile.TarError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{archive} is damaged or incomplete ({error}); {advice}") from error
