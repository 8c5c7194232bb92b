"""The fast sampler of stacked networks is MC dropout: the same moments and likelihood as `mp.monte_carlo`."""

from __future__ import annotations

import math

import pytest
import torch

import momentprop as mp
from momentprop_reproduction.experiments import uci_sampling
from momentprop_reproduction.experiments.uci_draws import stream
from momentprop_reproduction.experiments.uci_sampling import Mixture, sample_mixture
from momentprop_reproduction.experiments.uci_training import Stack

N, N_FEATURES, N_HIDDEN = 30, 6, 20


def make_stack() -> Stack:
    generator = torch.Generator().manual_seed(0)
    parameters = torch.randn(2, (N_FEATURES + 2) * N_HIDDEN + 1, generator=generator, dtype=torch.float64)
    return Stack(parameters / math.sqrt(N_FEATURES), N_FEATURES, N_HIDDEN)


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, N_FEATURES, generator=generator, dtype=torch.float64)
    return x, torch.randn(N, generator=generator, dtype=torch.float64)


def sample(p: float, n_samples: int, noise: float = 0.25, seed: int = 0) -> Mixture:
    first, second, bias = (view[1] for view in make_stack().views())
    x, y = make_data()
    rng = stream(seed, "sampling")
    return sample_mixture(
        (first, second, bias), x, y, drop_probability=p, noise=noise, n_samples=n_samples, rng=rng
    )


@pytest.mark.parametrize("p", [0.005, 0.1, 0.4])
def test_moments_and_likelihood_are_those_of_monte_carlo(p: float) -> None:
    n_samples, noise = 20_000, 0.25
    x, y = make_data()
    ours = sample(p, n_samples, noise)
    mc = mp.monte_carlo(make_stack().network(1, p), x, n_samples, keep_samples=True)
    # both have errors of the same size; 30 values are compared
    assert ((ours.mean - mc.mean.squeeze(1)).abs() < 5 * 2**0.5 * mc.mean_error.squeeze(1)).all()
    difference = (ours.variance - mc.variance.squeeze(1)).abs()
    assert (difference < 5 * 2**0.5 * mc.variance_error.squeeze(1)).all()
    density = mp.regress(mc, noise=noise)
    each = torch.distributions.Normal(mc.samples.squeeze(2), noise**0.5).log_prob(y).exp()
    error = each.std(0) / each.mean(0) / n_samples**0.5  # of the logarithm of a mean
    expected = density.log_prob(y.unsqueeze(1)).squeeze(1)
    steady = error < 0.02  # elsewhere a few rare samples make the likelihood, and errors are not normal
    assert steady.sum() > N / 2
    assert ((ours.log_likelihood - expected).abs() < 5 * 2**0.5 * error)[steady].all()


def test_all_samples_count_however_they_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """T is no multiple of anything here; the same seed with other blocks is another sample."""
    whole = sample(0.1, 1003)
    monkeypatch.setattr(uci_sampling, "_ROWS", 64)
    monkeypatch.setattr(uci_sampling, "_CHUNK", 7 * N)
    cut = sample(0.1, 1003)
    error = (whole.variance / 1003).sqrt()
    assert ((whole.mean - cut.mean).abs() < 5 * 2**0.5 * error).all()
    assert not torch.equal(whole.mean, cut.mean)


def test_one_sample_is_a_normal_density() -> None:
    one = sample(0.1, 1, noise=0.5)
    _, y = make_data()
    expected = torch.distributions.Normal(one.mean, 2.0**-0.5).log_prob(y)
    torch.testing.assert_close(one.log_likelihood, expected)
    assert (one.variance == 0).all()


def test_a_target_far_from_all_samples_keeps_its_likelihood() -> None:
    """exp(-d^2 / (2 noise)) would be zero; its logarithm is not."""
    far = sample(0.1, 200, noise=1e-6)
    assert far.log_likelihood.isfinite().all()
    assert far.log_likelihood.min() < -1000
