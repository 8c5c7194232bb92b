"""The distribution of outputs that jump, against the enumeration of all sums of jumps."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

import momentprop as mp
from momentprop.moments import Jumps

M = 6


def jumping(p: float = 0.02, rest: float = 0.3, size: float = 5.0, dtype=torch.float64) -> mp.Moments:
    """Outputs [7, 2] with six jumps each and some other variance."""
    generator = torch.Generator().manual_seed(0)
    effects = size * torch.randn(M, 7, 2, generator=generator, dtype=torch.float64)
    mean = torch.randn(7, 2, generator=generator, dtype=torch.float64)
    jumps = Jumps(effects, torch.full_like(effects, p))
    return mp.Moments(mean, jumps.variance + rest, jumps=jumps).to(dtype)


def enumerated(moments: mp.Moments, noise: float) -> torch.distributions.MixtureSameFamily:
    """All 2^m sums of jumps, and what else varies as a normal around each."""
    jumps = moments.jumps
    assert jumps is not None
    dropped = torch.tensor(list(itertools.product((0.0, 1.0), repeat=M)), dtype=torch.float64)
    p = jumps.probabilities[:, 0, 0]
    chances = (dropped * p + (1 - dropped) * (1 - p)).prod(1)
    sums = torch.einsum("sm,mbk->bks", dropped, jumps.effects)
    sums = sums - (chances * sums).sum(-1, keepdim=True) + moments.mean[..., None]
    std = (moments.variance - jumps.variance + noise).sqrt()[..., None].expand_as(sums)
    normal = torch.distributions.Normal(sums, std)
    return torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(chances.expand_as(sums)), normal
    )


@pytest.mark.parametrize("p", [0.005, 0.1, 0.5])
def test_density_is_that_of_all_sums_of_jumps(p: float) -> None:
    moments = jumping(p)
    found, exact = mp.regress(moments, noise=0.5), enumerated(moments, 0.5)
    for z in torch.linspace(-4, 4, 33):
        y = moments.mean + z * moments.std
        density = exact.log_prob(y).exp()
        scale = 1 / (moments.variance + 0.5).sqrt()
        assert ((found.log_prob(y).exp() - density).abs() < 0.03 * density + 0.002 * scale).all()
        assert ((found.cdf(y) - exact.cdf(y)).abs() < 0.005).all()


def test_tails_are_those_of_several_jumps_at_once() -> None:
    """Within 0.5 where the density is down to exp(-40); a single normal is off by more than 10."""
    moments = jumping(0.01)
    found, exact = mp.regress(moments, noise=0.5), enumerated(moments, 0.5)
    plain = mp.regress(mp.Moments(moments.mean, moments.variance), noise=0.5)
    compared, off = 0, 0.0
    for distance in torch.linspace(-30, 30, 61):
        y = moments.mean + distance
        expected = exact.log_prob(y)
        there = expected > -40
        compared += int(there.sum())
        assert ((found.log_prob(y) - expected).abs()[there] < 0.5).all()
        off = max(off, (plain.log_prob(y) - expected).abs()[there].max().item())
    assert compared > 400
    assert off > 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rest", [0.3, 0.0])
@pytest.mark.parametrize("p", [0.001, 0.05, 0.7])
def test_mean_and_variance_stay(p: float, rest: float, dtype) -> None:
    moments = jumping(p, rest, dtype=dtype)
    found = mp.regress(moments, noise=0.1)
    torch.testing.assert_close(found.mean, moments.mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.epistemic, moments.variance, rtol=1e-4, atol=0)
    assert (found.epistemics >= 0).all()
    torch.testing.assert_close(found.weights.sum(0), torch.ones_like(moments.mean))


def test_density_integrates_to_one() -> None:
    moments = jumping()
    found = mp.regress(moments, noise=0.2)
    grid = torch.linspace(-60, 60, 1201, dtype=torch.float64)
    total = sum(found.log_prob(torch.full_like(moments.mean, y)).exp() for y in grid.tolist()) * 0.1
    torch.testing.assert_close(total, torch.ones_like(moments.mean), rtol=1e-6, atol=0)


def test_quantiles_and_draws_follow_the_distribution() -> None:
    moments = jumping()
    found = mp.regress(moments, noise=0.2)
    for q in (0.001, 0.5, 0.98):
        torch.testing.assert_close(found.cdf(found.quantile(q)), torch.full_like(moments.mean, q))
    draws = found.sample((100_000,), torch.Generator().manual_seed(0))
    torch.testing.assert_close(draws.mean(0), found.mean, rtol=0, atol=0.06)
    torch.testing.assert_close(draws.var(0), found.variance, rtol=0.06, atol=0)
    inside = (draws < found.quantile(0.98)).double().mean(0)
    torch.testing.assert_close(inside, torch.full_like(inside, 0.98), rtol=0, atol=0.003)


def test_float32_is_close_to_float64_far_out_too() -> None:
    exact = mp.regress(jumping(), noise=0.5)
    found = mp.regress(jumping(dtype=torch.float32), noise=0.5)
    for distance in (-25.0, -3.0, 0.0, 8.0, 25.0):
        y = exact.mean + distance
        torch.testing.assert_close(
            found.log_prob(y.float()).double(), exact.log_prob(y), rtol=1e-3, atol=2e-3
        )


def test_without_effects_it_is_normal() -> None:
    mean, zero = torch.randn(4, 1).double(), torch.zeros(3, 4, 1).double()
    for variance in (0.0, 2.0):
        moments = mp.Moments(mean, variance, jumps=Jumps(zero, zero + 0.1))
        found = mp.regress(moments, noise=0.5)
        expected = mp.regress(mp.Moments(mean, variance), noise=0.5)
        torch.testing.assert_close(found.log_prob(mean + 1), expected.log_prob(mean + 1))


def test_gradients_flow() -> None:
    leaf = jumping()
    effects = leaf.jumps.effects.clone().requires_grad_()
    jumps = Jumps(effects, leaf.jumps.probabilities)
    y = leaf.mean + 3

    def nll(jumps: Jumps) -> Tensor:
        moments = mp.Moments(leaf.mean, jumps.variance + 0.3, jumps=jumps)
        return mp.regress(moments, noise=2.0).nll(y).sum()

    (found,) = torch.autograd.grad(nll(jumps), effects)
    assert found.isfinite().all()
    eps = torch.zeros_like(effects)
    eps[0, 0, 0] = 0.2  # across several steps of the lattice
    with torch.no_grad():
        slope = (
            nll(Jumps(effects + eps, jumps.probabilities)) - nll(Jumps(effects - eps, jumps.probabilities))
        ) / 0.4
    assert slope.item() == pytest.approx(found[0, 0, 0].item(), rel=0.15, abs=1e-3)


def test_fit_noise_ensembles_and_heteroscedastic_networks() -> None:
    moments = jumping()
    y = mp.regress(moments, noise=2.0).sample((), torch.Generator().manual_seed(0))
    noise = mp.fit_noise(moments, y)
    grid = [noise.item() * factor for factor in (0.8, 1.0, 1.25)]
    low, best, high = (mp.regress(moments, noise=v).nll(y).mean().item() for v in grid)
    assert best <= min(low, high)
    normal = mp.Moments(moments.mean + 1, 0.5)
    mixed = mp.regress([moments, normal], noise=0.5)
    each = [mp.regress(m, noise=0.5).log_prob(y).exp() for m in (moments, normal)]
    torch.testing.assert_close(mixed.log_prob(y).exp(), (each[0] + each[1]) / 2)
    torch.testing.assert_close(mixed.mean, moments.mean + 0.5)
    logs = mp.Moments(torch.full_like(moments.mean, math.log(0.5)), 0.0)
    pair = mp.regress((moments, logs), heteroscedastic=True)
    torch.testing.assert_close(pair.log_prob(y), mp.regress(moments, noise=0.5).log_prob(y))
    joined = mp.Moments(
        torch.cat([moments.mean, logs.mean], 1),
        torch.cat([moments.variance, logs.variance], 1),
        jumps=Jumps(
            *(torch.cat([v, v * 0], 2) for v in (moments.jumps.effects, moments.jumps.probabilities))
        ),
    )
    torch.testing.assert_close(mp.regress(joined, heteroscedastic=True).log_prob(y), pair.log_prob(y))


def test_a_network_has_the_likelihood_of_its_samples() -> None:
    """Small p, dropout of inputs and units: closer to MC's mixture than MC's own moments are as a normal."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Dropout(0.01), nn.Linear(6, 30), nn.ReLU(), nn.Dropout(0.01), nn.Linear(30, 1)
    ).double()
    for layer in (model[1], model[4]):
        nn.init.normal_(layer.weight)
    x = 2 * torch.randn(40, 6).double()
    sampled = mp.monte_carlo(model, x, 40_000, keep_samples=True)
    out = mp.convert(model, x, jumps=16)(x)
    y = sampled.samples[torch.arange(40) * 7, torch.arange(40)] + torch.randn(40, 1).double()
    with torch.no_grad():
        truth, ours, normal = (
            mp.regress(o, noise=1.0).nll(y)
            for o in (sampled, out, mp.Moments(sampled.mean, sampled.variance))
        )
    assert (ours - truth).abs().mean() < 0.02
    assert (normal - truth).abs().mean() > 0.5
