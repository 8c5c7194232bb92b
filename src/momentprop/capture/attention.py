"""Spells out fused attention: softmax(q k^T * scale + mask), dropout of the weights, times v.

Each part has a rule of its own. So the fused operator gives the same moments as attention written out in the
model, and its dropout is a dropout like any other, to the rules and to Monte Carlo.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from momentprop.graph.edit import emit, repeated
from momentprop.graph.schema import bind

aten = torch.ops.aten

ATTENTION = aten.scaled_dot_product_attention.default


def drops_weights(node: fx.Node) -> bool:
    """Say whether the node is a fused attention with dropout."""
    return node.target is ATTENTION and bind(ATTENTION, node.args, node.kwargs)["dropout_p"] > 0


def spell_out_attention(graph: fx.Graph, node: fx.Node) -> None:
    """Replace a fused attention by its parts."""
    given = bind(ATTENTION, node.args, node.kwargs)
    query, key, value = given["query"], given["key"], given["value"]
    scale = given["scale"]
    if scale is None:
        scale = 1 / math.sqrt(query.meta["val"].shape[-1])

    def op(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return emit(graph, target, args, node, kwargs)

    with graph.inserting_before(node):
        if given["enable_gqa"]:  # several heads of queries share one of keys and values
            repeats = query.meta["val"].shape[-3] // key.meta["val"].shape[-3]
            key, value = (repeated(graph, v, repeats, -3, node) for v in (key, value))
        scores = op(aten.matmul.default, query, op(aten.transpose.int, key, -2, -1))
        scores = op(aten.mul.Tensor, scores, scale)
        mask = given["attn_mask"]
        if given["is_causal"]:
            rows, columns = scores.meta["val"].shape[-2:]
            device = query.meta["val"].device
            ones = op(aten.ones.default, [rows, columns], dtype=torch.bool, device=device)
            mask = op(aten.tril.default, ones)
        if mask is not None and mask.meta["val"].dtype == torch.bool:
            scores = op(aten.masked_fill.Scalar, scores, op(aten.logical_not.default, mask), -math.inf)
        elif mask is not None:
            scores = op(aten.add.Tensor, scores, mask)
        weights = op(aten.softmax.int, scores, -1)
        if given["dropout_p"] > 0:
            weights = op(aten.dropout.default, weights, given["dropout_p"], True)
        result = op(aten.matmul.default, weights, value)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
