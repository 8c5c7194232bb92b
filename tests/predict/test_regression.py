"""Predictive distributions of real targets."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

import momentprop as mp
from momentprop.sample import SampledMoments


def sampled(samples: Tensor) -> SampledMoments:
    return SampledMoments(samples.mean(0), samples.var(0), n_samples=len(samples), kept=samples)


MEAN, VARIANCE = torch.randn(8, 2).double(), torch.rand(8, 2).double()
Y = torch.randn(8, 2).double()


def test_normal_agrees_with_torch() -> None:
    found = mp.regress(mp.Moments(MEAN, VARIANCE), noise=0.5)
    normal = torch.distributions.Normal(MEAN, (VARIANCE + 0.5).sqrt())
    torch.testing.assert_close(found.log_prob(Y), normal.log_prob(Y))
    torch.testing.assert_close(found.nll(Y), -normal.log_prob(Y))
    torch.testing.assert_close(found.cdf(Y), normal.cdf(Y))
    torch.testing.assert_close(found.std, normal.stddev)
    torch.testing.assert_close(found.quantile(0.3), normal.icdf(torch.tensor(0.3)))
    low, high = found.interval(0.9)
    torch.testing.assert_close(normal.cdf(high) - normal.cdf(low), torch.full((8, 2), 0.9).double())
    torch.testing.assert_close(found.epistemic, VARIANCE)
    torch.testing.assert_close(found.aleatoric, torch.full((8, 2), 0.5).double())


def test_samples_are_a_mixture_of_normals() -> None:
    samples = torch.randn(30, 8, 2).double() * 3
    found = mp.regress(sampled(samples), noise=0.25)
    shape = torch.distributions.Categorical(torch.ones(8, 2, 30))
    mixture = torch.distributions.MixtureSameFamily(
        shape, torch.distributions.Normal(samples.movedim(0, -1), 0.5)
    )
    torch.testing.assert_close(found.log_prob(Y), mixture.log_prob(Y), check_dtype=False)
    torch.testing.assert_close(found.cdf(Y), mixture.cdf(Y), check_dtype=False)
    torch.testing.assert_close(found.mean, mixture.mean, check_dtype=False)
    torch.testing.assert_close(found.variance, mixture.variance, check_dtype=False)
    for q in (0.01, 0.5, 0.97):
        torch.testing.assert_close(found.cdf(found.quantile(q)), torch.full((8, 2), q).double())


def test_draws_follow_the_distribution() -> None:
    samples = torch.randn(5, 3).double() * 2
    found = mp.regress(sampled(samples), noise=0.25)
    draws = found.sample((200_000,), torch.Generator().manual_seed(0))
    assert draws.shape == (200_000, 3)
    torch.testing.assert_close(draws.mean(0), found.mean, rtol=0, atol=0.03)
    torch.testing.assert_close(draws.var(0), found.variance, rtol=0.02, atol=0)
    again = found.sample((200_000,), torch.Generator().manual_seed(0))
    assert torch.equal(draws, again)


def test_plain_network_and_ensemble() -> None:
    plain = mp.regress(MEAN, noise=0.25)
    assert (plain.epistemic == 0).all()
    torch.testing.assert_close(plain.std, torch.full((8, 2), 0.5).double())
    members = [mp.Moments(MEAN, VARIANCE), mp.Moments(MEAN + 2, VARIANCE * 3)]
    mixed = mp.regress(members, noise=0.25)
    torch.testing.assert_close(mixed.mean, MEAN + 1)
    torch.testing.assert_close(mixed.epistemic, VARIANCE * 2 + 1)  # between the members: 1
    each = torch.stack([mp.regress(m, noise=0.25).log_prob(Y).exp() for m in members]).mean(0)
    torch.testing.assert_close(mixed.log_prob(Y).exp(), each)


def test_heteroscedastic_network() -> None:
    log_mean, log_variance = torch.randn(8, 2).double(), torch.rand(8, 2).double()
    pair = (mp.Moments(MEAN, VARIANCE), mp.Moments(log_mean, log_variance))
    found = mp.regress(pair, heteroscedastic=True)
    noise = torch.distributions.LogNormal(log_mean, log_variance.sqrt()).mean
    torch.testing.assert_close(found.aleatoric, noise)
    torch.testing.assert_close(found.variance, VARIANCE + noise)
    joined = mp.Moments(torch.cat([MEAN, log_mean], 1), torch.cat([VARIANCE, log_variance], 1))
    torch.testing.assert_close(mp.regress(joined, heteroscedastic=True).log_prob(Y), found.log_prob(Y))
    plain = mp.regress(torch.cat([MEAN, log_mean], 1), heteroscedastic=True)
    torch.testing.assert_close(plain.std, (log_mean / 2).exp())
    samples = torch.randn(40, 8, 4).double()
    of_samples = mp.regress(sampled(samples), heteroscedastic=True)
    expected = torch.distributions.Normal(samples[..., :2], (samples[..., 2:] / 2).exp()).log_prob(Y)
    torch.testing.assert_close(of_samples.log_prob(Y), expected.logsumexp(0) - torch.tensor(40.0).log())


def test_ensemble_of_heteroscedastic_networks() -> None:
    """A list is members, a tuple the two heads of one network."""
    one = mp.Moments(torch.tensor([[0.0, 0.0]]), 0.1)
    two = mp.Moments(torch.tensor([[5.0, 0.0]]), 0.1)
    mixed = mp.regress([one, two], heteroscedastic=True)
    torch.testing.assert_close(mixed.mean, torch.tensor([[2.5]]))
    torch.testing.assert_close(mixed.epistemic, torch.tensor([[0.1 + 6.25]]))
    pair = (mp.Moments(torch.zeros(3), 0.1), sampled(torch.randn(4, 3)))
    assert len(mp.regress(pair, heteroscedastic=True).means) == 4


@pytest.mark.parametrize("output", ["moments", "samples", "plain"])
def test_noise_fits_by_likelihood(output: str) -> None:
    """Against a fine grid; and on many data it is the noise that made them."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(5000, generator=generator).double()
    spread = torch.rand(5000, generator=generator).double() * 0.5
    truth = mean + spread.sqrt() * torch.randn(5000, generator=generator).double()
    y = truth + 0.8 * torch.randn(5000, generator=generator).double()
    given = {
        "moments": mp.Moments(mean, spread),
        "samples": sampled(mean + spread.sqrt() * torch.randn(50, 5000, generator=generator).double()),
        "plain": truth,
    }[output]
    found = mp.fit_noise(given, y)
    grid = torch.linspace(0.3, 1.2, 181).double()
    best = grid[torch.stack([mp.regress(given, noise=float(s)).nll(y).mean() for s in grid]).argmin()]
    assert abs(found - best) <= 0.006
    assert abs(found - 0.64) < 0.05
    closed = mp.fit_noise(given, y, method="closed_form")
    assert abs(closed - 0.64) < 0.06


def test_noise_where_predictions_explain_everything() -> None:
    y = torch.randn(100)
    for method in ("likelihood", "closed_form"):
        found = mp.fit_noise(mp.Moments(y + 0.1 * torch.randn(100), 5.0), y, method=method)
        assert 0 < found < 1e-3
        exact = mp.fit_noise(y, y, method=method)
        assert 0 <= exact < 1e-6
        assert exact.isfinite()


def test_end_to_end() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1)).eval()
    x = torch.randn(40, 1)
    y = model(x).detach() + 0.3 * torch.randn(40, 1)
    bnn = mp.convert(model, x)
    found = mp.regress(bnn(x), noise=mp.fit_noise(bnn(x), y))
    mc = mp.monte_carlo(model, x, 5000)
    of_samples = mp.regress(mc, noise=mp.fit_noise(mc, y))
    assert abs(found.nll(y).mean() - of_samples.nll(y).mean()) < 0.02
    served = json.loads(json.dumps(found.to_dict()))
    assert set(served) == {"mean", "std", "total", "aleatoric", "epistemic", "abstain", "interval"}
    found.nll(y).mean().backward()
    assert model[0].weight.grad is not None


def test_missing_noise_is_named_once() -> None:
    moments = mp.Moments(MEAN, VARIANCE)
    for output in (moments, [moments, moments]):
        with pytest.warns(UserWarning, match="fit_noise.* noise=0") as notes:
            found = mp.regress(output)
        assert len(notes) == 1
        assert notes[0].filename == __file__
        torch.testing.assert_close(found.variance, mp.regress(output, noise=0).variance)


def test_clear_errors() -> None:
    moments = mp.Moments(MEAN, VARIANCE)
    with pytest.raises(ValueError, match="must not be negative"):
        mp.regress(moments, noise=-1.0)
    with pytest.raises(ValueError, match="heteroscedastic"):
        mp.regress(moments, noise=1.0, heteroscedastic=True)
    with pytest.raises(ValueError, match="must be even"):
        mp.regress(mp.Moments(MEAN[:, :1], VARIANCE[:, :1]), heteroscedastic=True)
    with pytest.raises(TypeError, match="must hold Moments"):
        mp.regress(3.0, noise=1.0)
    with pytest.raises(mp.InputError, match=r"several outputs \(0, 1\); say with select="):
        mp.regress((moments, moments), noise=1.0)
    with pytest.raises(ValueError, match="floating-point"):
        mp.regress(torch.tensor([1, 2]), noise=1.0)
    with pytest.raises(ValueError, match="must not be negative or NaN"):
        mp.regress(moments, noise=float("nan"))
    with pytest.raises(ValueError, match="y is empty"):
        mp.fit_noise(torch.zeros(0), torch.zeros(0))
    assert mp.fit_noise(torch.zeros(4), torch.tensor([1, -1, 1, -1])).dtype == torch.float32
    assert mp.regress(moments, noise=1.0).sample((0,)).shape == (0, 8, 2)
    found = mp.regress(moments, noise=1.0)
    with pytest.raises(ValueError, match="y has shape"):
        found.nll(Y[:, 0])
    with pytest.raises(ValueError, match="level must lie"):
        found.interval(1.0)
    with pytest.raises(ValueError, match="q must lie"):
        found.quantile(0.0)
    with pytest.raises(ValueError, match="y has shape"):
        mp.fit_noise(moments, Y[:, 0])
    with pytest.raises(ValueError, match="NaN"):
        mp.fit_noise(moments, Y * torch.nan)
    with pytest.raises(ValueError, match="method must be"):
        mp.fit_noise(moments, Y, method="guess")
    with pytest.raises(ValueError, match="equally many samples"):
        mp.regress([sampled(torch.randn(3, 8)), torch.randn(8)], noise=1.0)
