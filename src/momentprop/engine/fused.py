"""Several operators in a row that one operator stands for, because together they can be told better."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


@dataclass(frozen=True)
class Fused:
    """The last of several nodes, computed from the arguments of the first."""

    operator: Any  # like a rule
    args: tuple[Any, ...]
    covers: tuple[fx.Node, ...]  # the nodes before the last, which nothing else uses


def is_lone_dropout(node: Any) -> bool:
    """Whether it drops elements, one by one, for a single user."""
    if not isinstance(node, fx.Node) or node.target is not aten.dropout.default or len(node.users) > 1:
        return False
    _, probability, train = node.args
    return bool(train) and isinstance(probability, float) and 0 < probability < 1
