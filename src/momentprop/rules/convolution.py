"""Convolutions, plain and transposed: mean `conv(E, w) + b`, variance `conv(V, w*w)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from momentprop.graph.ops import CONVOLUTIONS
from momentprop.moments import Fact, Moments
from momentprop.rules.channel_sums import squares_of_channels
from momentprop.rules.facts import Contrast, Neighbours
from momentprop.rules.families import linear_map, per_dimension
from momentprop.rules.linearization import Pull

aten = torch.ops.aten
Sizes = int | list[int]


def borders(padding: Any, kernel: list[int], dilation: list[int]) -> list[tuple[int, int]]:
    """Zeros before and after the input along each dimension."""
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return [(t // 2, t - t // 2) for t in total]
    return [(p, p) for p in per_dimension(padding, len(kernel))]


@dataclass(frozen=True)
class Geometry:
    """z_p = sum_u w_u x_{s p + d u - pad} with stride s and dilation d; pads before and after the input."""

    stride: list[int]
    pads: list[tuple[int, int]]
    dilation: list[int]
    groups: int


def _back(x: Tensor, weight: Tensor, bias: Tensor | None = None, *given: Any) -> Pull:
    geometry = _geometry(weight, *given)
    return lambda cotangent: [transposed_convolution(cotangent, x, weight, geometry)]


def _geometry(
    weight: Tensor, stride: Sizes = 1, padding: Any = 0, dilation: Sizes = 1, groups: int = 1
) -> Geometry:
    kernel = list(weight.shape[2:])
    spread = per_dimension(dilation, len(kernel))
    return Geometry(per_dimension(stride, len(kernel)), borders(padding, kernel, spread), spread, groups)


def transposed_convolution(cotangent: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """The cotangent [K, *out] of z as one of x, [K, *x.shape]; K joins the batch.

    A convolution with flipped weights where the stride is 1, a transposed one elsewhere.
    """
    stride, pads, dilation, groups = geometry.stride, geometry.pads, geometry.dilation, geometry.groups
    n = len(stride)
    rows = cotangent.reshape(-1, *cotangent.shape[-n - 1 :])
    reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    if all(s == 1 for s in stride):
        # w [out, in/g, *k] flipped, with outputs and inputs exchanged within each group
        flipped = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1).flip(list(range(2, n + 2)))
        before = [r - left for r, (left, _) in zip(reach, pads, strict=True)]
        after = [r - right for r, (_, right) in zip(reach, pads, strict=True)]
        if before != after or min(before) < 0:
            rows = F.pad(rows, [w for a, b in zip(before[::-1], after[::-1], strict=True) for w in (a, b)])
            before = [0] * n
        back = aten.convolution.default(rows, flipped, None, stride, before, dilation, False, [0] * n, groups)
    else:
        # inputs beyond the last window have no influence: output_padding puts zeros there
        sizes = [(o - 1) * s + r + 1 for o, s, r in zip(rows.shape[-n:], stride, reach, strict=True)]
        left = [p for p, _ in pads]
        missing = [size - (full - 2 * p) for size, full, p in zip(x.shape[-n:], sizes, left, strict=True)]
        extra = [min(max(m, 0), s - 1) for m, s in zip(missing, stride, strict=True)]
        back = aten.convolution.default(rows, weight, None, stride, left, dilation, True, extra, groups)
        rest = [m - e for m, e in zip(missing, extra, strict=True)]
        if any(rest):
            back = F.pad(back, [w for r in rest[::-1] for w in (0, r)])
    return back.reshape(cotangent.shape[0], *x.shape)


def _facts(variance: Tensor, weight: Tensor, bias: Tensor | None = None, *given: Any) -> list[Fact]:
    geometry = _geometry(weight, *given)
    near: Fact = Neighbours(_neighbours(variance, weight, geometry))
    return (
        [near, Contrast(_contrast(variance, weight, geometry))] if variance.dim() == weight.dim() else [near]
    )


def _neighbours(variance: Tensor, weight: Tensor, geometry: Geometry) -> Callable[..., Tensor | None]:
    """Cov(z_p, z_{p+delta}) = sum_u w_u w_{u-e} V_{s p + d u - pad}, with e = s delta / d.

    So it is a convolution of V once more, with the products of overlapping weights, strided so that it is
    computed where it is asked for and nowhere else.
    """
    stride, pads, dilation = geometry.stride, geometry.pads, geometry.dilation
    n = len(stride)

    def told(start: list[int], step: list[int], count: list[Any], shift: list[int]) -> Tensor | None:
        here, there = weight, weight
        border, steps = [], []
        for i in range(n):
            offset, rest = divmod(stride[i] * shift[i], dilation[i])
            size = weight.shape[2 + i] - abs(offset)
            if rest or size <= 0:
                return None  # they share no inputs
            here = here.narrow(2 + i, max(offset, 0), size)
            there = there.narrow(2 + i, max(-offset, 0), size)
            left = pads[i][0] - stride[i] * start[i] - dilation[i] * max(offset, 0)
            steps.append(stride[i] * step[i])
            reach = (count[i] - 1) * steps[i] + dilation[i] * (size - 1) + 1
            border.append((left, reach - left - variance.shape[i - n]))
        padded = F.pad(variance, [w for pair in reversed(border) for w in pair])
        return _convolve(n)(padded, here * there, None, steps, 0, dilation, geometry.groups)

    return told


def _contrast(variance: Tensor, weight: Tensor, geometry: Geometry) -> Callable[..., Tensor]:
    """Tell the contrast of z_p and z_{p+delta} as if V were its average everywhere in a channel.

    With e = s delta / d as in `_neighbours`, 2 (1 - r), where the correlation r is
    sum_c V_c sum_u w_cu w_c(u-e) over the same with e = 0.
    """

    def told(shifts: list[list[int]]) -> Tensor:
        alone = _overlap(weight, [0] * len(shifts[0]))
        together = torch.zeros_like(alone)
        for shift in shifts:
            steps = zip(geometry.stride, shift, geometry.dilation, strict=True)
            offsets = [divmod(s * delta, d) for s, delta, d in steps]
            shares = all(abs(e) < k for k, (e, _) in zip(weight.shape[2:], offsets, strict=True))
            if shares and not any(rest for _, rest in offsets):
                together = together + _overlap(weight, [e for e, _ in offsets]) / len(shifts)
        n = len(geometry.stride)
        average, apart = variance.mean(list(range(-n, 0))), 2 * (alone - together)
        difference, own = (_over_channels(average, m, geometry.groups) for m in (apart, alone))
        contrast = difference / own.clamp_min(torch.finfo(own.dtype).tiny)
        return contrast.reshape(*contrast.shape, *[1] * n)

    return told


def _over_channels(values: Tensor, matrix: Tensor, groups: int) -> Tensor:
    """[batch, out]: values [batch, in] times a matrix [out, in of a group], group by group."""
    if groups == 1:
        return values @ matrix.T
    parts = values.unflatten(1, (groups, -1)).transpose(0, 1)
    return torch.bmm(parts, matrix.unflatten(0, (groups, -1)).mT).transpose(0, 1).flatten(1)


def _overlap(weight: Tensor, offset: list[int]) -> Tensor:
    """[out, in]: sum_u w_u w_{u-e}."""
    here = there = weight
    for i, e in enumerate(offset):
        size = weight.shape[2 + i] - abs(e)
        here, there = here.narrow(2 + i, max(e, 0), size), there.narrow(2 + i, max(-e, 0), size)
    return (here * there).flatten(2).sum(-1)


def _together(
    x: Moments, direction: Tensor, weight: Tensor, bias: Tensor | None = None, *given: Any
) -> Tensor | None:
    """The variance of what elements of a channel share: the convolution of each channel alone, squared."""
    geometry = _geometry(weight, *given)
    if direction.shape != x.shape or direction.dim() != weight.dim():
        return None
    padded = F.pad(direction, [w for pair in reversed(geometry.pads) for w in pair])
    return squares_of_channels(padded, weight, geometry.stride, geometry.dilation, geometry.groups)


def _convolve(n: int) -> Callable[..., Tensor]:
    return (F.conv1d, F.conv2d, F.conv3d)[n - 1]


linear_map(*CONVOLUTIONS, pull=_back, facts=_facts, together=_together)


def _back_through_transposed(
    cotangent: Tensor, x: Tensor, weight: Tensor, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int
) -> Tensor:
    """A transposed convolution, transposed, is the convolution with the same weights."""
    n = weight.dim() - 2
    rows = cotangent.reshape(-1, *cotangent.shape[-n - 1 :])
    sizes = (per_dimension(v, n) for v in (stride, padding, dilation))
    return aten.convolution.default(rows, weight, None, *sizes, False, [0] * n, groups).reshape(
        cotangent.shape[0], *x.shape
    )


def _back_of_transposed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Pull:
    return lambda c: [_back_through_transposed(c, x, weight, stride, padding, dilation, groups)]


def _back_of_either(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
) -> Pull:
    if transposed:
        return _back_of_transposed(x, weight, bias, stride, padding, output_padding, groups, dilation)
    return _back(x, weight, bias, stride, padding, dilation, groups)


linear_map(
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
    pull=_back_of_transposed,
)
linear_map(aten.convolution.default, pull=_back_of_either)
