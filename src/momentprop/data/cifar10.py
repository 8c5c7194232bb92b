"""CIFAR-10, from whichever copy there is, decoded once into a cache.

Krizhevsky (2009), "Learning multiple layers of features from tiny images". Copies with the original pixels
are preferred to JPEG files, whose pixels differ from the original by what JPEG loses.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from momentprop.data.image_files import decode_folder, decode_tar, listing
from momentprop.data.images import CLASSES, SHAPE, SPLITS, Decoded
from momentprop.data.location import cache_folder, missing, search_path
from momentprop.data.storing import read_arrays, write_arrays
from momentprop.errors import DataError


@dataclass(frozen=True)
class Images:
    """One split. `variant` is "original pixels" or "JPEG re-encoding"."""

    images: Tensor  # uint8 [N, 3, 32, 32]
    labels: Tensor  # int64 [N]
    classes: tuple[str, ...]
    variant: str


@dataclass(frozen=True)
class Copy:
    """A copy of CIFAR-10: where it is, how it is decoded, and the files that it consists of."""

    path: Path
    decode: Callable[[Path], Decoded]
    files: Callable[[Path], list[Path]]


def load_cifar10(
    split: str, root: str | os.PathLike[str] | None = None, *, cache: str | os.PathLike[str] | None = None
) -> Images:
    """The "train" or "test" images from `root`, or from where `momentprop.data.location` says.

    The first call decodes both splits and keeps them in `cache` (default: the cache folder); the kept arrays
    hold until a file of the copy changes in size or date.
    """
    if split not in SPLITS:
        raise DataError(f"there is no split {split!r} of CIFAR-10; the splits are train and test")
    copy = find_cifar10(root)
    folder = cache_folder() if cache is None else Path(cache)
    kept = {name: folder / f"cifar10-{name}-{_key(copy)}.npz" for name in SPLITS}
    arrays = _kept(kept[split])
    if arrays is None:
        decoded = copy.decode(copy.path)
        for name, (images, labels) in decoded.splits.items():
            content = {"images": images, "labels": labels, "variant": np.array(decoded.variant)}
            write_arrays(kept[name], content)
            arrays = content if name == split else arrays
    assert arrays is not None
    return Images(
        images=torch.from_numpy(arrays["images"]),
        labels=torch.from_numpy(arrays["labels"]),
        classes=CLASSES,
        variant=str(arrays["variant"]),
    )


def find_cifar10(root: str | os.PathLike[str] | None = None) -> Copy:
    """The first copy, original pixels before JPEG files. `root` may be the copy itself."""
    layouts = ["cifar10-jpeg.tar.*", "CIFAR-10-images*.tar*", "train/airplane"]
    places = search_path(root)
    for place in places:
        if place.is_file():
            return Copy(place, decode_tar, lambda path: [path])
        for pattern in layouts[:2]:
            for path in sorted(place.glob(pattern)):
                return Copy(path, decode_tar, lambda path: [path])
        if (place / "train").is_dir():
            return Copy(place, decode_folder, listing)
    raise missing("cifar10", layouts, places)


def _key(copy: Copy) -> str:
    """What the copy looks like from outside: names, sizes and dates."""
    lines = [copy.decode.__name__]
    for path in copy.files(copy.path):
        status = path.stat()
        lines.append(f"{path.relative_to(copy.path.parent)} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _kept(path: Path) -> dict[str, np.ndarray] | None:
    """The arrays of the cache, or None where they must be decoded (again)."""
    if not path.exists():
        return None
    try:
        arrays = read_arrays(path, "delete it")
    except DataError:
        return None  # the copy itself is there, and is decoded into a new file
    whole = {"images", "labels", "variant"} <= arrays.keys() and arrays["images"].shape[1:] == SHAPE
    return arrays if whole else None
