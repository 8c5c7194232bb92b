"""Joins ReLU and max pooling in one operator, where pooling alone reads what ReLU gives.

In tier `paper` ReLU comes first, on four times as many elements as it would behind pooling. Together they
give the same numbers, but what ReLU gives is not written out, which is most of the memory of that tier.
"""

from __future__ import annotations

import operator

from torch import fx

from momentprop.gaussian.composites import RELU_MOMENTS
from momentprop.rules.max_pooling import RECTIFIED_MAXIMA, TILED_MAXIMA


def join_rectified_maxima(graph: fx.Graph) -> None:
    """Join ReLU and max pooling in place, in a graph of our composite operators."""
    for pooling in graph.find_nodes(op="call_function", target=TILED_MAXIMA):
        mean, variance, kernel = pooling.args
        if (relu := _rectified(pooling, mean, variance)) is not None:
            pooling.target, pooling.args = RECTIFIED_MAXIMA, (*relu.args, kernel)
            for node in (mean, variance, relu):
                graph.erase_node(node)


def _rectified(pooling: fx.Node, mean: object, variance: object) -> fx.Node | None:
    """The moments of ReLU that these are, if nothing else reads them."""
    parts = [part for part in (mean, variance) if isinstance(part, fx.Node)]
    if len(parts) < 2 or any(p.target is not operator.getitem or [*p.users] != [pooling] for p in parts):
        return None
    relu = parts[0].args[0]
    if not isinstance(relu, fx.Node) or relu.target is not RELU_MOMENTS:
        return None
    return relu if [*relu.users] == parts else None
