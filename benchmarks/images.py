"""CIFAR-10 images for the benchmarks, as momentprop_reproduction.data finds and keeps them."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from momentprop.errors import DataError
from momentprop_reproduction.data import load_cifar10
from momentprop_reproduction.data.images import CLASSES

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("MOMENTPROP_DATA", ROOT.parent / "shared" / "data"))
CACHE = Path(os.environ.get("MOMENTPROP_CACHE", ROOT / "benchmarks" / ".cache"))


def cifar10(split: str) -> tuple[Tensor, Tensor]:
    """All images of a split as bytes [n, 3, 32, 32], and their classes."""
    try:
        found = load_cifar10(split, DATA, cache=CACHE)
    except DataError as error:
        raise SystemExit(str(error)) from error
    return found.images, found.labels


def first_of_each_class(split: str, count: int, classes: tuple[str, ...] = CLASSES) -> tuple[Tensor, Tensor]:
    """The first images of each class, scaled to -1..1 as the published networks expect."""
    images, labels = cifar10(split)
    index = torch.cat([(labels == CLASSES.index(name)).nonzero()[:count, 0] for name in classes])
    return scaled(images[index]), labels[index]


def scaled(images: Tensor) -> Tensor:
    return (images.float() / 255 - 0.5) * 2
