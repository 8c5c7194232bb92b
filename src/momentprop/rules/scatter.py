"""Values written, or added, at given places of another tensor: scatter, index_add, index_put, max unpooling.

Linear: means are moved as they are, variances moved or added up. Indices are constants, or taken at the mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from momentprop.moments import Moments, is_moments, mean_of, variance_of
from momentprop.rules.families import only_random
from momentprop.rules.linearization import Propagated, gathered, mapped
from momentprop.rules.registry import EXACT, EXACT_IF_UNCORRELATED, MOVES_VALUES, rule

aten = torch.ops.aten


def _per_row(function: Any, cotangent: Tensor) -> Tensor:
    """A function of a tensor, for every cotangent [K, *shape]."""
    return torch.stack([function(row) for row in cotangent.unbind(0)])


Back = Callable[[Tensor], Tensor]


def _answer(out: Moments, x: Any, source: Any, back_to_x: Back, back_to_source: Back | None) -> Propagated:
    """Answer for an operator whose cotangents go back to x and to the source, each if it is random."""

    def pull(cotangent: Tensor) -> list[Tensor]:
        found = [_per_row(back_to_x, cotangent)] if is_moments(x) else []
        if is_moments(source):
            found.append(gathered(_per_row(back_to_source, cotangent), source.shape))
        return found

    return Propagated(out, lambda: mapped(pull))


def _moved(op: Any, x: Any, source: Any, *between: Any) -> Moments:
    mean = op(mean_of(x), *between, mean_of(source))
    return Moments(mean, op(variance_of(x), *between, variance_of(source)))


@rule(aten.scatter.src, exactness=EXACT, reference=MOVES_VALUES, refuses=only_random("self", "src"))
def scatter(x: Any, dim: int, index: Tensor, src: Any) -> Propagated:
    out = _moved(aten.scatter.src, x, first_elements(src, index), dim, index)
    return _answer(
        out, x, src, lambda c: c.scatter(dim, index, 0.0), lambda c: padded(c.gather(dim, index), src)
    )


def first_elements(source: Any, index: Tensor) -> Any:
    """Take as many elements of the source as there are indices: the others are not written."""
    if source.shape == index.shape:
        return source
    part = tuple([slice(n) for n in index.shape])
    return Moments(source.mean[part], source.variance[part]) if is_moments(source) else source[part]


def padded(values: Tensor, source: Any) -> Tensor:
    """The cotangent of a source of which only the first elements, as many as indices, were written.

    There may be dimensions in front.
    """
    pads = [
        p
        for have, want in zip(values.shape[::-1], source.shape[::-1], strict=False)
        for p in (0, want - have)
    ]
    return torch.nn.functional.pad(values, pads) if any(pads) else values


@rule(aten.scatter.value, exactness=EXACT, reference=MOVES_VALUES, refuses=only_random("self"))
def scatter_value(x: Moments, dim: int, index: Tensor, value: float) -> Propagated:
    out = Moments(x.mean.scatter(dim, index, value), x.variance.scatter(dim, index, 0.0))
    return _answer(out, x, None, lambda c: c.scatter(dim, index, 0.0), None)


@rule(
    aten.scatter_add.default,
    exactness=EXACT_IF_UNCORRELATED,
    reference="linear",
    refuses=only_random("self", "src"),
)
def scatter_add(x: Any, dim: int, index: Tensor, src: Any) -> Propagated:
    out = _moved(aten.scatter_add.default, x, first_elements(src, index), dim, index)
    return _answer(out, x, src, lambda c: c, lambda c: padded(c.gather(dim, index), src))


@rule(
    aten.index_add.default,
    exactness=EXACT_IF_UNCORRELATED,
    reference="linear",
    refuses=only_random("self", "source"),
)
def index_add(x: Any, dim: int, index: Tensor, source: Any, *, alpha: float = 1) -> Propagated:
    mean = aten.index_add.default(mean_of(x), dim, index, mean_of(source), alpha=alpha)
    variance = aten.index_add.default(variance_of(x), dim, index, variance_of(source), alpha=alpha * alpha)
    back = lambda c: c.index_select(dim, index) * alpha  # noqa: E731
    return _answer(Moments(mean, variance), x, source, lambda c: c, back)


@rule(
    aten.index_copy.default,
    exactness=EXACT,
    reference=MOVES_VALUES,
    refuses=only_random("self", "source"),
)
def index_copy(x: Any, dim: int, index: Tensor, source: Any) -> Propagated:
    out = _moved(aten.index_copy.default, x, source, dim, index)
    return _answer(
        out, x, source, lambda c: c.index_fill(dim, index, 0.0), lambda c: c.index_select(dim, index)
    )


@rule(
    aten.index_put.default,
    exactness=EXACT,
    reference=MOVES_VALUES,
    refuses=only_random("self", "values"),
)
def index_put(x: Any, indices: list[Any], values: Any, accumulate: bool = False) -> Propagated:
    mean = aten.index_put.default(mean_of(x), indices, mean_of(values), accumulate)
    out = Moments(mean, aten.index_put.default(variance_of(x), indices, variance_of(values), accumulate))

    def back_to_x(c: Tensor) -> Tensor:
        return c if accumulate else aten.index_put.default(c, indices, c.new_zeros(()))

    return _answer(out, x, values, back_to_x, lambda c: aten.index.Tensor(c, indices))


def _unpool(op: Any, n: int) -> None:
    """The indices are those of the means: where another element wins, the value goes to the wrong place."""

    @rule(
        op,
        exactness="exact for constant indices; else approximate: those of the means",
        reference=MOVES_VALUES,
        refuses=only_random("self"),
    )
    def propagate(x: Moments, indices: Tensor, *sizes: Any) -> Propagated:
        shape = x.shape

        def pull(cotangent: Tensor) -> list[Tensor]:
            flat, index = cotangent.flatten(-n), indices.flatten(-n)
            back = flat.gather(-1, index.expand(flat.shape[0], *index.shape))
            return [back.reshape(flat.shape[0], *shape)]

        out = Moments(op(x.mean, indices, *sizes), op(x.variance, indices, *sizes))
        return Propagated(out, lambda: mapped(pull))


_unpool(aten.max_unpool2d.default, 2)
_unpool(aten.max_unpool3d.default, 3)
