"""Turns what a network gives into the predictive distribution of a real target, and fits its noise."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from momentprop.gaussian.lattice import spread_out
from momentprop.moments import Moments
from momentprop.predict.outputs import Select, leaves, one_output
from momentprop.predict.regression_predictive import RegressionPredictive
from momentprop.sample import SampledMoments

WITHOUT_NOISE = (
    "regress got no noise variance: intervals hold the network's prediction, not the target. "
    "Give noise=mp.fit_noise(outputs, targets) from validation data, or noise=0"
)


def regress(
    output: Any,
    *,
    noise: float | Tensor | None = None,
    heteroscedastic: bool = False,
    select: Select = None,
) -> RegressionPredictive:
    """Return the predictive distribution of a real target: N(y; E, V + noise), element by element.

    Moments with jumps (`mp.convert(..., jumps=16)`) give a mixture of normals of the same mean and variance,
    skewed and with tails as MC dropout has them.

    Args:
        output: `Moments` of a converted network; `SampledMoments` with their samples, which give the mixture
            of normals that MC dropout stands for; a plain tensor; or a list of these, an ensemble. Of a
            mapping, a dataclass or a tuple the only moments are taken.
        noise: variance of the noise in the data, as a number (`fit_noise` finds it) or one per output. By
            default there is none, and a warning says so; `noise=0` says it without one.
        heteroscedastic: the network itself gives mean and log noise variance: two outputs in this order, or
            one whose last dimension holds all means and then all logarithms. The expected noise variance of
            a Gaussian logarithm N(E, V) is exp(E + V/2).
        select: which of several outputs, by name or position.

    >>> regress(torch.tensor([1.0, 2.0]), noise=0.25).std.tolist()  # a plain network: noise alone
    [0.5, 0.5]
    """
    if heteroscedastic and noise is not None:
        raise ValueError("a heteroscedastic network gives the noise itself: leave out noise")
    if noise is None:
        if not (heteroscedastic or torch.compiler.is_compiling()):
            warnings.warn(WITHOUT_NOISE, stacklevel=2)
        noise = 0.0
    if not _is_variance(noise):
        raise ValueError(f"noise is a variance and must not be negative or NaN, not {noise}")
    if isinstance(output, list):
        every: Any = {"heteroscedastic": True} if heteroscedastic else {"noise": noise}
        return _mixed([regress(member, select=select, **every) for member in output])
    if heteroscedastic:
        mean, log_noise = _halves(output, select)
        return _heteroscedastic(mean, log_noise)
    means, variances, weights = _components(one_output(output, select))
    level = torch.as_tensor(noise, dtype=means.dtype, device=means.device)
    return RegressionPredictive(means, variances, level.expand_as(means), weights)


def fit_noise(output: Any, y: Tensor, *, method: str = "likelihood", select: Select = None) -> Tensor:
    """Return the noise variance that fits validation data best, as a scalar tensor.

    Args:
        output: predictions for the validation inputs, as `regress` takes them.
        y: their targets.
        method: `"likelihood"` maximises the predictive likelihood; `"closed_form"` takes the mean squared
            error less the mean variance of the predictions, or a small share of it where that is negative.
        select: which of several outputs, by name or position.

    >>> y = torch.tensor([1.0, -1.0, 1.0, -1.0])
    >>> round(fit_noise(torch.zeros(4), y).item(), 3)
    1.0
    """
    silent = regress(output, noise=0.0, select=select)
    if y.numel() == 0:
        raise ValueError("y is empty; give validation data")
    if y.shape != silent.batch_shape:
        raise ValueError(f"y has shape {tuple(y.shape)}, the prediction {tuple(silent.batch_shape)}")
    if not bool(y.isfinite().all()):
        raise ValueError("y holds NaN or infinite values")
    with torch.no_grad():
        error = (y - silent.mean).double().square().mean()
        least = error * 1e-6 + torch.finfo(torch.float32).tiny
        if method == "closed_form":
            return torch.maximum(error - silent.epistemic.double().mean(), least).to(silent.means.dtype)
        if method != "likelihood":
            raise ValueError(f"method must be 'likelihood' or 'closed_form', not {method!r}")
        double = pytree.tree_map_only(Tensor, Tensor.double, silent)

        def nll(log_noise: float) -> float:
            noise = torch.full_like(double.means, math.exp(log_noise))
            return dataclasses.replace(double, aleatorics=noise).nll(y.double()).mean().item()

        best = _golden_section(nll, least.log().item(), error.clamp_min(least).log().item() + 3)
        return torch.tensor(math.exp(best), dtype=silent.means.dtype, device=y.device)


def _is_variance(value: float | Tensor) -> bool:
    """Say whether no value is negative or NaN; tensors are believed while compiling."""
    if isinstance(value, Tensor) and torch.compiler.is_compiling():
        return True
    return bool((torch.as_tensor(value) >= 0).all())


def _golden_section(function: Callable[[float], float], low: float, high: float) -> float:
    """Find where a function of one valley is smallest."""
    ratio = (math.sqrt(5) - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    at_a, at_b = function(a), function(b)
    for _ in range(60):
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - ratio * (high - low)
            at_a = function(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + ratio * (high - low)
            at_b = function(b)
    return (low + high) / 2


def _components(output: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Means and variances [T, *shape] of the mixture, and weights if they are not all the same."""
    if isinstance(output, SampledMoments):
        return output.samples, torch.zeros_like(output.samples), None
    if isinstance(output, Moments):
        if output.jumps is not None:
            return spread_out(output)
        return output.mean[None], output.variance[None], None
    return output[None], torch.zeros_like(output)[None], None


def _halves(output: Any, select: Select) -> tuple[Any, Any]:
    """Return the network's means and log-variances."""
    if select is None and not isinstance(output, (Moments, Tensor)) and len(found := leaves(output)) > 1:
        if len(found) != 2:
            raise ValueError(f"expected a pair (mean, log variance), not {len(found)} outputs")
        mean, log_noise = found.values()
        return mean, log_noise
    output = one_output(output, select)
    size = output.shape[-1]
    if size % 2:
        raise ValueError(f"the last dimension holds means and log variances: it must be even, not {size}")

    if isinstance(output, Moments) and not isinstance(output, SampledMoments):
        output = Moments(output.mean, output.variance, jumps=output.jumps)  # what has outputs last
    halves = (partial(Tensor.narrow, dim=-1, start=start, length=size // 2) for start in (0, size // 2))
    mean, log_noise = (pytree.tree_map_only(Tensor, half, output) for half in halves)
    return mean, log_noise


def _heteroscedastic(mean: Any, log_noise: Any) -> RegressionPredictive:
    means, variances, weights = _components(mean)
    if isinstance(log_noise, Moments) and not isinstance(log_noise, SampledMoments):
        log_noise = Moments(log_noise.mean, log_noise.variance)
    logs, spreads, _ = _components(log_noise)
    noise = (logs + spreads / 2).exp()
    means, variances, noise = torch.broadcast_tensors(means, variances, noise)
    return RegressionPredictive(means, variances, noise, weights)


def _mixed(members: list[RegressionPredictive]) -> RegressionPredictive:
    """Every member counts the same, however many components it has."""
    if not members:
        raise ValueError("an ensemble needs at least one member")
    weights = None
    if any(m.weights is not None for m in members):
        weights = torch.cat([m.shares for m in members]) / len(members)
    elif len({len(m.means) for m in members}) > 1:
        raise ValueError("members of an ensemble must have equally many samples")
    fields = ("means", "epistemics", "aleatorics")
    means, epistemics, aleatorics = (torch.cat([getattr(m, f) for m in members]) for f in fields)
    return RegressionPredictive(means, epistemics, aleatorics, weights)
