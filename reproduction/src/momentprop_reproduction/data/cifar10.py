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

from momentprop.errors import DataError
from momentprop_reproduction.data.archives import files_inside
from momentprop_reproduction.data.batches import FOLDER, batch_files, decode_batches, decode_batches_tar
from momentprop_reproduction.data.image_files import decode_folder, decode_tar, image_files, is_image
from momentprop_reproduction.data.images import CLASSES, SHAPE, SPLITS, Decoded
from momentprop_reproduction.data.location import cache_folder, missing, search_path
from momentprop_reproduction.data.storing import read_arrays, write_arrays

_ARCHIVES = ("cifar-10-python.tar*", "cifar10-jpeg.tar*", "CIFAR-10-images*.tar*")
_IMAGE_FOLDERS = "[Cc][Ii][Ff][Aa][Rr]*10*"  # CIFAR-10-images, cifar10 and the like
_ADVICE = "get a new copy, for example with `momentprop data get cifar10`"


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
    """The "train" or "test" images from `root`, or from where `momentprop_reproduction.data.location` says.

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
    """The first copy; in one folder, original pixels before image files. `root` may be the copy itself."""
    places = search_path(root)
    for place in places:
        if place.is_file():
            return Copy(place, _decode_any_tar, _itself)
        for folder in (place / FOLDER, place):
            if folder.name == FOLDER and folder.is_dir():
                return Copy(folder, decode_batches, batch_files)
        for pattern in _ARCHIVES:
            for path in sorted(place.glob(pattern)):
                return Copy(path, _decode_any_tar, _itself)
        for folder in (place, *sorted(place.glob(_IMAGE_FOLDERS))):
            if any((folder / "train" / name).is_dir() for name in CLASSES):
                return Copy(folder, decode_folder, image_files)
    raise missing(
        "cifar10", [f"{FOLDER}/", *_ARCHIVES, "train/<class>/", f"{_IMAGE_FOLDERS}/train/<class>/"], places
    )


def _decode_any_tar(path: Path) -> Decoded:
    """Decode batches or image files, by the first file inside that belongs to either."""
    files = files_inside(path, lambda name: FOLDER in name.parts or is_image(name), _ADVICE)
    first = next(files, None)
    if first is None:
        raise DataError(f"{path} holds neither {FOLDER}/ nor train/<class>/ with images; {_ADVICE}")
    return decode_batches_tar(path) if FOLDER in first[0].parts else decode_tar(path)


def _itself(path: Path) -> list[Path]:
    return [path]


def _key(copy: Copy) -> str:
    """Hash what the copy looks like from outside: names, sizes and dates."""
    lines = [copy.path.name]
    for path in copy.files(copy.path):
        status = path.stat()
        lines.append(f"{path.relative_to(copy.path)} {status.st_size} {status.st_mtime_ns}")
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
