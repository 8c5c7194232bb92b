"""Refuses outputs that are integers or booleans and depend on noise: they have no mean and variance."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx

from momentprop.errors import MomentpropError
from momentprop.graph.ops import FILLED
from momentprop.graph.place import place_of
from momentprop.graph.reach import is_number, reach, values_of

_SIZES = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


def refuse_integers(graph: fx.Graph, random: Collection[fx.Node]) -> None:
    """Raise if noise reaches an output that is not a number, be it by an index or a comparison."""
    outputs: Any = next(reversed(graph.nodes)).args[0]
    reached = reach(graph, random, carries=_depends_on_values, brings=values_of)
    for i, node in enumerate(outputs):
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if isinstance(value, Tensor) and not is_number(value) and node in reached:
            which = f"output {i}" if len(outputs) > 1 else "the output"
            raise MomentpropError(
                f"{which} is {value.dtype} and depends on random values, so it has no mean and variance:\n"
                f"  {place_of(node)}".rstrip()
                + "\nReturn the logits instead; mp.classify(...).label is the argmax"
            )


def _depends_on_values(node: fx.Node) -> bool:
    return node.target not in FILLED and not isinstance(node.meta.get("val"), _SIZES)
