"""Max pooling by pairwise maxima; average pooling as a linear map."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from momentprop.gaussian import max_moments
from momentprop.moments import Moments
from momentprop.registry import EXACT_IF_UNCORRELATED, rule

aten = torch.ops.aten
Sizes = int | list[int]


def _per_dimension(value: Any, n: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * n if len(values) == 1 else values


def _output_size(size: int, kernel: int, stride: int, pad: int, dilation: int, ceil: bool) -> int:
    """Number of windows along one dimension, by PyTorch's convention."""
    reach = size + 2 * pad - dilation * (kernel - 1) - 1
    count = (reach + (stride - 1 if ceil else 0)) // stride + 1
    if ceil and (count - 1) * stride >= size + pad:  # the last window must start inside the input
        count -= 1
    return count


def _max_pool(n: int, op: Any) -> None:
    """Max of each window: the max of two, folded from the window's last element to its first.

    Exact for two independent Gaussians; every further fold treats the running maximum as Gaussian.
    The elements are taken in row-major order. Padding never wins: its mean is far below any value.
    """

    @rule(
        op,
        exactness="approximate: the maximum of two is taken as Gaussian for the next fold",
        reference="paper, max pooling; Clark 1961",
    )
    def propagate(
        x: Moments,
        kernel_size: Sizes,
        stride: Any = (),
        padding: Sizes = 0,
        dilation: Sizes = 1,
        ceil_mode: bool = False,
    ) -> Moments:
        kernel = _per_dimension(kernel_size, n)
        steps = _per_dimension(stride, n) or kernel
        pads, spread = _per_dimension(padding, n), _per_dimension(dilation, n)
        sizes = x.shape[-n:]
        counts = [
            _output_size(*window, ceil_mode)
            for window in zip(sizes, kernel, steps, pads, spread, strict=True)
        ]
        # what the windows reach beyond the padded input on the right (ceil_mode)
        beyond = [
            max((c - 1) * s + d * (k - 1) + 1 - size - 2 * p, 0)
            for c, s, d, k, size, p in zip(counts, steps, spread, kernel, sizes, pads, strict=True)
        ]
        mean, variance = x.mean, x.variance
        if any(pads) or any(beyond):
            border = [w for p, b in zip(pads[::-1], beyond[::-1], strict=True) for w in (p, p + b)]
            mean = F.pad(mean, border, value=torch.finfo(mean.dtype).min / 2)
            variance = F.pad(variance, border)

        # Channels last, and written out before and after: so each element of the windows is contiguous
        # memory. Arithmetic on strided memory, eager or compiled, does not vectorise and costs several
        # times as much as these copies. (The dimension in front keeps compilers from taking four dimensions
        # for channels first and transposing them.)
        mean, variance = torch.stack([v.movedim(-1 - n, -1)[None] for v in (mean, variance)])

        def element(values: Tensor, offset: tuple[int, ...]) -> Tensor:
            """One element of every window."""
            for d, (start, step, count) in enumerate(zip(offset, steps, counts, strict=True)):
                first = start * spread[d]
                values = aten.slice.Tensor(values, d - n - 1, first, first + (count - 1) * step + 1, step)
            return values

        offsets = list(product(*map(range, kernel)))
        best_mean, best_variance = element(mean, offsets[-1]), element(variance, offsets[-1])
        for offset in reversed(offsets[:-1]):
            new = element(mean, offset), element(variance, offset)
            best_mean, best_variance = torch.stack(max_moments(*new, best_mean, best_variance))
        return Moments(*(v.movedim(-1, -1 - n)[0] for v in (best_mean, best_variance)))


_max_pool(1, aten.max_pool1d.default)
_max_pool(2, aten.max_pool2d.default)
_max_pool(3, aten.max_pool3d.default)


def _avg_pool(n: int, op: Any) -> None:
    """Average of m elements: mean avg(E), variance avg(V) / m.

    Where windows hang over the border m differs from window to window. It is then read off the
    operator itself: a window of m elements answers 1/m to a single one, and pooling ones gives
    (elements inside) / m.
    """

    @rule(op, exactness=EXACT_IF_UNCORRELATED, reference="linear")
    def propagate(
        x: Moments,
        kernel_size: Sizes,
        stride: Any = (),
        padding: Sizes = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Moments:
        extra = [] if n == 1 else [divisor_override]

        def pool(values: Tensor) -> Tensor:
            return op(values, kernel_size, stride, padding, ceil_mode, count_include_pad, *extra)

        divisor: Tensor | int
        if divisor_override is not None:
            divisor = divisor_override
        elif not ceil_mode and (count_include_pad or not any(_per_dimension(padding, n))):
            divisor = math.prod(_per_dimension(kernel_size, n))
        else:
            ones = x.mean.new_ones(1, *x.shape[-n:])
            inside = _count_inside(ones, n, kernel_size, stride, padding, ceil_mode)
            divisor = inside / pool(ones)
        return Moments(pool(x.mean), pool(x.variance) / divisor)


def _count_inside(
    ones: Tensor, n: int, kernel_size: Sizes, stride: Any, padding: Sizes, ceil_mode: bool
) -> Tensor:
    """How many elements of each window lie inside the input: sum pooling of ones, [1, spatial dims]."""
    kernel = _per_dimension(kernel_size, n)
    if n == 3:
        return F.avg_pool3d(ones, kernel, stride or None, padding, ceil_mode, True, 1)
    if n == 2:
        return F.avg_pool2d(ones, kernel, stride or None, padding, ceil_mode, True, 1)
    steps = (_per_dimension(stride, n) or kernel)[0]
    pad = _per_dimension(padding, n)[0]
    return F.avg_pool2d(ones[:, None], (1, kernel[0]), (1, steps), (0, pad), ceil_mode, True, 1)[:, 0]


_avg_pool(1, aten.avg_pool1d.default)
_avg_pool(2, aten.avg_pool2d.default)
_avg_pool(3, aten.avg_pool3d.default)


def _adaptive_avg_pool(n: int, op: Any) -> None:
    """Average of windows [floor(i L / O), ceil((i+1) L / O)): variance avg(V) / (window size)."""

    @rule(op, exactness=EXACT_IF_UNCORRELATED, reference="linear")
    def propagate(x: Moments, output_size: Sizes) -> Moments:
        mean, variance = op(x.mean, output_size), op(x.variance, output_size)
        for dim in range(-n, 0):
            length, count = x.shape[dim], mean.shape[dim]
            if length % count == 0:
                variance = variance / (length // count)
            else:
                i = torch.arange(count, device=mean.device)
                widths = ((i + 1) * length + count - 1) // count - i * length // count
                variance = variance / widths.to(variance.dtype).reshape(-1, *[1] * (-1 - dim))
        return Moments(mean, variance)


_adaptive_avg_pool(1, aten.adaptive_avg_pool1d.default)
_adaptive_avg_pool(2, aten.adaptive_avg_pool2d.default)
_adaptive_avg_pool(3, aten.adaptive_avg_pool3d.default)
