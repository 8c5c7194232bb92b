"""Max unpooling with the indices of a max pooling, in every tier."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import momentprop as mp
from momentprop.capture.trace import trace
from momentprop.passes.canonical import CANONICAL
from passed import operators, passed

aten = torch.ops.aten


class Segmenter(nn.Module):
    """Dropout, convolution, pooling with indices, unpooling."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.dropout, self.first = nn.Dropout(0.3), nn.Conv2d(2, 3, 3, padding=1)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.dropout(x))
        y, indices = F.max_pool2d(x, 2, return_indices=True, **self.options)
        return F.max_unpool2d(y, indices, 2, output_size=x.shape[-2:], **self.options)


@pytest.mark.parametrize("fidelity", ["paper", "fast", "accurate"])
def test_behind_a_convolution(fidelity: str) -> None:
    """What the convolution tells of neighbours does not get in the way."""
    torch.manual_seed(0)
    model, x = Segmenter().double().eval(), torch.randn(2, 2, 6, 6, dtype=torch.float64)
    out = mp.convert(model, x, fidelity)(x)
    mc = mp.monte_carlo(model, x, n_samples=10_000)
    assert ((out.mean - mc.mean).abs() < 0.3 * mc.std.max()).all()
    assert 0.7 < (out.variance.sum() / mc.variance.sum()).sqrt() < 1.4


@pytest.mark.parametrize("fidelity", ["paper", "fast", "accurate"])
def test_without_noise_it_is_the_operator(fidelity: str) -> None:
    model, x = Segmenter().double().eval(), torch.randn(2, 2, 6, 6, dtype=torch.float64)
    for variance in (0.0, 1e-12):
        model.dropout.p = 0.0
        out = mp.convert(model, mp.Moments(x, variance), fidelity)(mp.Moments(x, variance))
        with torch.no_grad():
            torch.testing.assert_close(out.mean, model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "size"), [({"stride": 1}, 6), ({"padding": 1}, 6), ({}, 7)], ids=["stride", "padding", "rest"]
)
def test_only_windows_that_tile_the_input_are_joined(options: dict[str, Any], size: int) -> None:
    made = passed(trace(Segmenter(**options), torch.randn(2, 2, size, size)), CANONICAL)
    assert aten.max_unpool2d.default in operators(made)
    made = passed(trace(Segmenter(), torch.randn(2, 2, 6, 6)), CANONICAL)
    assert aten.max_unpool2d.default not in operators(made)
