"""Writes files that are either whole or not there, and reads .npz files without trusting them."""

from __future__ import annotations

import os
import uuid
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import numpy as np

from momentprop.errors import DataError


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A temporary file beside `path`, renamed to it at the end; if that fails, `path` stays as it was."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # otherwise a power failure can leave the new name on an empty file
        temporary.replace(path)
    except OSError as error:
        raise DataError(
            f"{path} cannot be written ({error}); let MOMENTPROP_CACHE name a folder with space that is yours"
        ) from error
    finally:
        with suppress(OSError):  # there is none where its folder could not be made
            temporary.unlink(missing_ok=True)


def write_arrays(path: Path, arrays: dict[str, np.ndarray], *, compressed: bool = False) -> None:
    """Write a whole .npz file, or none."""
    save = np.savez_compressed if compressed else np.savez
    with replacing(path) as file:
        save(file, allow_pickle=False, **arrays)


def read_arrays(path: Path, advice: str) -> dict[str, np.ndarray]:
    """All arrays of an .npz file. No pickles are read; the checksums inside the file are verified."""
    try:
        # numpy leaves a file open that it opened itself and could not read
        with path.open("rb") as file:
            arrays = np.load(file, allow_pickle=False)
            if not isinstance(arrays, np.lib.npyio.NpzFile):
                raise DataError(f"{path} holds a single array, not an .npz of several; {advice}")
            return {name: arrays[name] for name in arrays.files}
    # what numpy and zipfile raise for truncated, overwritten and foreign files
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged or not an .npz file ({error}); {advice}") from error
