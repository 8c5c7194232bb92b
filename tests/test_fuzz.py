"""Differential fuzzing: random networks against the plain network and against sampling.

300 networks by default; a longer run with `pytest tests/test_fuzz.py --hypothesis-profile=long`.
"""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

import momentprop as mp
from networks import BATCH, Shape, networks, one_nonlinearity

# torch says so once per process, for the plain network too
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

examples = settings.default.max_examples
fuzz = settings(deadline=None, suppress_health_check=list(HealthCheck))


@settings(fuzz, max_examples=2 * examples)
@given(networks())
def test_random_networks(network: tuple[nn.Sequential, Shape]) -> None:
    """Converts; no NaN; variance >= 0; and at variance zero it is the plain network."""
    model, shape = network
    x = torch.randn(BATCH, *shape)
    bnn = mp.convert(model, x)
    out = bnn(x)
    assert out.mean.isfinite().all()
    assert out.variance.isfinite().all()
    assert (out.variance >= 0).all()
    assert out.mean.shape == model(x).shape
    assert bnn(x[:0]).mean.shape[0] in (0, out.mean.shape[0])

    if any(isinstance(m, (nn.Softmax, nn.LogSoftmax)) for m in model.modules()):
        return  # the paper's softmax is not softmax at variance zero
    quiet = copy.deepcopy(model)
    for module in quiet.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    certain = mp.Moments(x, 0.0)
    still = mp.convert(quiet, certain)(certain)
    torch.testing.assert_close(still.mean, model(x), rtol=1e-5, atol=1e-5)
    assert (still.variance.abs() <= 1e-12).all()


@settings(fuzz, max_examples=examples)
@given(one_nonlinearity())
def test_one_nonlinearity_agrees_with_sampling(network: tuple[nn.Sequential, Shape]) -> None:
    """Moments are exact here: the oracle is within 5.5 standard errors, mean and variance.

    The noise is as large as the means, so that no unit is on in a handful of samples only, where
    sampling misjudges its own error.
    """
    model, shape = network
    model = model.double()
    x = mp.Moments(torch.randn(1, *shape).double() / 2, torch.rand(1, *shape).double() + 1)
    bnn = mp.convert(model, x)
    out = bnn(x)
    mc = mp.monte_carlo(bnn, x, n_samples=8000)
    mean_error = torch.maximum(mc.mean_error, (out.variance / mc.n_samples).sqrt())
    assert ((out.mean - mc.mean).abs() <= 5.5 * mean_error + 1e-9).all()
    assert ((out.variance - mc.variance).abs() <= 5.5 * mc.variance_error + 1e-9).all()
