"""Whatever a converted network does, `torch.compile` takes in one graph, and the numbers stay the same.

The backend `eager` runs what Dynamo traced; Inductor is for the few tests of compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import momentprop as mp
from small import mlp

Feature = Callable[[], tuple[Callable[[Tensor], Any], Tensor]]


def of(*layers: nn.Module, x: Tensor, **options: Any) -> tuple[mp.BayesianNetwork, Tensor]:
    return mp.convert(nn.Sequential(*layers).eval(), x[:1], **options), x


def classified(*head: nn.Module) -> tuple[Callable[[Tensor], Any], Tensor]:
    bnn, x = of(mlp(), *head, x=torch.randn(5, 4), fidelity="accurate")

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        found = mp.classify(bnn(x))
        return found.probs, found.epistemic

    return predict, x


def regressed() -> tuple[Callable[[Tensor], Any], Tensor]:
    layers = nn.Dropout(0.1), nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.1), nn.Linear(6, 2)
    bnn, x = of(*layers, x=torch.randn(3, 4), jumps=4)
    return lambda x: mp.regress(bnn(x), noise=0.1).nll(x[:, :2]), x


def ensemble() -> tuple[mp.Ensemble, Tensor]:
    x = torch.randn(5, 1, 8, 8)
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.3)
    members = [of(*layers, nn.Linear(36, 3), x=x)[0] for _ in range(2)]
    return mp.Ensemble(members, stack=True), x


class Positions(nn.Module):
    """Dropout of a parameter is one mask for the whole batch, so every sample is a network of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.out = nn.Parameter(torch.randn(4, 8)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((x + F.dropout(self.positions, 0.1, self.training)).relu().mean(1))


class Path(nn.Module):
    """Stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return x + (y * y.new_empty(y.shape[0], 1).bernoulli_(0.8) / 0.8 if self.training else y)


class Uncovered(nn.Module):
    """Operators without a rule."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.lgamma(torch.topk(x, 3, 1).values + 5)


DEEP = [layer for _ in range(6) for layer in (nn.Linear(24, 24), nn.ReLU(), nn.Dropout(0.2))]
FEATURES: dict[str, Feature] = {
    "paper": lambda: of(mlp(), x=torch.randn(3, 4), fidelity="paper"),
    "fast": lambda: of(mlp(), x=torch.randn(3, 4), fidelity="fast"),
    "classification": classified,
    "classification, softmax": lambda: classified(nn.Softmax(-1)),
    "classification, sigmoid": lambda: classified(nn.Sigmoid()),
    "regression with jumps": regressed,
    "ensemble": ensemble,
    "activations": lambda: of(
        nn.Dropout(0.5),
        nn.Linear(6, 6),
        nn.GELU(),
        nn.PReLU(6),
        nn.Tanh(),
        nn.Linear(6, 2),
        x=torch.randn(3, 6),
    ),
    "rare jumps": lambda: of(
        nn.Dropout(0.02), nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3), x=torch.randn(5, 6)
    ),
    "many layers": lambda: of(
        nn.Linear(2, 24), nn.ReLU(), nn.Dropout(0.2), *DEEP, nn.Linear(24, 1), x=torch.randn(5, 2)
    ),
    "dropout before a pooling": lambda: of(
        nn.Conv2d(1, 2, 3), nn.Dropout(0.3), nn.MaxPool2d(2), nn.Flatten(), x=torch.randn(2, 1, 6, 6)
    ),
    "one mask for the batch": lambda: of(Positions(), x=torch.randn(3, 4, 8)),
    "paths": lambda: of(Path(), Path(), nn.LayerNorm(8), nn.Linear(8, 3), x=torch.randn(4, 8)),
    "linearized": lambda: of(
        nn.Dropout(0.3), Uncovered(), nn.Linear(3, 2), x=torch.randn(4, 6), unsupported="linearize"
    ),
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.filterwarnings("ignore::momentprop.FidelityNote")
def test_in_one_graph(feature: str) -> None:
    function, x = FEATURES[feature]()
    with torch.no_grad():
        found = torch.compile(function, fullgraph=True, backend="eager")(x)
        same(found, function(x))


def same(found: Any, expected: Any) -> None:
    if isinstance(expected, list | tuple):
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    elif isinstance(expected, mp.Moments):
        for name in ("mean", "variance", "covariance"):
            same(getattr(found, name), getattr(expected, name))
    else:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_any_batch_size_and_uncertain_inputs() -> None:
    bnn = mp.convert(mlp().eval(), torch.zeros(2, 4))
    compiled = torch.compile(bnn, fullgraph=True, backend="eager", dynamic=True)
    for batch in (2, 3, 9):
        x = torch.randn(batch, 4)
        same(compiled(x), bnn(x))
        noisy = mp.Moments(x, torch.rand_like(x))
        expected = bnn(noisy)  # a pattern of uncertain inputs is met outside first
        same(compiled(noisy), expected)
