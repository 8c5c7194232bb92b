"""Says where the backward sweep stops.

A cut is a region of the graph: the sweep goes through every random value in it, and nowhere else. Random
values that are made outside and used inside are its frontier. They count as independent sources of noise with
the variances of the forward sweep. A region, never a single node: around a node inside a residual block the
sweep would go on along the shortcut.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import fx

from momentprop.graph.ops import HEADS
from momentprop.graph.place import place_of


@dataclass(frozen=True)
class Cut:
    """The part of the network that is swept: what meets `inside`, and everything computed from it."""

    inside: Callable[[fx.Node], bool]
    name: str

    @staticmethod
    def everything() -> Cut:
        """Sweep back to every source of noise."""
        return Cut(lambda node: True, "everything")

    @staticmethod
    def outputs() -> Cut:
        """Sweep nothing: outputs have the variances of the forward sweep, and no covariance."""
        return Cut(lambda node: False, "outputs")

    @staticmethod
    def behind(*modules: str) -> Cut:
        """Sweep what is computed from the results of these modules, named by their paths in the model.

        A module's results are the values inside it that something outside uses.
        """

        def is_in(node: fx.Node) -> bool:
            path = place_of(node).module
            return any(path == module or path.startswith(f"{module}.") for module in modules)

        def follows(node: fx.Node) -> bool:
            return not is_in(node) and any(map(is_in, node.all_input_nodes))

        return Cut(follows, f"behind {', '.join(modules)}")

    @staticmethod
    def after(*names: str) -> Cut:
        """Sweep what is computed from the values of these nodes."""
        return Cut(
            lambda node: any(n.name in names for n in node.all_input_nodes), f"after {', '.join(names)}"
        )

    def region(self, graph: fx.Graph, random: Collection[fx.Node]) -> set[fx.Node]:
        """Find the nodes that are swept."""
        found: set[fx.Node] = set()
        parts: set[fx.Node] = set()  # of a list that is made outside: each is a source of its own
        for node in graph.nodes:
            if node not in random:
                continue
            reached = self.inside(node) or any(n in found or n in parts for n in node.all_input_nodes)
            if reached and node.target is operator.getitem and node.args[0] not in found:
                parts.add(node)
            elif reached:
                found.add(node)
        return found


def frontier(graph: fx.Graph, region: set[fx.Node], random: Collection[fx.Node]) -> set[fx.Node]:
    """Random values made outside the region and used inside; outputs, and their logits, are used inside."""

    def is_wanted(user: fx.Node) -> bool:
        return user in region or user.op == "output" or (user.target in HEADS and _is_output(user))

    return {n for n in graph.nodes if n in random and n not in region and any(map(is_wanted, n.users))}


def _is_output(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)
