"""A rule to first order: a linear map of its inputs' deviations, plus fresh noise.

For jointly Gaussian X and Z, Stein's lemma gives Cov(g(X), Z) = E[g'(X)] Cov(X, Z). So, seen from any
other variable, every operator acts as a linear map J with J = dE_out / dE_in, the variances held fixed,
plus noise that is uncorrelated with everything before it. The output covariance is then a sum over noise
sources (adjoint.py), for which an operator has to say two things: its transposed map, and its noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from momentprop.moments import Moments, is_moments, mean_of

# A cotangent of a tensor has K in front: [K, *shape], one row per output whose covariance is wanted.
# Where an operator returns a list, so does its cotangent, with None for what nothing depends on.
Pull = Callable[[Any], Sequence[Any]]


@dataclass(frozen=True)
class Elementwise:
    """out = gain * x + noise, for an operator of one random input; None stands for gain 1, for no noise."""

    gain: Tensor | float | None = None
    noise: Tensor | None = None  # variance of each element's own, independent noise


@dataclass(frozen=True)
class Linear:
    """out = sum of J_i x_i, plus noise.

    `pull` maps a cotangent of the output to one for each random input, in the order of the arguments;
    `spread`, to its products with independent sources of unit variance, [K, batch, ...]: noise that
    reaches several elements at once.
    """

    pull: Pull
    noise: Tensor | None = None
    spread: Callable[[Tensor], Tensor] | None = None


Local = Elementwise | Linear


def residual(out: Tensor, gain: Tensor, variance: Tensor) -> Tensor:
    """Variance that the gain does not explain: V_out - G^2 V, never negative."""
    return (out - gain * gain * variance).clamp_min(0)


def random_leaves(args: Any) -> list[Moments]:
    """The random arguments, in order, lists opened."""
    return [leaf for leaf in pytree.tree_leaves(args, is_leaf=is_moments) if is_moments(leaf)]


def mean_map(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Callable[..., Any], list[Tensor]]:
    """The output's mean as a function of the random inputs' means, variances held fixed; and these means."""
    leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=is_moments)

    def run(*means: Tensor) -> Any:
        rest = iter(means)
        filled = [Moments(next(rest), v.variance) if is_moments(v) else v for v in leaves]
        new_args, new_kwargs = pytree.tree_unflatten(filled, spec)
        out = function(*new_args, **new_kwargs)
        return tuple(map(mean_of, out)) if isinstance(out, (list, tuple)) else mean_of(out)

    return run, [v.mean for v in leaves if is_moments(v)]


def transposed(function: Callable[..., Any], args: Any, kwargs: Any) -> Pull:
    """The transposed Jacobian of a rule's mean, for rules that do not spell theirs out."""
    run, means = mean_map(function, args, kwargs)
    return transposed_map(run, *means)


def transposed_map(function: Callable[..., Any], *inputs: Tensor) -> Pull:
    """The transposed Jacobian of a function, by torch.func: plain operators once compiled or exported."""

    def pull(cotangent: Any) -> Sequence[Tensor | None]:
        outputs, vjp = torch.func.vjp(function, *inputs)  # type: ignore[misc]
        if isinstance(outputs, tuple):
            rows = next(c.shape[0] for c in cotangent if c is not None)
            cotangent = tuple(
                o.new_zeros(rows, *o.shape) if c is None else c
                for c, o in zip(cotangent, outputs, strict=True)
            )
        return list(torch.func.vmap(vjp)(cotangent))

    return pull


def derived_gain(function: Callable[..., Any], out: Moments, args: Any, kwargs: Any) -> Elementwise:
    """Gain and noise of an element-by-element rule, its gain by differentiation of its mean."""
    run, means = mean_map(function, args, kwargs)
    (x,) = random_leaves((args, kwargs))
    _, vjp = torch.func.vjp(run, *means)  # type: ignore[misc]
    (gain,) = vjp(torch.ones_like(out.mean))
    return Elementwise(gain, residual(out.variance, gain, x.variance))
