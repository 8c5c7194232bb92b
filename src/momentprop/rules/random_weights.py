"""Layers whose weights are random: DropConnect (Wan et al. 2013), Gaussian weights.

y = W x + b with independent elements of mean W and variance S, b and s, independent of x:

    E[y] = W E + b,    V[y] = (W*W) V + S (E^2 + V) + s.

Exact for uncorrelated inputs. The weights are drawn once per pass, so within one sample all positions of
a token sequence or an image meet the same ones: their noise is one source per weight. For a plain vector
every unit has weights of its own, and so noise of its own.

There are no such operators in PyTorch: graphs get these by passes/canonical/random_weights.py. Run by
themselves they draw normal weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from momentprop.gaussian.normal import safe_sqrt
from momentprop.moments import Moments, is_moments, mean_of
from momentprop.rules.convolution import Geometry, transposed_convolution
from momentprop.rules.families import only_random
from momentprop.rules.linearization import Linearization, Propagated, Spread, mapped
from momentprop.rules.registry import EXACT_IF_UNCORRELATED, Role, rule

aten = torch.ops.aten

_WEIGHTS = "Tensor weight, Tensor? weight_variance, Tensor? bias, Tensor? bias_variance"
_SIZES = "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups"
_TAGS = (torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag)
torch.library.define("momentprop::random_linear", f"(Tensor input, {_WEIGHTS}) -> Tensor", tags=_TAGS)
torch.library.define(
    "momentprop::random_convolution", f"(Tensor input, {_WEIGHTS}, {_SIZES}) -> Tensor", tags=_TAGS
)


@torch.library.impl("momentprop::random_linear", "CompositeImplicitAutograd")
def _draw_linear(x: Tensor, weight: Tensor, w_var: Any, bias: Any, b_var: Any) -> Tensor:
    return F.linear(x, _drawn(weight, w_var), _drawn(bias, b_var))


@torch.library.impl("momentprop::random_convolution", "CompositeImplicitAutograd")
def _draw_convolution(x: Tensor, weight: Tensor, w_var: Any, bias: Any, b_var: Any, *sizes: Any) -> Tensor:
    return _convolve(x, _drawn(weight, w_var), _drawn(bias, b_var), *sizes)


def _drawn(mean: Any, variance: Tensor | None) -> Any:
    return mean if variance is None else mean + variance.sqrt() * torch.randn_like(mean)


def _convolve(
    x: Tensor, weight: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: Any
) -> Tensor:
    none = [0] * len(stride)
    out: Tensor = aten.convolution.default(x, weight, bias, stride, padding, dilation, False, none, groups)
    return out


@dataclass(frozen=True)
class _Layer:
    """A linear layer as a function of its weights."""

    map: Callable[..., Tensor]  # (x, weight, bias, *sizes)
    pull: Callable[..., Tensor]  # (cotangent, x, weight, *sizes) -> cotangent of x
    by_weight: Callable[..., Tensor]  # (cotangent, x, weight, *sizes) -> [K, batch, *weight.shape]
    by_bias: Callable[[Tensor], Tensor]  # cotangent -> [K, batch, units]


def _register(op: Any, layer: _Layer) -> None:
    def variance_of_weights(square: Tensor, w_var: Any, weight: Tensor, b_var: Any, *sizes: Any) -> Tensor:
        return layer.map(square, torch.zeros_like(weight) if w_var is None else w_var, b_var, *sizes)

    @rule(
        op,
        exactness=EXACT_IF_UNCORRELATED,
        reference="Wan et al. 2013",
        role=Role.SOURCE,
        refuses=only_random("input"),
    )
    def propagate(
        x: Any, weight: Tensor, w_var: Any = None, bias: Any = None, b_var: Any = None, *sizes: Any
    ) -> Propagated:
        mean = mean_of(x)
        variance = variance_of_weights(mean * mean, w_var, weight, b_var, *sizes)
        if is_moments(x):
            second = weight * weight if w_var is None else weight * weight + w_var
            variance = variance + layer.map(x.variance, second, None, *sizes)
        out = Moments(layer.map(mean, weight, bias, *sizes), variance)

        def pull(cotangent: Tensor) -> list[Tensor]:
            return [layer.pull(cotangent, mean, weight, *sizes)] if is_moments(x) else []

        def linearize() -> Linearization:
            if mean.dim() == 2:
                square = mean * mean + x.variance if is_moments(x) else mean * mean
                return mapped(pull, variance_of_weights(square, w_var, weight, b_var, *sizes))
            own = variance_of_weights(x.variance, w_var, weight, None, *sizes) if is_moments(x) else None
            return mapped(pull, own, Spread(_met_weights(layer, mean, weight, w_var, b_var, *sizes)))

        return Propagated(out, linearize)


def _met_weights(
    layer: _Layer, mean: Tensor, weight: Tensor, w_var: Any, b_var: Any, *sizes: Any
) -> Callable[[Tensor], Tensor]:
    """Products of a cotangent with the noise of every weight, which all positions of a sample share."""

    def along(cotangent: Tensor) -> Tensor:
        sources = []
        if w_var is not None:
            met = layer.by_weight(cotangent, mean, weight, *sizes)
            sources.append((met * safe_sqrt(w_var)).flatten(2))
        if b_var is not None:
            sources.append(layer.by_bias(cotangent) * safe_sqrt(b_var))
        return torch.cat(sources, 2)

    return along


def _by_weight(cotangent: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """[K, B, ..., out] and [B, ..., in] -> [K, B, out, in], summed over what is between."""
    rows = cotangent.flatten(2, -2) if cotangent.dim() > 3 else cotangent[:, :, None]
    return torch.matmul(rows.mT, x.flatten(1, -2) if x.dim() > 2 else x[:, None])


def _by_tap(
    cotangent: Tensor, x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    """[K, B, out, *size] and [B, in, *size] -> [K, B, out, in / groups, *kernel], summed over positions."""
    kernel = list(weight.shape[2:])
    if len(kernel) == 1:  # as an image of height 1
        x, kernel = x[:, :, None], [1, *kernel]
        stride, padding, dilation = [1, *stride], [0, *padding], [1, *dilation]
    windows = aten.im2col.default(x, kernel, dilation, padding, stride).unflatten(1, (groups, -1))
    rows = cotangent.flatten(3).unflatten(2, (groups, -1))
    return torch.matmul(rows, windows.mT).reshape(*cotangent.shape[:2], *weight.shape)


def _pull_back(cotangent: Tensor, x: Tensor, weight: Tensor, *sizes: Any) -> Tensor:
    stride, padding, dilation, groups = sizes
    geometry = Geometry(list(stride), [(p, p) for p in padding], list(dilation), groups)
    return transposed_convolution(cotangent, x, weight, geometry)


_register(
    torch.ops.momentprop.random_linear.default,
    _Layer(
        F.linear,
        lambda cotangent, x, weight: torch.matmul(cotangent, weight),
        _by_weight,
        lambda cotangent: cotangent.flatten(2, -2).sum(2) if cotangent.dim() > 3 else cotangent,
    ),
)
_register(
    torch.ops.momentprop.random_convolution.default,
    _Layer(_convolve, _pull_back, _by_tap, lambda cotangent: cotangent.flatten(3).sum(3)),
)
