"""Dropout is joined with softmax and norms behind it where that has a rule, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from momentprop.capture.trace import trace
from momentprop.passes.rewrites import REWRITES
from networks import Apply
from passed import operators, passed, rewritten, run

SOFTMAX = torch.ops.momentprop.dropped_softmax.default
NORM = torch.ops.momentprop.dropped_norm.default


def joined(*layers: nn.Module, size: int = 16) -> list[Any]:
    """Which operators there are. For every mask the function is the same."""
    model = nn.Sequential(nn.Linear(8, size), *layers, nn.Linear(size, 2)).double().eval()
    inputs = (torch.randn(2, 8, dtype=torch.float64),)
    before = trace(model, inputs)
    after = passed(before, REWRITES)
    one, other = (run(graph, model, inputs, masked=True) for graph in (before, after))
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    return [op for op in operators(after) if op in (SOFTMAX, NORM)]


@pytest.mark.parametrize(
    "layers",
    [
        (nn.Softmax(-1),),
        (nn.LogSoftmax(1),),
        (nn.Sigmoid(), nn.Softmax(-1)),
        (Apply(lambda x: 3 * x + 1, "affine"), nn.Softmax(-1)),
        (nn.Unflatten(1, (4, 4)), nn.Softmax(1), nn.Flatten()),
        (nn.LayerNorm(16),),
        (nn.Sigmoid(), nn.LayerNorm(16)),
        (nn.RMSNorm(16),),
        (nn.GELU(), nn.RMSNorm(16, eps=0.1)),
        (nn.LayerNorm(16, elementwise_affine=False),),
    ],
    ids=str,
)
def test_joined(layers: tuple[nn.Module, ...]) -> None:
    assert len(joined(nn.Dropout(0.3), *layers)) == 1


@pytest.mark.parametrize(
    "layers",
    [
        (nn.Dropout(0.3), nn.Sigmoid(), nn.RMSNorm(16)),
        (nn.Dropout(0.3), Apply(lambda x: x + x.flip(1), "both"), nn.Softmax(-1)),
        (nn.Dropout(0.3), Apply(lambda x: x + x.softmax(-1), "used twice")),
        (nn.AlphaDropout(0.3), nn.Softmax(-1)),
        (nn.Dropout(0.3), nn.Unflatten(1, (4, 4)), nn.LayerNorm(4), nn.Flatten()),
    ],
    ids=str,
)
def test_left_alone(layers: tuple[nn.Module, ...]) -> None:
    assert not joined(*layers)


def test_norms_of_many_elements_stay() -> None:
    assert not joined(nn.Dropout(0.3), nn.LayerNorm(256), size=256)


def test_outputs_keep_their_logits() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.3), nn.Softmax(-1))
    _, after = rewritten(model, torch.randn(2, 8, dtype=torch.float64))
    assert SOFTMAX not in operators(after)
