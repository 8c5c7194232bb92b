"""Average pooling: linear maps."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from momentprop.moments import Moments
from momentprop.rules.convolution import transposed_convolution
from momentprop.rules.facts import knowing, variance_within
from momentprop.rules.families import per_dimension
from momentprop.rules.linearization import Linearization, Propagated, mapped
from momentprop.rules.registry import EXACT_IF_UNCORRELATED, rule
from momentprop.rules.windows import Sizes, Windows

aten = torch.ops.aten


def _avg_pool(n: int, op: Any) -> None:
    """Average of m elements: mean avg(E), variance avg(V) / m."""

    @rule(op, exactness=EXACT_IF_UNCORRELATED, reference="linear")
    def propagate(x: Moments, kernel_size: Sizes, *given: Any) -> Propagated:
        center = x.mean
        stride, padding, ceil_mode, *_ = arguments = _avg_pool_arguments(given)
        divisor = _divisor(n, center, kernel_size, *arguments)

        def average(values: Tensor) -> Tensor:
            pooled: Tensor = op(values, kernel_size, *given)
            return pooled

        def linearize() -> Linearization:
            windows = Windows.of(center.shape[-n:], kernel_size, stride, padding, 1, ceil_mode)
            covered = all(k >= size for k, size in zip(windows.kernel, center.shape[-n:], strict=True))
            if covered and not any(per_dimension(padding, n)):  # one window, maybe far larger than the input
                shape = center.shape
                return mapped(lambda cotangent: [(cotangent / divisor).expand(cotangent.shape[0], *shape)])
            return mapped(lambda cotangent: [_summed_back(cotangent / divisor, center, windows)])

        variance, shared = variance_within(x, lambda v: average(v) / divisor, average)
        return Propagated(knowing(Moments(average(center), variance), shared), linearize)


def _avg_pool_arguments(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """stride, padding, ceil_mode, count_include_pad, divisor_override."""
    return (*given, *((), 0, False, True, None)[len(given) :])


def _divisor(
    n: int,
    x: Tensor,
    kernel_size: Sizes,
    stride: Any,
    padding: Sizes,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor | int:
    """Return what each window's sum is divided by, which differs where windows hang over the border."""
    if divisor_override is not None:
        return divisor_override
    if not ceil_mode and (count_include_pad or not any(per_dimension(padding, n))):
        return math.prod(per_dimension(kernel_size, n))
    windows = Windows.of(x.shape[-n:], kernel_size, stride, padding, 1, ceil_mode)
    divisor = x.new_ones([1] * n)
    for d in range(n):
        size, pad, kernel = x.shape[d - n], windows.padding[d], windows.kernel[d]
        start = torch.arange(windows.counts[d], device=x.device) * windows.stride[d] - pad
        stop = (start + kernel).clamp_max(size + pad)
        if not count_include_pad:
            start, stop = start.clamp_min(0), stop.clamp_max(size)
        divisor = divisor * (stop - start).to(x.dtype).reshape(-1, *[1] * (n - 1 - d))
    return divisor


def _summed_back(cotangent: Tensor, x: Tensor, windows: Windows) -> Tensor:
    """The transposed map of sums over windows: that of a convolution with ones."""
    n = len(windows.kernel)
    rows = cotangent.reshape(1, -1, 1, *cotangent.shape[-n:])
    like = x.new_empty(1, *x.shape[-n:]).expand(rows.shape[1], 1, *x.shape[-n:])
    kernel = torch.ones(
        1, 1, *windows.kernel, dtype=x.dtype, device=x.device
    )  # the same for all of torch.vmap
    back = transposed_convolution(rows, like, kernel, windows.geometry)
    return back.reshape(cotangent.shape[0], *x.shape)


_avg_pool(1, aten.avg_pool1d.default)
_avg_pool(2, aten.avg_pool2d.default)
_avg_pool(3, aten.avg_pool3d.default)


def _adaptive_avg_pool(n: int, op: Any) -> None:
    """Average of windows [floor(i L / O), ceil((i+1) L / O)): variance avg(V) / (window size)."""

    @rule(op, exactness=EXACT_IF_UNCORRELATED, reference="linear")
    def propagate(x: Moments, output_size: Sizes) -> Propagated:
        center = x.mean
        mean = op(center, output_size)
        counts = mean.shape[-n:]

        def divided(variance: Tensor) -> Tensor:
            variance = op(variance, output_size)
            for dim in range(-n, 0):
                length, count = center.shape[dim], counts[dim]
                if length % count == 0:
                    variance = variance / (length // count)
                else:
                    start, stop = _adaptive_windows(length, count, mean.device)
                    variance = variance / (stop - start).to(variance.dtype).reshape(-1, *[1] * (-1 - dim))
            return variance

        def pull(cotangent: Tensor) -> list[Tensor]:
            for dim in range(-n, 0):
                weights = _adaptive_weights(center.shape[dim], counts[dim], center)
                cotangent = torch.matmul(cotangent.movedim(dim, -1), weights).movedim(-1, dim)
            return [cotangent]

        def spread(cotangent: Tensor) -> list[Tensor]:
            return [(cotangent / math.prod(center.shape[-n:])).expand(cotangent.shape[0], *center.shape)]

        variance, shared = variance_within(x, divided, lambda d: op(d, output_size))
        back = spread if all(size == 1 for size in counts) else pull
        return Propagated(knowing(Moments(mean, variance), shared), lambda: mapped(back))


def _adaptive_windows(length: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    i = torch.arange(count, device=device)
    return i * length // count, ((i + 1) * length + count - 1) // count


def _adaptive_weights(length: int, count: int, like: Tensor) -> Tensor:
    """The matrix [count, length] that averages along one dimension."""
    start, stop = _adaptive_windows(length, count, like.device)
    j = torch.arange(length, device=like.device)
    inside = (j >= start[:, None]) & (j < stop[:, None])
    return inside.to(like.dtype) / (stop - start).to(like.dtype)[:, None]


_adaptive_avg_pool(1, aten.adaptive_avg_pool1d.default)
_adaptive_avg_pool(2, aten.adaptive_avg_pool2d.default)
_adaptive_avg_pool(3, aten.adaptive_avg_pool3d.default)
