"""Describes CIFAR-10: ten classes, so many images of each; and holds the two splits as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from momentprop.errors import DataError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SPLITS = ("train", "test")
PER_CLASS = {"train": 5000, "test": 1000}
SHAPE = (3, 32, 32)


@dataclass(frozen=True)
class Decoded:
    """Images as bytes [N, 3, 32, 32] and labels [N] of both splits, and the kind of copy they come from."""

    splits: dict[str, tuple[np.ndarray, np.ndarray]]
    variant: str


def checked(
    images: np.ndarray, labels: np.ndarray, split: str, source: Path, advice: str
) -> tuple[np.ndarray, np.ndarray]:
    """The same arrays, when each class has all of its images."""
    if images.dtype != np.uint8 or images.shape != (len(labels), *SHAPE):
        raise DataError(f"{source}: the {split} images are {images.dtype} {list(images.shape)}; {advice}")
    expected = PER_CLASS[split]
    counts = [int((labels == label).sum()) for label in range(len(CLASSES))]
    if wrong := [f"{n} of {name}" for n, name in zip(counts, CLASSES, strict=True) if n != expected]:
        raise DataError(
            f"{source} is incomplete or not CIFAR-10: each class has {expected} {split} images, "
            f"but there are {', '.join(wrong)}; {advice}"
        )
    return images, labels
