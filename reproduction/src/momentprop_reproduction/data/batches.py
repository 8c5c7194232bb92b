"""The original distribution of CIFAR-10: batches pickled by Python 2, in a folder or in its tar.gz.

A pickle is a program, so it is not trusted: the unpickler here knows the three names of numpy that the
batches use, puts its own stand-ins in their place, and refuses every other name. Nothing of numpy runs on
behalf of the file; the stand-ins accept arrays of bytes and nothing else.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from momentprop.errors import DataError
from momentprop_reproduction.data.archives import files_inside
from momentprop_reproduction.data.images import CLASSES, SHAPE, SPLITS, Decoded, checked

FOLDER = "cifar-10-batches-py"
BATCHES = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)}
_META = "batches.meta"
_FILES = (*BATCHES["train"], *BATCHES["test"], _META)
_ADVICE = "delete it and download it with `momentprop data get cifar10`"


def decode_batches(folder: Path) -> Decoded:
    """Read the batches of a folder, in their own order."""
    return _decode(_files(folder), folder)


def decode_batches_tar(archive: Path) -> Decoded:
    """Read the batches of the tar.gz."""
    files = files_inside(archive, lambda path: path.name in _FILES, _ADVICE)
    return _decode(((path.name, content) for path, content in files), archive)


def batch_files(folder: Path) -> list[Path]:
    """The files of the folder that are read, as far as they are there."""
    return [folder / name for name in _FILES if (folder / name).exists()]


def _files(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in batch_files(folder):
        try:
            yield path.name, path.read_bytes()
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error}); {_ADVICE}") from error


def _decode(files: Iterator[tuple[str, bytes]], source: Path) -> Decoded:
    found = {name: read_pickle(content, f"{source}: {name}") for name, content in files}
    if absent := [name for name in _FILES if name not in found]:
        raise DataError(f"{source} is incomplete: it has no {', '.join(absent)}; {_ADVICE}")
    names = found[_META].get(b"label_names")
    if names != [name.encode() for name in CLASSES]:
        raise DataError(f"{source}: {_META} names the classes {names}, not those of CIFAR-10; {_ADVICE}")
    splits = {}
    for split in SPLITS:
        parts = [_batch(found[name], f"{source}: {name}") for name in BATCHES[split]]
        images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        splits[split] = checked(images, labels, split, source, _ADVICE)
    return Decoded(splits, "original pixels")


def _batch(content: dict[Any, Any], where: str) -> tuple[np.ndarray, np.ndarray]:
    """Images [n, 3, 32, 32] and labels [n]. A row is the red plane, the green one, the blue one."""
    data, labels = content.get(b"data"), content.get(b"labels")
    if not isinstance(data, _Array) or not isinstance(labels, list):
        raise DataError(f"{where} has no images or no labels; {_ADVICE}")
    if data.values.shape != (len(labels), np.prod(SHAPE)):
        raise DataError(
            f"{where} has data of shape {list(data.values.shape)} for {len(labels)} labels; {_ADVICE}"
        )
    if not all(type(label) is int and 0 <= label < len(CLASSES) for label in labels):
        raise DataError(f"{where} has labels outside 0..{len(CLASSES) - 1}; {_ADVICE}")
    return data.values.reshape(-1, *SHAPE), np.array(labels, dtype=np.int64)


def read_pickle(content: bytes, where: str) -> dict[Any, Any]:
    """The dictionary in a batch. Strings of Python 2 come as bytes."""
    try:
        _refuse_large_memo(content)
        value = _Unpickler(io.BytesIO(content), encoding="bytes").load()
    except DataError as error:
        raise DataError(f"{where} {error}; {_ADVICE}") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(f"{where} is damaged or not a batch of CIFAR-10 ({error!r}); {_ADVICE}") from error
    if not isinstance(value, dict):
        raise DataError(f"{where} holds no dictionary; {_ADVICE}")
    return value


def _refuse_large_memo(content: bytes) -> None:
    """Refuse numbers that no pickler gives: Python makes a list as long as the largest, up to 32 GB.

    Picklers number the objects one after the other.
    """
    for count, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > count:
            raise DataError(f"numbers its objects as no pickler does ({argument} after {count} steps)")


class _Type:
    """Stands for numpy.dtype; it knows bytes only."""

    __slots__ = ()

    def __init__(self, code: object, *_: object) -> None:
        if code not in (b"u1", "u1"):
            raise DataError(f"has an array of type {code!r} where the images are bytes")

    def __setstate__(self, state: object) -> None:
        """Ignore byte order and the like, which are of no concern to bytes."""


class _Array:
    """Stands for numpy.ndarray."""

    __slots__ = ("values",)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, _, by_column, content = state
        # a view of the bytes, which fails where their number is not that of the shape
        self.values = np.frombuffer(content, np.uint8).reshape(shape, order="F" if by_column else "C")


class _Reconstruct:
    """Stands for numpy's function that makes the empty array which the state then fills."""

    __slots__ = ()

    def __new__(cls, *_: object) -> Any:
        return _Array()


_KNOWN = {
    ("numpy", "dtype"): _Type,
    ("numpy", "ndarray"): _Array,
    ("numpy.core.multiarray", "_reconstruct"): _Reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _Reconstruct,  # its name since numpy 2
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise DataError(
                f"asks for {module}.{name}, which no batch of CIFAR-10 contains: do not unpickle it, "
                "it could run any program"
            )
        return _KNOWN[module, name]
