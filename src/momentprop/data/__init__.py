"""The data of the paper's experiments: the UCI regression sets with Gal's splits, and CIFAR-10.

Needs numpy, and pillow where images are files (extra `data`). Nothing of the core imports this package.
"""

from __future__ import annotations

from momentprop.data.cifar10 import Images, load_cifar10
from momentprop.data.uci import UciSet, load_uci, uci_names

__all__ = ["Images", "UciSet", "load_cifar10", "load_uci", "uci_names"]
