"""The guard of a conversion: a sweep that samples contradict is not believed."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import momentprop as mp
from small import cnn

aten = torch.ops.aten


def wrong_by(factor: float) -> nn.Module:
    """A network with a rule whose linear part exaggerates."""

    @mp.rule(aten.tanh.default, override=True)
    def tanh(x: mp.Moments) -> mp.Propagated:
        gain = 1 - torch.tanh(x.mean).square()
        out = mp.Moments(torch.tanh(x.mean), gain.square() * x.variance)
        return mp.Propagated(out, lambda: mp.scaled(factor * gain))

    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))


@pytest.mark.parametrize("factor", [0.1, 8.0])
def test_the_default_leaves_a_sweep_that_samples_contradict(factor: float) -> None:
    model, x = wrong_by(factor), torch.randn(6, 8)
    with pytest.warns(mp.FidelityNote, match="times that of 32 samples of MC dropout"):
        network = mp.convert(model, x)
    assert network.tier is mp.tiers.FAST
    mc = mp.monte_carlo(network, x, n_samples=2000)
    assert 0.8 < (network(x).std / mc.std).detach().median() < 1.25


def test_a_tier_that_was_asked_for_is_kept_and_the_doubt_said() -> None:
    with pytest.warns(mp.FidelityNote, match="tier 'accurate' may be wrong here: .* its std is .* times"):
        network = mp.convert(wrong_by(8.0), torch.randn(6, 8), "accurate")
    assert network.tier is mp.tiers.ACCURATE


@pytest.mark.parametrize("factor", [0.8, 1.5])
def test_small_differences_are_no_reason(factor: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert mp.convert(wrong_by(factor), torch.randn(6, 8)).tier is mp.tiers.ACCURATE


@pytest.mark.parametrize("x", [torch.zeros(0, 3, 8, 8), torch.zeros(2, 3, 8, 8)])
def test_examples_that_tell_nothing_are_no_reason(x: torch.Tensor) -> None:
    assert mp.convert(cnn().eval(), x).tier is mp.tiers.ACCURATE


def test_sharp_probabilities_are_no_reason_to_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both estimates integrate the softmax at the end."""
    monkeypatch.setattr("momentprop.guard.monte_carlo", None)
    torch.manual_seed(0)
    last = nn.Linear(64, 4)
    last.weight.data.mul_(8)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.2), last, nn.Softmax(-1)).eval()
    assert mp.convert(model, torch.randn(16, 8)).tier is mp.tiers.ACCURATE
