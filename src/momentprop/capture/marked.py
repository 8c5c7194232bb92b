"""The k-th marked row of every sample, without a size that depends on values.

    x[mask, :].view(B, -1, C)[:, -1]        # x is [B, T, C]; every sample has as many marks

picks the hidden state at the last end-of-sequence token, as sequence classifiers do. How many rows `x[mask]`
has is known at run time only, which nothing behind it can be planned with. As arithmetic, exact:

    sum over t of x[:, t] w[:, t],    w = mask and (marks up to t == k + 1, or all marks + k + 1 for k < 0).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

from momentprop.graph.edit import emit, remove_unused
from momentprop.graph.ops import VIEWS

aten = torch.ops.aten


def spell_out_marked(graph: fx.Graph) -> None:
    """Rewrite the functional graph in place."""
    for node in list(graph.nodes):
        found = _marked(node)
        if found is not None:
            with graph.inserting_before(node):
                node.replace_all_uses_with(_picked(graph, node, *found))
            remove_unused(graph)


def _marked(select: fx.Node) -> tuple[fx.Node, fx.Node, int] | None:
    """The value, the mask and the number of the mark, if this node is such a choice."""
    if select.target is not aten.select.int or select.args[1] != 1:
        return None
    view: Any = select.args[0]
    while isinstance(view, fx.Node) and _is_whole(view):
        view = view.args[0]
    if not isinstance(view, fx.Node) or view.target not in VIEWS:
        return None
    index: Any = view.args[0]
    if not isinstance(index, fx.Node) or index.target is not aten.index.Tensor:
        return None
    x, masks = cast("tuple[fx.Node, list[fx.Node]]", index.args)
    size: Any = view.args[1]
    value, marks = x.meta["val"], masks[0].meta["val"]
    fits = len(masks) == 1 and marks.dtype == torch.bool and marks.dim() == 2
    same = fits and list(size[2:]) == list(value.shape[2:]) and view.meta["val"].shape[0] == value.shape[0]
    return (x, masks[0], cast(int, select.args[2])) if same else None


def _is_whole(node: fx.Node) -> bool:
    """Say whether a node is the whole slice x[:]."""
    return node.target is aten.slice.Tensor and tuple(node.args[2:]) in ((), (0,), (0, 2**63 - 1))


def _picked(graph: fx.Graph, place: fx.Node, x: fx.Node, mask: fx.Node, number: int) -> fx.Node:
    def op(target: Any, *args: Any) -> fx.Node:
        return emit(graph, target, args, place)

    count = op(aten.cumsum.default, mask, 1)
    wanted: Any = number + 1
    if number < 0:
        wanted = op(aten.add.Tensor, op(aten.sum.dim_IntList, mask, [1], True), number + 1)
    at = op(aten.eq.Tensor if number < 0 else aten.eq.Scalar, count, wanted)
    weight = op(aten.to.dtype, op(aten.logical_and.default, mask, at), x.meta["val"].dtype)
    for _ in range(x.meta["val"].dim() - 2):
        weight = op(aten.unsqueeze.default, weight, -1)
    return op(aten.sum.dim_IntList, op(aten.mul.Tensor, x, weight), [1])
