"""Max pooling by pairwise maxima; average pooling as a linear map."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from momentprop.gaussian import max_moments, max_response
from momentprop.local import Linear
from momentprop.moments import Moments
from momentprop.neighbours import neighbours_of
from momentprop.registry import EXACT_IF_UNCORRELATED, rule
from momentprop.rules.convolution import Geometry, transposed_convolution
from momentprop.rules.families import per_dimension

aten = torch.ops.aten
Sizes = int | list[int]


def _output_size(size: int, kernel: int, stride: int, pad: int, dilation: int, ceil: bool) -> int:
    """Number of windows along one dimension, by PyTorch's convention."""
    reach = size + 2 * pad - dilation * (kernel - 1) - 1
    count = (reach + (stride - 1 if ceil else 0)) // stride + 1
    if ceil and (count - 1) * stride >= size + pad:  # the last window must start inside the input
        count -= 1
    return count


@dataclass
class Windows:
    """The elements of all pooling windows of a tensor, one position in the window at a time.

    Channels last, and written out: so each element of the windows is contiguous memory. Arithmetic on
    strided memory, eager or compiled, does not vectorise and costs several times as much as the copies.
    (The dimension in front keeps compilers from taking four dimensions for channels first and transposing
    them.)
    """

    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    counts: list[Any]  # of windows, along each dimension
    beyond: list[Any]  # what the windows reach beyond the padded input on the right (ceil_mode)

    @staticmethod
    def of(
        sizes: Any, kernel_size: Sizes, stride: Any, padding: Sizes, dilation: Sizes, ceil: bool
    ) -> Windows:
        n = len(sizes)
        kernel = per_dimension(kernel_size, n)
        steps = per_dimension(stride, n) or kernel
        pads, spread = per_dimension(padding, n), per_dimension(dilation, n)
        counts = [_output_size(*w, ceil) for w in zip(sizes, kernel, steps, pads, spread, strict=True)]
        beyond = [
            max((c - 1) * s + d * (k - 1) + 1 - size - 2 * p, 0)
            for c, s, d, k, size, p in zip(counts, steps, spread, kernel, sizes, pads, strict=True)
        ]
        return Windows(kernel, steps, pads, spread, counts, beyond)

    @property
    def geometry(self) -> Geometry:
        """That of a convolution with these windows."""
        pads = [(p, p + b) for p, b in zip(self.padding, self.beyond, strict=True)]
        return Geometry(self.stride, pads, self.dilation, 1)

    @property
    def positions(self) -> list[tuple[int, ...]]:
        """In the window, row by row."""
        return list(product(*map(range, self.kernel)))

    @property
    def tile(self) -> bool:
        """Whether every element of the input lies in at most one window, and windows inside the input."""
        inside = not any(self.padding) and not any(self.beyond)
        return inside and self.kernel == self.stride and all(d == 1 for d in self.dilation)

    def open(self, *values: Tensor, fill: tuple[float, ...]) -> Tensor:
        """Tensors stacked, padded with their fill values, channels last."""
        n = len(self.kernel)
        border = [w for p, b in zip(self.padding[::-1], self.beyond[::-1], strict=True) for w in (p, p + b)]
        if any(border):
            values = tuple(F.pad(v, border, value=f) for v, f in zip(values, fill, strict=True))
        return torch.stack([v.movedim(-1 - n, -1)[None] for v in values])

    def element(self, opened: Tensor, position: tuple[int, ...]) -> Tensor:
        """One element of every window."""
        n = len(position)
        for d, (start, step, count) in enumerate(zip(position, self.stride, self.counts, strict=True)):
            first = start * self.dilation[d]
            opened = aten.slice.Tensor(opened, d - n - 1, first, first + (count - 1) * step + 1, step)
        return opened

    def close(self, values: Tensor) -> Tensor:
        """Back from channels last."""
        return values.movedim(-1, -1 - len(self.kernel))[0]

    def tiled(self, values: list[Tensor]) -> Tensor:
        """One value per position in the window, side by side: [..., count, kernel, ..., channels]."""
        n = len(self.kernel)
        for d in reversed(range(n)):
            size = self.kernel[d]
            groups = [values[i : i + size] for i in range(0, len(values), size)]
            values = [torch.stack(group, 2 * (d - n)) for group in groups]
        return values[0][0]

    def covariance(self, x: Moments, first: tuple[int, ...], second: tuple[int, ...]) -> Tensor | None:
        """Between two elements of every window, where x tells; None stands for zero."""
        neighbours, n = neighbours_of(x), len(self.kernel)
        if neighbours is None:
            return None
        if any(self.padding) or any(self.beyond):
            return None  # windows hang over the border
        start = [d * a for d, a in zip(self.dilation, first, strict=True)]
        shift = [d * (b - a) for d, a, b in zip(self.dilation, first, second, strict=True)]
        told = neighbours(start, self.stride, self.counts, shift)
        return None if told is None else told.movedim(-1 - n, -1)[None]


@dataclass(eq=False, repr=False)
class Pooled(Moments):
    """Maxima of windows, with what the adjoint needs."""

    windows: Any = None
    weights: Any = None  # position -> probability that the maximum is this element
    explained: Any = None  # variance of the weighted sum of the elements


def _fold(x: Moments, windows: Windows, correlated: bool) -> Pooled:
    """Max of each window: the max of two, folded from the window's last element to its first.

    Exact for two Gaussians; every further fold treats the running maximum as Gaussian. Its covariance with
    the elements still to come follows from Cov(max(X1, X2), Z) = Phi(a) Cov(X1, Z) + Phi(-a) Cov(X2, Z).
    Padding never wins: its mean is far below any value.
    """
    lowest = torch.finfo(x.dtype).min / 2
    opened = windows.open(x.mean, x.variance, fill=(lowest, 0.0))
    positions = windows.positions
    elements = {p: windows.element(opened, p) for p in positions}
    covariances: dict[frozenset[Any], Tensor | None] = {}
    if correlated and neighbours_of(x) is not None:
        for first, second in combinations(positions, 2):
            covariances[frozenset((first, second))] = windows.covariance(x, first, second)

    def between(first: Any, second: Any) -> Tensor | None:
        return covariances.get(frozenset((first, second)))

    best_mean, best_variance = elements[positions[-1]]
    weights = {positions[-1]: torch.ones_like(best_mean)}
    shared = {p: between(positions[-1], p) for p in positions[:-1]}  # running maximum and p
    for position in reversed(positions[:-1]):
        arguments = (*elements[position], best_mean, best_variance, shared.pop(position))
        if not correlated:
            best_mean, best_variance = torch.stack(max_moments(*arguments))
            continue
        best_mean, best_variance, wins = torch.stack(max_response(*arguments))
        weights = {p: w * (1 - wins) for p, w in weights.items()} | {position: wins}
        shared = {p: _mixed(wins, between(position, p), old) for p, old in shared.items()}

    def explained() -> Tensor:
        total: Any = sum(w * w * elements[p][1] for p, w in weights.items())
        for pair, covariance in covariances.items():
            if covariance is not None:
                first, second = pair
                total = total + 2 * weights[first] * weights[second] * covariance
        return total

    return Pooled(
        windows.close(best_mean), windows.close(best_variance), None, None, windows, weights, explained
    )


def _mixed(weight: Tensor, first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None:
        return None if second is None else (1 - weight) * second
    return weight * first if second is None else weight * (first - second) + second


def _max_pool_local(out: Pooled, x: Moments, *_: Any) -> Linear:
    """To first order the maximum is the sum of its elements, weighted by their chance to be it."""
    windows, weights = out.windows, out.weights
    noise = (out.variance - windows.close(out.explained())).clamp_min(0)
    if windows.tile:
        gains = windows.tiled([weights[p] for p in windows.positions])
        return Linear(lambda cotangent: [_unpooled(cotangent, x.mean, windows, gains)], noise)
    return Linear(lambda cotangent: [_spread_out(cotangent, x.mean, windows, weights)], noise)


def _spread_out(cotangent: Tensor, x: Tensor, windows: Windows, weights: dict[Any, Tensor]) -> Tensor:
    """The transposed map of overlapping windows.

    A convolution whose kernels are one-hot takes the windows apart, one position per output channel;
    transposed, it puts them together.
    """
    n, size = len(windows.kernel), len(weights)
    gains = torch.stack([windows.close(weights[p]) for p in windows.positions], -1 - n)
    parts = (cotangent.unsqueeze(-1 - n) * gains).reshape(-1, size, *cotangent.shape[-n:])
    kernels = torch.eye(size, dtype=x.dtype, device=x.device).reshape(size, 1, *windows.kernel)
    like = x.new_empty(1, *x.shape[-n:]).expand(parts.shape[0], 1, *x.shape[-n:])
    back = transposed_convolution(parts[None], like, kernels, windows.geometry)
    return back.reshape(cotangent.shape[0], *x.shape)


def _unpooled(cotangent: Tensor, x: Tensor, windows: Windows, gains: Tensor) -> Tensor:
    """The transposed map where windows tile the input: every element takes its window's cotangent."""
    n = len(windows.kernel)
    wide = cotangent.movedim(-1 - n, -1)  # channels last, as the gains
    for d in reversed(range(n)):
        wide = wide.unsqueeze(2 * (d - n))
    full = wide * gains
    for d in range(n):
        full = full.flatten(-3 - d, -2 - d)
    missing = [size - c * k for size, c, k in zip(x.shape[-n:], windows.counts, windows.kernel, strict=True)]
    full = full.movedim(-1, -1 - n)
    return F.pad(full, [w for m in missing[::-1] for w in (0, m)]) if any(missing) else full


def _max_pool(n: int, op: Any) -> None:
    def with_fidelity(fidelity: str | None) -> None:
        @rule(
            op,
            fidelity=fidelity,
            exactness="approximate: the maximum of two is taken as Gaussian for the next fold",
            reference="paper, max pooling; Clark 1961",
            local=None if fidelity == "paper" else _max_pool_local,
        )
        def propagate(
            x: Moments,
            kernel_size: Sizes,
            stride: Any = (),
            padding: Sizes = 0,
            dilation: Sizes = 1,
            ceil_mode: bool = False,
        ) -> Moments:
            windows = Windows.of(x.shape[-n:], kernel_size, stride, padding, dilation, ceil_mode)
            return _fold(x, windows, correlated=fidelity != "paper")

    with_fidelity("paper")  # elements of a window are independent
    with_fidelity(None)  # with the covariance that convolutions tell


_max_pool(1, aten.max_pool1d.default)
_max_pool(2, aten.max_pool2d.default)
_max_pool(3, aten.max_pool3d.default)


def _avg_pool(n: int, op: Any) -> None:
    """Average of m elements: mean avg(E), variance avg(V) / m."""

    def local(out: Moments, x: Moments, kernel_size: Sizes, *given: Any) -> Linear:
        stride, padding, ceil_mode, include, override = _avg_pool_arguments(given)
        windows = Windows.of(x.shape[-n:], kernel_size, stride, padding, 1, ceil_mode)
        divisor = _divisor(op, n, x.mean, kernel_size, stride, padding, ceil_mode, include, override)
        return Linear(lambda cotangent: [_summed_back(cotangent / divisor, x.mean, windows)])

    @rule(op, exactness=EXACT_IF_UNCORRELATED, reference="linear", local=local)
    def propagate(x: Moments, kernel_size: Sizes, *given: Any) -> Moments:
        divisor = _divisor(op, n, x.mean, kernel_size, *_avg_pool_arguments(given))
        return Moments(op(x.mean, kernel_size, *given), op(x.variance, kernel_size, *given) / divisor)


def _avg_pool_arguments(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """stride, padding, ceil_mode, count_include_pad, divisor_override."""
    return (*given, *((), 0, False, True, None)[len(given) :])


def _divisor(
    op: Any,
    n: int,
    x: Tensor,
    kernel_size: Sizes,
    stride: Any,
    padding: Sizes,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor | int:
    """What each window's sum is divided by.

    Where windows hang over the border it differs from window to window. It is then read off the operator
    itself: pooling ones gives (elements inside) / (divisor).
    """
    if divisor_override is not None:
        return divisor_override
    if not ceil_mode and (count_include_pad or not any(per_dimension(padding, n))):
        return math.prod(per_dimension(kernel_size, n))
    ones = x.new_ones(1, *x.shape[-n:])
    inside = _count_inside(ones, n, kernel_size, stride, padding, ceil_mode)
    return inside / op(ones, kernel_size, stride, padding, ceil_mode, count_include_pad)


def _summed_back(cotangent: Tensor, x: Tensor, windows: Windows) -> Tensor:
    """The transposed map of sums over windows: that of a convolution with ones."""
    n = len(windows.kernel)
    rows = cotangent.reshape(1, -1, 1, *cotangent.shape[-n:])
    like = x.new_empty(1, *x.shape[-n:]).expand(rows.shape[1], 1, *x.shape[-n:])
    back = transposed_convolution(rows, like, x.new_ones(1, 1, *windows.kernel), windows.geometry)
    return back.reshape(cotangent.shape[0], *x.shape)


def _count_inside(
    ones: Tensor, n: int, kernel_size: Sizes, stride: Any, padding: Sizes, ceil_mode: bool
) -> Tensor:
    """How many elements of each window lie inside the input: sum pooling of ones, [1, spatial dims]."""
    kernel = per_dimension(kernel_size, n)
    if n == 3:
        return F.avg_pool3d(ones, kernel, stride or None, padding, ceil_mode, True, 1)
    if n == 2:
        return F.avg_pool2d(ones, kernel, stride or None, padding, ceil_mode, True, 1)
    steps = (per_dimension(stride, n) or kernel)[0]
    pad = per_dimension(padding, n)[0]
    return F.avg_pool2d(ones[:, None], (1, kernel[0]), (1, steps), (0, pad), ceil_mode, True, 1)[:, 0]


_avg_pool(1, aten.avg_pool1d.default)
_avg_pool(2, aten.avg_pool2d.default)
_avg_pool(3, aten.avg_pool3d.default)


def _adaptive_avg_pool(n: int, op: Any) -> None:
    """Average of windows [floor(i L / O), ceil((i+1) L / O)): variance avg(V) / (window size)."""

    def local(out: Moments, x: Moments, output_size: Sizes) -> Linear:
        def pull(cotangent: Tensor) -> list[Tensor]:
            for dim in range(-n, 0):
                weights = _adaptive_weights(x.shape[dim], out.shape[dim], x.mean)
                cotangent = torch.matmul(cotangent.movedim(dim, -1), weights).movedim(-1, dim)
            return [cotangent]

        def spread(cotangent: Tensor) -> list[Tensor]:
            return [(cotangent / math.prod(x.shape[-n:])).expand(cotangent.shape[0], *x.shape)]

        return Linear(spread if all(size == 1 for size in out.shape[-n:]) else pull)

    @rule(op, exactness=EXACT_IF_UNCORRELATED, reference="linear", local=local)
    def propagate(x: Moments, output_size: Sizes) -> Moments:
        mean, variance = op(x.mean, output_size), op(x.variance, output_size)
        for dim in range(-n, 0):
            length, count = x.shape[dim], mean.shape[dim]
            if length % count == 0:
                variance = variance / (length // count)
            else:
                start, stop = _adaptive_windows(length, count, mean.device)
                variance = variance / (stop - start).to(variance.dtype).reshape(-1, *[1] * (-1 - dim))
        return Moments(mean, variance)


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
