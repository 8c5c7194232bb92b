"""Differential fuzzing: random networks in every tier, against the plain network, its Jacobian, and sampling.

About 85 networks by default; 4,500 with `pytest tests/test_fuzz.py --hypothesis-profile=long`, 2,000 of them
in `test_random_networks`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from torch import Tensor, nn

import momentprop as mp
from graphs import graphs
from momentprop import tiers
from momentprop.capture.trace import trace
from momentprop.tiers import Request
from networks import BATCH, Shape, linear_after_dropout, one_nonlinearity
from small_noise import SMALL, jacobian

# torch says so once per process, for the plain network too
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

examples = settings.default.max_examples  # 50, or 2000 in the long profile
fuzz = settings(deadline=None, suppress_health_check=list(HealthCheck))

MOST_OUTPUTS = 64  # per sample, that covariance is computed for


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> Iterator[None]:
    """On tensors this small threads only wait for each other."""
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)


def in_every_tier(model: nn.Module, x: Any, n_outputs: int) -> dict[str, mp.BayesianNetwork]:
    """As `convert` does, but tracing once, which takes most of the time."""
    traced = trace(model, x, dropout=nn.Module)
    uncertain = (isinstance(x, mp.Moments),)
    return {
        tier.name: mp.BayesianNetwork(model, traced, Request(tier), uncertain)
        for tier in tiers.ALL
        if not tier.sweeps or n_outputs <= MOST_OUTPUTS
    }


def assert_is_a_covariance(out: mp.Moments) -> None:
    """Finite, symmetric, positive semidefinite to rounding, its diagonal the variance."""
    covariance, batch = out.covariance, out.mean.shape[0]
    size = math.prod(out.mean.shape[1:])
    assert covariance.shape == (batch, size, size)
    assert covariance.isfinite().all()
    assert torch.equal(covariance, covariance.mT)
    assert torch.equal(covariance.diagonal(dim1=1, dim2=2), out.variance.reshape(batch, size))
    if batch:
        largest = out.variance.reshape(batch, size).amax(1, keepdim=True)
        smallest = torch.linalg.eigvalsh(covariance.double())
        assert (smallest >= -1e-5 * size * largest - 1e-30).all()


def quietened(model: nn.Module) -> nn.Module:
    """A copy with every drop probability 0: `p`, or `dropout` in recurrent and attention layers."""
    quiet = copy.deepcopy(model)
    for module in quiet.modules():
        for name in ("p", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return quiet


def uses_softmax(model: nn.Module) -> bool:
    return any(
        isinstance(m, (nn.Softmax, nn.MultiheadAttention)) or "softmax" in repr(m) for m in model.modules()
    )


def runs(model: nn.Module, x: Tensor) -> bool:
    """Some of torch's operators do not take an empty batch."""
    try:
        model(x)
    except (RuntimeError, IndexError, UserWarning):
        return False
    return True


@settings(fuzz, max_examples=examples if examples > 100 else examples // 2)
@given(graphs())
def test_random_networks(network: tuple[nn.Sequential, Shape]) -> None:
    """Converts in every tier; no NaN; variance >= 0; and at variance zero it is the plain network."""
    model, shape = network
    x = torch.randn(BATCH, *shape)
    with torch.no_grad():
        check_moments(model, x)
        check_without_noise(model.double(), x.double())


def check_moments(model: nn.Module, x: Tensor) -> None:
    plain = model(x)
    for tier, bnn in in_every_tier(model, x, plain[0].numel()).items():
        out = bnn(x)
        assert out.mean.shape == plain.shape
        assert out.mean.isfinite().all()
        assert out.variance.isfinite().all()
        assert (out.variance >= 0).all()
        if runs(model, x[:0]):
            empty = bnn(x[:0])
            assert empty.mean.shape[0] in (0, out.mean.shape[0])
        else:
            empty = None
        if tier == "accurate":
            assert_is_a_covariance(out)
            if empty is not None:
                assert_is_a_covariance(empty)
            for i in range(BATCH):  # samples do not influence each other
                alone = bnn(x[i : i + 1]).covariance[0]
                scale = out.variance[i].amax().item()
                torch.testing.assert_close(alone, out.covariance[i], rtol=1e-3, atol=1e-4 * scale + 1e-30)
        else:
            assert out.covariance is None


def check_without_noise(model: nn.Module, x: Tensor) -> None:
    """In float64: in float32 the plain network's own rounding would hide what is compared."""
    plain, quiet, certain = model(x), quietened(model), mp.Moments(x, 0.0)
    scale = plain.abs().amax().item() + 1
    for tier, bnn in in_every_tier(quiet, certain, plain[0].numel()).items():
        if tier == "paper" and uses_softmax(model):
            continue  # the paper's softmax is not softmax at variance zero
        still = bnn(certain)
        torch.testing.assert_close(still.mean, plain, rtol=1e-7, atol=1e-7 * scale)
        assert (still.variance.abs() <= 1e-15 * scale**2).all()
        if tier == "accurate":
            assert (still.covariance.abs() <= 1e-15 * scale**2).all()


@settings(fuzz, max_examples=examples // 4)
@given(graphs(calm=True))
def test_small_noise_is_carried_to_first_order(network: tuple[nn.Sequential, Shape]) -> None:
    """Any network is linear for small noise: the covariance is J J^T, exactly. In float64."""
    model, shape = network
    with torch.no_grad():
        check_first_order(model.double(), torch.randn(BATCH, *shape, dtype=torch.float64))


def check_first_order(model: nn.Module, x: Tensor) -> None:
    slopes = [jacobian(model, x, scale) for scale in (0.0, 3 * SMALL, 3 * SMALL)]
    size = slopes[0].abs().amax((1, 2), keepdim=True)
    # a kink within the reach of the noise, two equal elements of which the larger counts: not linear
    assume(all(((s - slopes[0]).abs() <= 0.01 * size).all() for s in slopes[1:]))
    expected = SMALL**2 * slopes[0] @ slopes[0].mT
    out = mp.convert(model, x, "accurate", dropout=nn.Module)(x)
    scale = expected.diagonal(dim1=1, dim2=2).amax(1)[:, None, None]
    plain = model(x)
    torch.testing.assert_close(out.mean, plain, rtol=1e-5, atol=1e-5)
    assert ((out.covariance - expected).abs() <= 0.02 * scale + 1e-14 * plain.square().amax()).all()


def sampled_covariance(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Of samples [n, K], with standard errors."""
    deviation = samples - samples.mean(0)
    products = deviation[:, :, None] * deviation[:, None, :]
    return products.mean(0), products.std(0) / math.sqrt(len(samples))


@settings(fuzz, max_examples=examples // 2)
@given(one_nonlinearity())
def test_one_nonlinearity_agrees_with_sampling(network: tuple[nn.Sequential, Shape]) -> None:
    """Moments are exact here, in every tier: the oracle is within 5.5 standard errors, covariance included.

    The noise is as large as the means, so that no unit is on in a handful of samples only, where
    sampling misjudges its own error.
    """
    model, shape = network
    model = model.double()
    x = mp.Moments(torch.randn(1, *shape).double() / 2, torch.rand(1, *shape).double() + 1)
    networks = in_every_tier(model, x, model(x.mean)[0].numel())
    assert "accurate" in networks
    mc = mp.monte_carlo(networks["paper"], x, n_samples=8000)
    for bnn in networks.values():
        out = bnn(x)
        mean_error = torch.maximum(mc.mean_error, (out.variance / mc.n_samples).sqrt())
        assert ((out.mean - mc.mean).abs() <= 5.5 * mean_error + 1e-9).all()
        assert ((out.variance - mc.variance).abs() <= 5.5 * mc.variance_error + 1e-9).all()
    covariance, error = sampled_covariance(mc.samples[:, 0].flatten(1))
    assert ((out.covariance[0] - covariance).abs() <= 5.5 * error + 1e-9).all()


@settings(fuzz, max_examples=examples // 2)
@given(linear_after_dropout())
def test_linear_networks_are_exact(network: tuple[nn.Module, nn.Module, Shape]) -> None:
    """Behind a dropout of x, Cov = p/(1-p) sum of c c^T over masks, with c what a masked part contributes."""
    dropout, rest, shape = network
    model = nn.Sequential(dropout, rest).double().eval()
    x = torch.randn(2, *shape, dtype=torch.float64)
    size, n_outputs = x[0].numel(), rest(x)[0].numel()
    chosen = None if n_outputs <= MOST_OUTPUTS else list(range(0, n_outputs, n_outputs // 10))
    with torch.no_grad():
        out = mp.convert(model, x, "accurate", outputs=chosen, dropout=nn.Module)(x)
        parts = torch.eye(size, dtype=x.dtype)  # each a sample of its own, with one element of x
        if not isinstance(dropout, nn.Dropout):
            parts = parts.reshape(shape[0], -1, size).sum(1)  # or one channel
        for i, sample in enumerate(x):
            masked = (parts * sample.flatten()).reshape(-1, *shape)
            contributions = (rest(masked) - rest(torch.zeros_like(masked))).flatten(1)
            contributions = contributions if chosen is None else contributions[:, chosen]
            expected = dropout.p / (1 - dropout.p) * contributions.T @ contributions
            scale = expected.diagonal().amax().item()
            torch.testing.assert_close(out.covariance[i], expected, rtol=1e-9, atol=1e-10 * scale + 1e-20)
