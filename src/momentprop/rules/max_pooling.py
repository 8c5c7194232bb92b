"""Max pooling by pairwise maxima."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from momentprop.gaussian.composites import composite, max_moments, relu_moments
from momentprop.gaussian.normal import alike_max_moments, contrasted_max_moments, max_response
from momentprop.graph.ops import AVERAGE_POOL
from momentprop.moments import Moments
from momentprop.rules.convolution import transposed_convolution
from momentprop.rules.facts import Contrast, neighbours_of
from momentprop.rules.linearization import Linearization, Propagated, mapped
from momentprop.rules.registry import Variant, rule
from momentprop.rules.windows import Position, Sizes, Windows

aten = torch.ops.aten


@dataclass
class Elements:
    """The elements of all windows: moments, and the covariance of each two where it is known."""

    moments: dict[Position, tuple[Tensor, Tensor]]
    covariances: dict[frozenset[Position], Tensor]

    @staticmethod
    def of(x: Moments, windows: Windows, correlated: bool) -> Elements:
        """Padding never wins: its mean is far below any value."""
        lowest = torch.finfo(x.dtype).min / 2
        opened = windows.open(x.mean, x.variance, fill=(lowest, 0.0))
        moments = {p: tuple(windows.element(opened, p)) for p in windows.positions}
        told = {}
        if correlated and neighbours_of(x) is not None:
            told = {frozenset(pair): windows.covariance(x, *pair) for pair in combinations(moments, 2)}
        return Elements(moments, {pair: c for pair, c in told.items() if c is not None})

    def scaled(self, factor: float) -> Elements:
        """Those of factor * x."""
        square = factor * factor
        moments = {p: (mean * factor, variance * square) for p, (mean, variance) in self.moments.items()}
        return Elements(moments, {pair: c * square for pair, c in self.covariances.items()})

    def between(self, first: Position, second: Position) -> Tensor | None:
        return self.covariances.get(frozenset((first, second)))

    def variance_of_sum(self, weights: dict[Position, Tensor]) -> Tensor:
        """Return the variance of the weighted sum of the elements."""
        total: Any = sum(w * w * self.moments[p][1] for p, w in weights.items())
        for pair, covariance in self.covariances.items():
            first, second = pair
            total = total + 2 * weights[first] * weights[second] * covariance
        return total


@dataclass
class Maximum:
    """The maximum of some elements of each window, and how it is related to all of them."""

    mean: Tensor
    variance: Tensor
    weights: dict[Position, Tensor]  # probability that the maximum is this element
    shared: dict[Position, Tensor | None]  # covariance with elements still to come

    @staticmethod
    def of(elements: Elements, position: Position) -> Maximum:
        """Start with one element."""
        mean, variance = elements.moments[position]
        shared = {p: elements.between(position, p) for p in elements.moments if p != position}
        return Maximum(mean, variance, {position: torch.ones_like(mean)}, shared)

    def against(self, elements: Elements, position: Position) -> Maximum:
        """Add one element by Clark's formulas.

        Exact for two Gaussians; every further element treats the maximum so far as Gaussian. Covariances
        with the elements still to come follow from
        Cov(max(X1, X2), Z) = Phi(a) Cov(X1, Z) + Phi(-a) Cov(X2, Z).
        """
        arguments = (*elements.moments[position], self.mean, self.variance, self.shared[position])
        mean, variance, wins = torch.stack(max_response(*arguments))
        weights = {p: w * (1 - wins) for p, w in self.weights.items()} | {position: wins}
        shared = {
            p: _mixed(wins, elements.between(position, p), old)
            for p, old in self.shared.items()
            if p != position
        }
        return Maximum(mean, variance, weights, shared)


def maxima(x: Moments, windows: Windows) -> Propagated:
    """Max pooling of Gaussians, with the covariance of a window's elements where x tells."""
    best, elements = maximum_of(x, windows)
    return pooled(best.mean, best.variance, windows, best.weights, elements, x.mean)


def maximum_of(x: Moments, windows: Windows) -> tuple[Maximum, Elements]:
    """The maximum of every window, folded from its last element to its first."""
    elements = Elements.of(x, windows, correlated=True)
    *others, last = windows.positions
    best = Maximum.of(elements, last)
    for position in reversed(others):
        best = best.against(elements, position)
    return best, elements


def _alike_maxima(x: Moments, windows: Windows) -> Propagated | Moments:
    """Take one contrast for all pairs of a window and one variance for each of its rows, where x tells."""
    contrast, n = x.fact(Contrast), len(windows.kernel)
    if contrast is None or not windows.tile:
        return maxima(x, windows)
    shifts = [
        [d * (b - a) for d, a, b in zip(windows.dilation, first, second, strict=True)]
        for first, second in combinations(windows.positions, 2)
    ]
    if not shifts:
        return x
    row = [*[1] * (n - 1), windows.kernel[-1]]
    variance = AVERAGE_POOL[n](x.variance, row) if row[-1] > 1 else x.variance
    return Moments(*ALIKE_MAXIMA(x.mean, variance, contrast.told(shifts), windows.kernel))


def _alike(mean: Tensor, variance: Tensor, contrast: Tensor, kernel: list[int]) -> tuple[Tensor, Tensor]:
    """Maxima of windows that tile the input, from the variance of each row of elements.

    The first two of a row have the same variance; a maximum has the same contrast with elements still to
    come as the elements have with one another.
    """
    windows, means = _tiles(mean, kernel)
    _, variances = _tiles(variance, [*kernel[:-1], 1])
    # written out: compilers fuse loops over all windows, not with one over samples and channels
    last = next(means)
    wide, last = torch.stack([windows.view(contrast).expand_as(last), last])
    best: tuple[Tensor, Tensor] | None = None
    for shared in variances:
        row = last if best is None else next(means), shared
        for i in range(1, kernel[-1]):
            mean, variance = row
            if i == 1:
                row = alike_max_moments(next(means), mean, shared, wide)
            else:
                row = contrasted_max_moments(next(means), shared, mean, variance, wide)
        best = row if best is None else contrasted_max_moments(*row, *best, wide)
    assert best is not None
    return windows.close(best[0]), windows.close(best[1].clamp_min(0))


def _tiled_maxima(mean: Tensor, variance: Tensor, kernel: list[int]) -> tuple[Tensor, Tensor]:
    """Maxima of windows that tile the input, whose elements are independent."""
    windows, means = _tiles(mean, kernel)
    _, variances = _tiles(variance, kernel)
    best = next(means), next(variances)
    for element in zip(means, variances, strict=True):
        best = max_moments(*element, *best)
    return windows.close(best[0]), windows.close(best[1])


def _rectified_maxima(mean: Tensor, variance: Tensor, kernel: list[int]) -> tuple[Tensor, Tensor]:
    """`_tiled_maxima` behind ReLU, which is taken of one element at a time.

    So nothing as large as the input is written: compilers make one loop over windows of it.
    """
    windows, means = _tiles(mean, kernel)
    _, variances = _tiles(variance, kernel)
    best = relu_moments(next(means), next(variances))
    for element in zip(means, variances, strict=True):
        best = max_moments(*relu_moments(*element), *best)
    return windows.close(best[0]), windows.close(best[1])


def _tiles(values: Tensor, kernel: list[int]) -> tuple[Windows, Iterator[Tensor]]:
    """Windows that tile the input, and their elements, read in place, from the last to the first."""
    windows = Windows.of(values.shape[-len(kernel) :], kernel, kernel, 0, 1, False)
    opened = windows.view(values)
    return windows, (windows.element(opened, place) for place in reversed(windows.positions))


TILED_MAXIMA = composite(
    "tiled_maxima(Tensor mean, Tensor variance, int[] kernel) -> (Tensor, Tensor)", _tiled_maxima
)
ALIKE_MAXIMA = composite(
    "alike_maxima(Tensor mean, Tensor variance, Tensor contrast, int[] kernel) -> (Tensor, Tensor)", _alike
)
RECTIFIED_MAXIMA = composite(
    "rectified_maxima(Tensor mean, Tensor variance, int[] kernel) -> (Tensor, Tensor)", _rectified_maxima
)


def pooled(
    mean: Tensor,
    variance: Tensor,
    windows: Windows,
    weights: dict[Position, Tensor],
    elements: Elements,
    x: Tensor,
) -> Propagated:
    """The answer of a rule that knows how much the maximum moves with every element of its window."""
    out = Moments(windows.close(mean), windows.close(variance))

    def linearize() -> Linearization:
        """Take the maximum as the sum of its elements, weighted by their chance to be it."""
        explained = windows.close(elements.variance_of_sum(weights))
        back = to_elements(x, windows, weights)
        return mapped(lambda cotangent: [back(cotangent)], (out.variance - explained).clamp_min(0))

    return Propagated(out, linearize)


def _independent_maxima(x: Moments, windows: Windows) -> Moments:
    """Take the elements of a window as independent, like the paper."""
    if windows.tile:
        return Moments(*TILED_MAXIMA(x.mean, x.variance, windows.kernel))
    elements = Elements.of(x, windows, correlated=False).moments
    return Moments(*_folded([elements[p] for p in windows.positions], windows))


def _folded(elements: list[tuple[Tensor, ...]], windows: Windows) -> tuple[Tensor, Tensor]:
    """The maximum of independent elements, from the last to the first."""
    best = elements[-1]
    for element in reversed(elements[:-1]):
        best = tuple(torch.stack(max_moments(*element, *best)))
    mean, variance = map(windows.close, best)
    return mean, variance


def _mixed(weight: Tensor, first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None:
        return None if second is None else (1 - weight) * second
    return weight * first if second is None else weight * (first - second) + second


def to_elements(x: Tensor, windows: Windows, weights: dict[Position, Tensor]) -> Callable[[Tensor], Tensor]:
    """The transposed map of a sum of every window's elements with these weights, for values like x."""
    if windows.tile:
        gains = windows.tiled([weights[p] for p in windows.positions])
        return lambda cotangent: _unpooled(cotangent, x, windows, gains)
    return lambda cotangent: _spread_out(cotangent, x, windows, weights)


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
    def register(variant: Variant | None, maxima: Callable[[Moments, Windows], Any]) -> None:
        @rule(
            op,
            variant=variant,
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
        ) -> Any:
            windows = Windows.of(x.shape[-n:], kernel_size, stride, padding, dilation, ceil_mode)
            return maxima(x, windows)

    register(Variant.PAPER, _independent_maxima)  # elements of a window are independent
    register(Variant.CONTRAST, _alike_maxima)  # with averages that convolutions tell
    register(None, maxima)  # with the covariance that they tell


_max_pool(1, aten.max_pool1d.default)
_max_pool(2, aten.max_pool2d.default)
_max_pool(3, aten.max_pool3d.default)
