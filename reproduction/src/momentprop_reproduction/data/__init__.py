"""The data of the paper's experiments: the UCI regression sets with Gal's splits, and CIFAR-10."""

from __future__ import annotations

from momentprop_reproduction.data.cifar10 import Images, load_cifar10
from momentprop_reproduction.data.uci import UciSet, load_uci, uci_names

__all__ = ["Images", "UciSet", "load_cifar10", "load_uci", "uci_names"]
