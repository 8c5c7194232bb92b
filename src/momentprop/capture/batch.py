"""Says which dimension of every input is the batch, and what belongs to one sample.

By default it is the first dimension. The caller may name another one, for all inputs or for each, or say that
the inputs together are one sample (a graph, say). What the model makes of it is seen in its trace: one that
puts rows together (`x.view(-1, 21, 64)`) takes so many rows of the batch for one sample.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import Dim
from torch.utils import _pytree as pytree

from momentprop.capture.attention import ATTENTION
from momentprop.errors import InputError
from momentprop.graph.ops import RECURRENT
from momentprop.graph.place import place_of

aten = torch.ops.aten

BatchDim = Any  # a number, None, or a tuple, list or dictionary of them in the structure of the inputs


@dataclass(frozen=True)
class Batch:
    """The dimension of each flat input that has the samples, None where it has none."""

    dims: tuple[int | None, ...]
    rows: int = 1  # along that dimension, for each sample
    whole: bool = False  # all inputs together are one sample, and may have any size

    @staticmethod
    def of(batch_dim: BatchDim, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
        """What a caller says of these inputs; those whose size does not fit the first one's have no batch."""
        leaves = pytree.tree_leaves((args, kwargs))
        given = _for_each(batch_dim, args, kwargs)
        found = [_within(d, v) if isinstance(v, Tensor) else None for d, v in zip(given, leaves, strict=True)]
        if all(d is None for d in given):
            return Batch(tuple(found), whole=True)
        sizes = [v.shape[d] for d, v in zip(found, leaves, strict=True) if d is not None]
        fits = [d is not None and v.shape[d] == sizes[0] for d, v in zip(found, leaves, strict=True)]
        return Batch(tuple(d if fit else None for d, fit in zip(found, fits, strict=True)))

    def free_sizes(self, leaves: Sequence[Any]) -> list[dict[int, Any] | None]:
        """The sizes that torch.export shall leave open."""
        if self.whole:
            return [
                dict.fromkeys(range(v.dim()), Dim.AUTO) if isinstance(v, Tensor) else None for v in leaves
            ]
        size = Dim.AUTO if self.rows == 1 else self.rows * Dim("batch")
        return [None if d is None else {d: size} for d in self.dims]

    def two_or_more(self, leaves: Sequence[Any]) -> list[Any]:
        """At least two samples, so that their number stays open: 0 and 1 are special to the tracer."""
        rows = 2 * self.rows

        def enough(value: Any, dim: int | None) -> Any:
            if dim is None or value.shape[dim] >= rows:
                return value
            shape = list(value.shape)
            shape[dim] = rows
            if not value.shape[dim]:
                return value.new_zeros(shape)
            return value.index_select(dim, torch.arange(rows, device=value.device) % value.shape[dim])

        return [enough(v, d) for v, d in zip(leaves, self.dims, strict=True)]

    def names(self, shape: Sequence[Any]) -> list[str]:
        """Sizes as text, with a word in place of the tracer's symbols."""
        found = []
        for size in shape:
            text = str(size)
            for symbol in size.node.expr.free_symbols if isinstance(size, torch.SymInt) else ():
                text = text.replace(str(symbol), "any" if self.whole else "batch")
            found.append(text)
        return found

    def __str__(self) -> str:
        if self.whole:
            return "the inputs together are one sample"
        named = sorted({d for d in self.dims if d is not None})
        if not named:
            return "the model fixes the size of the batch"
        rows = f", {self.rows} rows a sample" if self.rows > 1 else ""
        return f"the batch is dimension {' or '.join(map(str, named))} of the inputs{rows}"


def _for_each(batch_dim: BatchDim, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int | None]:
    """One dimension for each flat input."""
    spec = pytree.tree_structure((args, kwargs))
    if isinstance(batch_dim, (tuple, list)) and not (kwargs and len(batch_dim) == 2):
        batch_dim = (tuple(batch_dim), {})
    elif isinstance(batch_dim, dict):
        batch_dim = ((), batch_dim)
    elif isinstance(batch_dim, (tuple, list)):
        batch_dim = (
            batch_dim[0] if isinstance(batch_dim[0], int) else tuple(batch_dim[0] or ()),
            batch_dim[1],
        )
    found = pytree._broadcast_to_and_flatten(batch_dim, spec)
    if found is None or not all(d is None or type(d) is int for d in found):
        raise InputError(
            "batch_dim must be a number, None (the inputs together are one sample), or one of these for each "
            f"input, in the structure of the inputs; not {batch_dim!r}"
        )
    return found


def _within(dim: int | None, value: Tensor) -> int | None:
    """The dimension counted from the front; None where the input has too few."""
    return dim % value.dim() if dim is not None and -value.dim() <= dim < value.dim() else None


def rows_per_sample(graph: fx.Graph) -> int:
    """Count the rows of the batch that the model puts together: n where sizes are the batch's over n."""
    shapes = [v.shape for n in graph.nodes if isinstance(v := n.meta.get("val"), Tensor)]
    sizes = {str(size) for shape in shapes for size in shape if isinstance(size, torch.SymInt)}
    found = {int(n) for size in sizes for n in re.findall(r"\w//(\d+)\b", size)}
    return max(found, default=1)


def open_dimensions(node: fx.Node) -> tuple[int, ...]:
    """Tell which sizes of an input tracing left open; a model may have fixed some (`x.view(4, 6)`)."""
    value = node.meta.get("val")
    shape = value.shape if isinstance(value, Tensor) else ()
    return tuple([d for d, n in enumerate(shape) if isinstance(n, torch.SymInt) and n.node.expr.free_symbols])


def taken_for_time(graph: fx.Graph) -> str | None:
    """Name a recurrent layer or an attention that goes along the batch, as its time."""
    return next((str(place_of(n)) for n in graph.nodes if _recurs_along(n) or _attends_along(n)), None)


def _recurs_along(node: fx.Node) -> bool:
    if node.target not in RECURRENT or node.args[-1] or not isinstance(node.args[0], fx.Node):
        return False
    shape = node.args[0].meta["val"].shape
    return isinstance(shape[0], torch.SymInt) and isinstance(shape[1], int)


def _attends_along(node: fx.Node) -> bool:
    """Say whether weights [..., queries, keys], of an attention fused or not, sum to one over the batch."""
    arguments: Any = node.args
    if node.target is ATTENTION:
        keys = arguments[1].meta["val"].shape[-2]
    elif node.target is aten.softmax.int:
        shape = arguments[0].meta["val"].shape
        if len(shape) < 3 or arguments[1] not in (-1, len(shape) - 1):
            return False
        keys = shape[-1]
    else:
        return False
    # numbers that follow from values have no hint
    return isinstance(keys, torch.SymInt) and keys.node.hint is not None and bool(keys.node.expr.free_symbols)
