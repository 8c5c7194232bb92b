"""Inputs and targets on the command line: .npz, .parquet or a folder of images. Nothing is unpickled."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from momentprop.errors import DataError, MissingExtraError
from momentprop.validation.batch_first import moved

_IMAGES = (".png", ".jpg", ".jpeg")
_BATCH = 100


def read_batches(
    path: Path, most: int, wants_targets: bool = True, batch_dim: int = 0
) -> tuple[list[Any], bool]:
    """Batches (x, y), or x alone where the file has no y; and whether it has.

    A file has a row for every input; batches have them in `batch_dim`.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist")
    if path.is_dir():
        x, y = _folder(path, most)
    elif path.suffix == ".npz":
        x, y = _npz(path, most)
    elif path.suffix == ".parquet":
        x, y = _parquet(path, most)
    else:
        raise DataError(f"{path} is no .npz, no .parquet and no folder of images")
    if not wants_targets:
        y = None
    parts = [moved([part], batch_dim, back=True)[0] for part in x.split(_BATCH)] if len(x) else []
    if y is None:
        return parts, False
    return list(zip(parts, y.split(_BATCH), strict=True)) if parts else [], True


def _npz(path: Path, most: int) -> tuple[Tensor, Tensor | None]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            if "x" not in arrays.files:
                raise DataError(f"{path} has no array x; it has {', '.join(arrays.files) or 'none'}")
            x = arrays["x"]
            y = arrays["y"] if "y" in arrays.files else None
    except (ValueError, zipfile.BadZipFile, EOFError) as error:
        raise DataError(f"{path} is damaged, or holds Python objects, which are not read: {error}") from None
    if any(array.ndim == 0 for array in (x, y) if array is not None):
        raise DataError(f"{path}: x and y must be arrays with one row per input")
    if y is not None and len(x) != len(y):
        raise DataError(f"{path}: x has {len(x)} rows, and y {len(y)}")
    return _inputs(x[:most], path), None if y is None else _targets(y[:most], path)


def _parquet(path: Path, most: int) -> tuple[Tensor, Tensor | None]:
    """Columns x (numbers, lists or fixed-shape tensors) and y."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtraError("pyarrow", "validate") from error
    try:
        table = parquet.read_table(path).slice(0, most)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if "x" not in table.column_names:
        raise DataError(f"{path} has no column x; it has {', '.join(table.column_names)}")

    def column(name: str) -> np.ndarray:
        found = table.column(name).combine_chunks()
        if found.null_count:
            raise DataError(f"{path}: column {name} has {found.null_count} empty places")
        if isinstance(found.type, pa.FixedShapeTensorType):
            return np.asarray(found.to_numpy_ndarray())
        try:
            return np.asarray(found.to_pylist())
        except ValueError as error:
            raise DataError(f"{path}: the rows of column {name} have different shapes") from error

    return _inputs(column("x"), path), _targets(column("y"), path) if "y" in table.column_names else None


def _folder(path: Path, most: int) -> tuple[Tensor, Tensor | None]:
    """<class>/<image>, classes sorted by name, as pixels in 0..1; images of every class in turn."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("pillow", "validate") from error
    classes = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    by_class = [sorted(f for f in c.iterdir() if f.suffix.lower() in _IMAGES) for c in classes]
    longest = max((len(files) for files in by_class), default=0)
    chosen = [(files[i], k) for i in range(longest) for k, files in enumerate(by_class) if i < len(files)]
    if not chosen:
        raise DataError(f"{path} has no images in folders, one folder per class (.png, .jpg)")
    pixels = []
    for file, _ in chosen[:most]:
        try:
            with Image.open(file, formats=("PNG", "JPEG")) as image:
                mode = "L" if image.mode in ("1", "L") else "RGB"
                array = np.asarray(image.convert(mode), dtype=np.float32) / 255
        except (OSError, ValueError, SyntaxError) as error:
            raise DataError(f"{file} is damaged, or no image: {error}") from None
        pixels.append(array[None] if array.ndim == 2 else array.transpose(2, 0, 1))
        if pixels[-1].shape != pixels[0].shape:
            raise DataError(
                f"{file} is {list(pixels[-1].shape)}, and the first image {list(pixels[0].shape)}"
            )
    labels = torch.tensor([label for _, label in chosen[:most]])
    return torch.from_numpy(np.stack(pixels)), labels


def _inputs(array: np.ndarray, path: Path) -> Tensor:
    return _tensor(array, path, "x")


def _targets(array: np.ndarray, path: Path) -> Tensor:
    tensor = _tensor(array, path, "y")
    return tensor if tensor.is_floating_point() else tensor.long()


def _tensor(array: np.ndarray, path: Path, name: str) -> Tensor:
    if array.dtype.kind not in "fiub":
        raise DataError(f"{path}: {name} must hold numbers, not {array.dtype}")
    if array.dtype.kind == "f":
        array = array.astype(np.float32)
    elif array.dtype.kind in "ub":
        array = array.astype(np.int64)
    return torch.from_numpy(np.ascontiguousarray(array))
