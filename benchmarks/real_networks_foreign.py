"""Finds networks that others published: installed packages, and checked-out repositories in one folder."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn

Head = tuple[str, int | None] | None
LOGITS, SOFTMAX, SIGMOIDS, NUMBERS = ("logits", 1), ("softmax", 1), ("sigmoid", None), None


class NotHereError(Exception):
    """Says what of a network is missing, and how to get it."""


@dataclass(eq=False)
class Foreign:
    """One network with inputs; `head` says whether its outputs are logits, probabilities or numbers."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    source: str  # of the inputs, for the reader
    head: Head


def folder(networks: Path, repository: str) -> Path:
    """Return the checked-out repository owner/name in the folder of networks."""
    path = networks / repository.split("/")[1]
    if not path.is_dir():
        raise NotHereError(f"git clone https://github.com/{repository} into the folder given by --networks")
    return path


def module(name: str, package: str, without: tuple[str, ...] = ()) -> ModuleType:
    """Import a module of a package, with idle objects for modules that it imports and does not need here."""
    with _idle(without):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise NotHereError(f"pip install --no-deps {package} (missing: {error.name})") from error


def package_folder(name: str, package: str) -> Path:
    """Return where a package lies, without importing it."""
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise NotHereError(f"pip install --no-deps {package}")
    return Path(found.submodule_search_locations[0])


def weights(path: Path) -> Any:
    """Load saved tensors, and nothing that runs code."""
    return torch.load(path, map_location="cpu", weights_only=True)


def module_file(path: Path, without: tuple[str, ...] = ()) -> ModuleType:
    """Import one file of a repository."""
    name = "real_networks_" + path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.exists():
        raise NotHereError(f"{path.name} is not where the repository has it")
    loaded = importlib.util.module_from_spec(spec)
    with _idle(without):
        spec.loader.exec_module(loaded)
    return loaded


@contextlib.contextmanager
def _idle(names: tuple[str, ...]) -> Iterator[None]:
    missing = [name for name in names if name not in sys.modules and not _is_installed(name)]
    sys.modules.update({name: MagicMock(__spec__=None) for name in missing})
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
