"""Edits traced graphs: new nodes have the value (a fake tensor) and the place that traced nodes have."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from momentprop.graph.ops import draws
from momentprop.graph.place import place_meta
from momentprop.graph.private import FakeTensor
from momentprop.graph.reach import extend, reach

aten = torch.ops.aten


class Editor:
    """Makes, replaces and erases nodes of one graph.

    >>> from torch import fx
    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> node = graph.call_function(aten.abs.default, (x,))
    >>> _ = graph.output([node])
    >>> edit = Editor(graph)
    >>> with edit.at(node):
    ...     edit.replace(node, edit.op(aten.mul.Tensor, x, 2.0))
    >>> [str(n.target) for n in graph.nodes]
    ['x', 'aten.mul.Tensor', 'output']
    """

    def __init__(self, graph: fx.Graph, inputs: Sequence[fx.Node] = ()) -> None:
        self.graph, self.inputs = graph, inputs
        self.erased: set[fx.Node] = set()
        self._place: fx.Node | None = None

    @functools.cached_property
    def varying(self) -> set[fx.Node]:
        """Return what depends on inputs or on random numbers, new nodes included. All else is constant."""
        return reach(self.graph, self.inputs, begins=_draws)

    @contextlib.contextmanager
    def at(self, node: fx.Node) -> Iterator[None]:
        """Put new nodes before this one; messages about them name its place."""
        before, self._place = self._place, node
        with self.graph.inserting_before(node):
            yield
        self._place = before

    def op(
        self, target: Any, *args: Any, place: fx.Node | None = None, value: Any = None, **kwargs: Any
    ) -> fx.Node:
        """Call an operator. Its place may be another one, and its value be given where that is known."""
        place = place or self._place
        assert place is not None, "say where with `at`"
        node = emit(self.graph, target, args, place, kwargs, value)
        self._follow(node)
        return node

    def again(self, node: fx.Node) -> fx.Node:
        """Add the call of a node once more."""
        copied = self.graph.node_copy(node)
        self._follow(copied)
        return copied

    def inline(self, inner: fx.Graph, inputs: Sequence[fx.Node], place: fx.Node | None = None) -> Any:
        """Copy a graph, whose placeholders stand for these inputs, and return what it returns."""
        place = place or self._place
        assert place is not None, "say where with `at`"
        placeholders = [n for n in inner.nodes if n.op == "placeholder"]
        mapping = dict(zip(placeholders, inputs, strict=True))
        output: Any = self.graph.graph_copy(inner, mapping)
        for original in inner.nodes:
            if original.op == "call_function":
                copied = mapping[original]
                copied.meta = {**place_meta(place), **copied.meta}
                self._follow(copied)
        return output

    def replace(self, old: fx.Node, new: fx.Node | Sequence[fx.Node]) -> None:
        """Use another node in place of this one, or others in place of its several results."""
        if isinstance(new, fx.Node):
            old.replace_all_uses_with(new)
        else:
            for user in list(old.users):  # each takes one of the results
                user.replace_all_uses_with(new[user.args[1]])  # type: ignore[index]
                self.erase(user)
        if old not in self.erased:
            self.erase(old)

    def erase(self, node: fx.Node) -> None:
        """Erase a node that nothing uses, and what only it used."""
        used = node.all_input_nodes
        self.graph.erase_node(node)
        self.erased.add(node)
        for other in used:
            if not other.users and other.op != "placeholder" and other not in self.erased:
                self.erase(other)

    def _follow(self, node: fx.Node) -> None:
        if "varying" in self.__dict__:
            extend(self.varying, node, begins=_draws)


def _draws(node: fx.Node) -> bool:
    return draws(node.target)


def emit(
    graph: fx.Graph,
    target: Any,
    args: tuple[Any, ...],
    place: fx.Node,
    kwargs: dict[str, Any] | None = None,
    value: Any = None,
) -> fx.Node:
    """Call `target` at the point of insertion; messages about it name the place of the node `place`."""
    node = graph.call_function(target, args, kwargs or {})
    node.meta = place_meta(place)
    node.meta["val"] = fake_value(node) if value is None else value
    return node


def repeated(graph: fx.Graph, value: fx.Node, times: int, dim: int, place: fx.Node) -> fx.Node:
    """Repeat every element so many times in a row along a dimension, counted from the last one.

    `repeat_interleave` would ask its input for its sizes, and the batch would be one of them from then on.
    """
    n = value.meta["val"].dim()
    at = n + dim + 1
    value = emit(graph, aten.unsqueeze.default, (value, at), place)
    sizes = [times if d == at else -1 for d in range(n + 1)]
    value = emit(graph, aten.expand.default, (value, sizes), place)
    return emit(graph, aten.flatten.using_ints, (value, at - 1, at), place)


def fake_value(node: fx.Node) -> Any:
    """Return what the node computes, as a fake tensor of the right shape, strides and dtype."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    mode = _mode(node)
    target: Any = node.target
    if mode is None:
        return None
    with mode, torch.no_grad():
        return target(*args, **kwargs)


def _mode(node: fx.Node) -> Any:
    """The fake mode of the graph: of an argument, or else of any value in it."""
    others = (*node.all_input_nodes, *node.graph.nodes)
    return next((mode for n in others if (mode := fake_mode(n.meta.get("val"))) is not None), None)


def fake_mode(values: Any) -> Any:
    """Return the mode that the fake tensors among values belong to; None if there are none."""
    return next((v.fake_mode for v in pytree.tree_leaves(values) if isinstance(v, FakeTensor)), None)


def extracted(nodes: Sequence[fx.Node], first: Sequence[fx.Node] = ()) -> tuple[fx.Graph, list[fx.Node]]:
    """Make a graph of these nodes alone, which returns the last; and say what it takes, `first` in front."""
    used = dict.fromkeys([*first, *(n for node in nodes for n in node.all_input_nodes)])
    inside = set(nodes)
    given = [n for n in used if n not in inside]
    graph = fx.Graph()
    env = {node: graph.placeholder(node.name) for node in given}
    for node in nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(env[nodes[-1]])
    return graph, given


def remove_unused(graph: fx.Graph) -> None:
    """Remove what no output depends on, also where it draws random numbers; the graph is functional."""
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
