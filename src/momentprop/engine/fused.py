"""Operators that take the place of rules at some nodes: for several in a row, or where more is known.

A tier lists the finders it uses. Each looks at a whole graph and says which nodes it answers for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import fx

from momentprop.rules.linearization import Propagated
from momentprop.rules.registry import Role


class Operator(Protocol):
    """Moments of an operator's output: a `Rule`, or like one."""

    @property
    def role(self) -> Role: ...

    def propagate(self, *args: Any, **kwargs: Any) -> Propagated: ...


@dataclass(frozen=True, eq=False)
class Fused:
    """The last of several nodes, computed from the arguments of the first."""

    operator: Operator
    args: tuple[Any, ...]
    covers: tuple[fx.Node, ...] = ()  # the nodes before the last, which nothing else uses


Finder = Callable[[fx.Graph, Collection[fx.Node]], Mapping[fx.Node, Fused]]  # (graph, what is random in it)
