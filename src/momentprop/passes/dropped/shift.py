"""Moves functions of an element in front of a dropout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from momentprop.graph.edit import Editor
from momentprop.graph.ops import MOVES, is_pointwise
from momentprop.graph.reach import is_lone_dropout

aten = torch.ops.aten


@dataclass(frozen=True)
class Dropped:
    """Says that a value is dropout(x) + shift, for an x that is still to be made.

    f(dropout(x)) = f(0) + dropout(q (f(x / q) - f(0))) for any function f of an element.
    """

    dropout: fx.Node
    chain: Sequence[fx.Node]  # functions and moves of elements behind it
    shift: float

    @staticmethod
    def behind(value: Any) -> Dropped | None:
        """Find the dropout that a value comes from, by functions of an element and by moves of elements."""
        chain: list[fx.Node] = []
        while (
            isinstance(value, fx.Node)
            and len(value.users) == 1
            and (value.target in MOVES or _is_function(value))
        ):
            chain.insert(0, value)
            value = value.args[0]
        if not is_lone_dropout(value):
            return None
        shift = torch.zeros((), dtype=torch.float64)
        with torch.no_grad():
            for f in chain:
                if f.target not in MOVES:
                    shift = f.target(shift, *f.args[1:], **f.kwargs)  # type: ignore[operator]
        return Dropped(value, chain, shift.item())

    @property
    def drop_probability(self) -> float:
        """Return p."""
        return self.dropout.args[1]  # type: ignore[return-value]

    def x(self, edit: Editor) -> fx.Node:
        """Make x."""
        x: Any = self.dropout.args[0]
        keep = 1 - self.drop_probability
        rescaled = any(f.target not in (*MOVES, aten.relu.default) for f in self.chain)
        if rescaled:
            x = edit.op(aten.mul.Tensor, x, 1 / keep)
        for f in self.chain:
            x = edit.op(f.target, x, *f.args[1:], place=f, **f.kwargs)
        return edit.op(aten.mul.Tensor, shifted(x, -self.shift, edit), keep) if rescaled else x


def shifted(x: fx.Node, shift: float, edit: Editor) -> fx.Node:
    """x + shift."""
    return edit.op(aten.add.Tensor, x, shift, value=x.meta["val"]) if shift else x


def _is_function(node: fx.Node) -> bool:
    """Say whether it works element by element on one value, and on nothing else but numbers."""
    return (
        is_pointwise(node.target)
        and node.all_input_nodes == [node.args[0]]
        and node.meta["val"].dtype.is_floating_point
    )
