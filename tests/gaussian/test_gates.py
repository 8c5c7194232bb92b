"""tanh of a Gaussian in few operators: what tanh in many gives."""

from __future__ import annotations

import pytest
import torch

from momentprop.gaussian.gates import tanh_in_few
from momentprop.gaussian.logistic import tanh_response


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 6e-8), (torch.float32, 5e-7)])
def test_moments_and_gain(dtype: torch.dtype, error: float) -> None:
    mean, variance = torch.meshgrid(
        torch.linspace(-8, 8, 97, dtype=dtype), torch.logspace(-8, 3, 199, dtype=dtype), indexing="ij"
    )
    expected = tanh_response(mean.double(), variance.double())
    for mine, theirs in zip(tanh_in_few(mean)(mean, variance), expected, strict=True):
        assert (mine - theirs).abs().max() < error


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_std_relative_to_the_largest(dtype: torch.dtype) -> None:
    """To 0.6 % of the largest std that tanh makes of an input with this variance."""
    mean, variance = torch.meshgrid(
        torch.linspace(-8, 8, 97, dtype=dtype), torch.logspace(-8, 2, 199, dtype=dtype), indexing="ij"
    )
    _, expected, _ = tanh_response(mean.double(), variance.double())
    _, spread, _ = tanh_in_few(mean)(mean, variance)
    difference = (spread.double().sqrt() - expected.sqrt()).abs()
    assert (difference / expected.sqrt().amax(0)).max() < 0.006


def test_block_by_block() -> None:
    """Many elements are taken in parts: the same numbers."""
    mean, variance = torch.randn(3, 7001), torch.rand(3, 7001)
    response = tanh_in_few(mean)
    for whole, part in zip(response(mean, variance), response(mean[1], variance[1]), strict=True):
        torch.testing.assert_close(whole[1], part, rtol=1e-6, atol=1e-7)


def test_extremes() -> None:
    mean = torch.tensor([1e20, -1e20, 0.0, 3.0, 1e30])
    variance = torch.tensor([0.0, 1.0, 1e38, 0.0, 1e38])
    value, spread, gain = tanh_in_few(mean)(mean, variance)
    assert all(v.isfinite().all() for v in (value, spread, gain))
    assert spread.min() >= 0
    torch.testing.assert_close(value, torch.tensor([1.0, -1.0, 0.0, torch.tanh(mean[3]), 1.0]))
