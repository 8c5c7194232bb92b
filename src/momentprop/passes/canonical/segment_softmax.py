"""Recognises softmax over segments written out, as graph attention does.

    w = exp(x - max(x over the segment)),    w / sum(w over the segment)

with each segment's maximum and sum gathered back to its elements. The maximum is there for stability
alone. Rules of the parts would take the three for independent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from momentprop.capture.noise import constant
from momentprop.graph.edit import Editor
from momentprop.graph.ops import IDENTITIES, RESHAPES, SUMS, draws
from momentprop.passes.runner import Pass
from momentprop.rules.segments import SEGMENT_SOFTMAX

aten = torch.ops.aten

_NEGLIGIBLE = 1e-6  # beside the sum, which is at least 1 behind a maximum
_EXPANSIONS = (aten.expand.default, aten.expand_as.default)


class _Reduced(NamedTuple):
    """A reduction over segments, gathered back to their elements."""

    start: Any  # what was there before
    along: tuple[int, fx.Node]  # dimension and index
    eps: float  # what is added to it


def recognise_segment_softmax(node: fx.Node, edit: Editor) -> fx.Node | None:
    """Recognise exp(x) / gathered sum of exp(x), with or without the maximum taken off before."""
    weight = node.args[0]
    if not isinstance(weight, fx.Node) or weight.target is not aten.exp.default or node.kwargs:
        return None
    total = _reduced(node.args[1], "sum", weight)
    if total is None or constant(total.start) != 0:
        return None
    x: Any
    x, most = weight.args[0], 0.0
    if isinstance(x, fx.Node) and x.target is aten.sub.Tensor and not x.kwargs:
        greatest = _reduced(x.args[1], "amax", x.args[0])
        if greatest is not None and _equal(greatest.along, total.along) and not greatest.eps:
            x, most = x.args[0], _NEGLIGIBLE
    if total.eps > most:
        return None
    start = total.start
    if start.target is aten.new_zeros.default and start.meta["val"].dtype == x.meta["val"].dtype:
        # so that what it was made of, often the weights, is not computed any more
        start = edit.op(start.target, x, *start.args[1:], value=start.meta["val"], **start.kwargs)
    return edit.op(SEGMENT_SOFTMAX, x, *total.along, start, value=node.meta["val"])


def _reduced(value: Any, reduce: str, x: Any) -> _Reduced | None:
    """Recognise a reduction of x; a small number may be added to it, before or after it is gathered."""
    gathered, after = _without_eps(value)
    read = _gather(gathered)
    if read is None:
        return None
    inner, before = _without_eps(_unchanged(read[0]))
    scattered: Any = _unchanged(inner)
    if scattered.target is aten.scatter_reduce.two:
        start, dim, index, src, kind = scattered.args
    elif scattered.target in (aten.scatter_add.default, aten.index_add.default):
        (start, dim, index, src), kind = scattered.args, "sum"
    else:
        return None
    same = kind == reduce and _unchanged(src) is _unchanged(x) and not scattered.kwargs.get("alpha")
    along = _along(dim, index, start.meta["val"].dim())
    return _Reduced(start, along, before + after) if same and _equal(read[1], along) else None


def _without_eps(node: Any) -> tuple[Any, float]:
    if isinstance(node, fx.Node) and node.target in SUMS and isinstance(node.args[1], float):
        return node.args[0], node.args[1]
    return node, 0.0


def _gather(node: Any) -> tuple[Any, tuple[int, fx.Node]] | None:
    """Values, and along what they are taken, of what takes elements by an index along one dimension."""
    if not isinstance(node, fx.Node):
        return None
    values: Any
    index: Any
    if node.target in (aten.index_select.default, aten.gather.default):
        values, dim, index = node.args[:3]
    elif node.target is aten.index.Tensor:
        values, indices = node.args[0], list(node.args[1])  # type: ignore[arg-type]
        used = [(d, i) for d, i in enumerate(indices) if i is not None]
        if len(used) != 1 or used[0][1].meta["val"].dim() != 1:
            return None
        ((dim, index),) = used
    else:
        return None
    return values, _along(dim, index, node.meta["val"].dim())


def _along(dim: Any, index: fx.Node, n: int) -> tuple[int, fx.Node]:
    """A dimension and the index along it that an index was expanded from; else that index itself."""
    dim = dim % n
    if index.target not in _EXPANSIONS:
        return dim, index
    inner: Any = index.args[0]
    shape = inner.meta["val"].shape
    if any(size != 1 for d, size in enumerate(shape, n - len(shape)) if d != dim):
        return dim, index
    while inner.target in RESHAPES:
        inner = inner.args[0]
    return dim, inner if inner.meta["val"].dim() == 1 else index


def _equal(one: Any, other: Any) -> bool:
    """Say whether two values are the same: one node, or the same operators of one node, such as edges[1]."""
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if one is other or not (isinstance(one, fx.Node) and isinstance(other, fx.Node)):
        return bool(one == other)
    same = one.op == other.op == "call_function" and one.target is other.target and not draws(one.target)
    return same and one.kwargs == other.kwargs and _equal(one.args, other.args)


def _unchanged(node: Any) -> Any:
    """What a value is the same as: x for x.detach() and x[:]."""
    while isinstance(node, fx.Node) and (node.target in IDENTITIES or _is_whole(node)):
        node = node.args[0]
    return node


def _is_whole(node: fx.Node) -> bool:
    return node.target is aten.slice.Tensor and tuple(node.args[2:]) in ((), (0,), (0, 2**63 - 1))


RECOGNISE_SEGMENT_SOFTMAX = Pass((aten.div.Tensor,).__contains__, recognise_segment_softmax)
