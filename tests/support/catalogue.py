"""How networks enter the catalogue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, Any]


@dataclass(frozen=True)
class Entry:
    """One network of the catalogue."""

    name: str
    needs: str  # the package it comes from; "" for plain PyTorch
    build: Callable[[], Built]


ZOO: dict[str, Entry] = {}


def add(name: str, build: Callable[[], Built], needs: str = "") -> None:
    if name in ZOO:
        raise ValueError(f"{name} is in the catalogue already")
    ZOO[name] = Entry(name, needs, build)


def network(build: Callable[[], Built]) -> Callable[[], Built]:
    """Decorator: a function that builds a plain PyTorch network, under the function's name."""
    add(f"plain_{build.__name__}", build)
    return build


def settle(model: nn.Module, inputs: torch.Tensor) -> nn.Module:
    """Give batch norms the statistics of the inputs: with those they start with, deep networks fade out."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    model.eval()
    for norm in norms:
        norm.train()
        norm.momentum = None
    with torch.no_grad():
        model(torch.cat([inputs, torch.randn_like(inputs), torch.randn_like(inputs)]))
    return model.eval()


class Only(nn.Module):
    """One output of a network that returns several, as users wrap it."""

    def __init__(self, model: nn.Module, output: str) -> None:
        super().__init__()
        self.model, self.output = model, output

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return getattr(self.model(*args, **kwargs), self.output)


def images(batch: int = 3, channels: int = 3, size: int = 32, dims: int = 2) -> torch.Tensor:
    return torch.randn(batch, channels, *[size] * dims)
