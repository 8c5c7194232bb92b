"""The network to be measured, in its forms: plain, converted, or as a file has it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from momentprop import tiers
from momentprop.convert import convert
from momentprop.lowering.frozen import FrozenNetwork
from momentprop.network import BayesianNetwork
from momentprop_reproduction.paper_network import network


@dataclass
class Subject:
    """A plain network, or one out of a file, or both, with examples of its inputs.

    The first dimension of every input is the batch.
    """

    name: str
    inputs: tuple[Tensor, ...]
    model: nn.Module | None = None
    saved: nn.Module | None = None
    _converted: dict[str, BayesianNetwork] = field(default_factory=dict)
    _frozen: dict[str, FrozenNetwork] = field(default_factory=dict)

    def batch(self, size: int) -> tuple[Tensor, ...]:
        """Inputs: normal numbers; indices and masks are rows of the examples."""
        return tuple(
            torch.randn(size, *x.shape[1:], dtype=x.dtype)
            if x.is_floating_point()
            else x[torch.arange(size) % len(x)]
            for x in self.inputs
        )

    def plain(self) -> nn.Module:
        if self.model is None:
            raise LookupError("a saved network does not hold the plain one: name it with --original")
        return self.model

    def converted(self, tier: str) -> BayesianNetwork:
        if tier not in self._converted:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the summary of a conversion is not this one's subject
                self._converted[tier] = convert(self.plain(), self.inputs, tier)
        return self._converted[tier]

    def sampled(self) -> BayesianNetwork:
        """The network to draw samples from: every tier has the same trace, and this one is built soonest."""
        return self.converted(tiers.PAPER.name)

    def frozen(self, tier: str) -> FrozenNetwork:
        """Return the network frozen for inference: what depends on weights alone is computed once."""
        if tier not in self._frozen:
            self._frozen[tier] = self.converted(tier).freeze()
        return self._frozen[tier]

    @property
    def shapes(self) -> list[str]:
        return [_shape(x.dtype, x.shape[1:]) for x in self.inputs]


def paper_cnn(n_outputs: int = 10) -> nn.Sequential:
    """The paper's CIFAR-10 network with random weights: times do not depend on them."""
    return network(n_outputs).eval()


def paper_regression() -> nn.Sequential:
    """The paper's network with one output, as for regression: `momentprop bench` can name it."""
    return paper_cnn(1)


def paper_subject(n_outputs: int = 10) -> Subject:
    torch.manual_seed(0)
    name = f"the paper's CNN, {n_outputs} output{'s' * (n_outputs != 1)}"
    return Subject(name, (torch.randn(2, 3, 32, 32),), paper_cnn(n_outputs))


def _shape(dtype: torch.dtype, sizes: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}[batch{''.join(f', {n}' for n in sizes)}]"
