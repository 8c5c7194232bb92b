"""CIFAR-10 images for the benchmarks, from a local archive of JPEG files, decoded once into a cache."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("MOMENTPROP_DATA", ROOT.parent / "shared" / "data"))
CACHE = Path(os.environ.get("MOMENTPROP_CACHE", ROOT / "benchmarks" / ".cache"))

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def cifar10(split: str) -> tuple[Tensor, Tensor]:
    """All images of a split as bytes [n, 3, 32, 32], and their classes, in the archive's order."""
    path = CACHE / f"cifar10-{split}.npz"
    if not path.exists():
        _decode()
    with np.load(path) as arrays:
        return torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"])


def first_of_each_class(split: str, count: int, classes: tuple[str, ...] = CLASSES) -> tuple[Tensor, Tensor]:
    """The first images of each class, scaled to -1..1 as the published networks expect."""
    images, labels = cifar10(split)
    index = torch.cat([(labels == CLASSES.index(name)).nonzero()[:count, 0] for name in classes])
    return scaled(images[index]), labels[index]


def scaled(images: Tensor) -> Tensor:
    return (images.float() / 255 - 0.5) * 2


def _decode() -> None:
    from PIL import Image

    archive = DATA / "cifar10-jpeg.tar.xz"
    if not archive.exists():
        raise SystemExit(f"{archive.name} is not in MOMENTPROP_DATA")
    CACHE.mkdir(parents=True, exist_ok=True)
    found: dict[str, tuple[list[np.ndarray], list[int]]] = {"train": ([], []), "test": ([], [])}
    with tarfile.open(archive) as tar:
        for member in tar:
            parts = member.name.split("/")
            if not member.isfile() or not member.name.endswith(".jpg") or parts[-3] not in found:
                continue
            file = tar.extractfile(member)
            assert file is not None
            images, labels = found[parts[-3]]
            images.append(np.asarray(Image.open(io.BytesIO(file.read())).convert("RGB")).transpose(2, 0, 1))
            labels.append(CLASSES.index(parts[-2]))
    for split, (images, labels) in found.items():
        temporary = CACHE / f"{split}.tmp.npz"
        np.savez(temporary, images=np.stack(images), labels=np.array(labels))
        temporary.rename(CACHE / f"cifar10-{split}.npz")
