"""Turns in-place operators of a traced graph into their functional forms, respecting aliases.

A raw export graph reads the result of `x.add_(1)` through the operator's own output, but also through
`x` itself and through every view of the storage of `x`. Here each in-place operator becomes the
functional one; a write through a view is carried to the tensor it views (`slice_scatter`, ...); and
later reads of anything that shares the storage see the new value. Nothing is left that could change an
input, a parameter or a buffer.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from momentprop.errors import TraceError
from momentprop.graph.edit import emit, fake_value
from momentprop.graph.ops import ALIASES, LIST_VIEWS, RESHAPES, TRANSPOSES
from momentprop.graph.private import OpOverload

aten = torch.ops.aten

_RENAMED = {
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.normal_.default: aten.normal_functional.default,
}


def functionalize(graph: fx.Graph) -> set[fx.Node]:
    """Rewrite the graph so that no operator changes any of its arguments.

    Returns the placeholders (inputs, parameters, buffers) that the model would have written to.
    """
    functionalizer = _Functionalizer(graph)
    if any(_mutates(node) for node in graph.nodes):
        functionalizer.run()
    graph.eliminate_dead_code()
    return {node for node in functionalizer.writes if node.op == "placeholder"}


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


class _Functionalizer:
    """Tracks, for every node, which tensor it is, which tensor that views, and its present value.

    A tensor is named by a node: the one that made it, or the one that last gave it another shape in place.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.same: dict[fx.Node, fx.Node] = {}  # a node -> another one that names the same tensor now
        self.viewed: dict[fx.Node, fx.Node] = {}  # a view -> what it views
        self.value: dict[fx.Node, fx.Node] = {}  # a tensor -> the node holding its present value
        self.writes: dict[fx.Node, int] = {}  # a storage's owner -> number of writes so far
        self.seen: dict[fx.Node, int] = {}  # a tensor -> the write its value reflects
        self.source: dict[fx.Node, Any] = {}  # a node -> its first argument as the model wrote it

    def run(self) -> None:
        for node in list(self.graph.nodes):
            with self.graph.inserting_before(node):
                first = node.args[0] if node.args else None
                self.source[node] = self.tensor(first) if isinstance(first, fx.Node) else first
                written = _written(node)
                node.args = fx.map_arg(node.args, self.present)
                node.kwargs = fx.map_arg(node.kwargs, self.present)
                if isinstance(written, fx.Node):
                    self.mutate(node, self.tensor(written))
                elif (source := self.viewed_by(node)) is not None:
                    self.viewed[node] = source
            self.seen[node] = self.writes.get(self.owner(node), 0)

    def mutate(self, node: fx.Node, target: fx.Node) -> None:
        """Make the node, which changes `target`, the functional operator, and its result the new value."""
        if torch.Tag.inplace_view in node.target.tags:  # type: ignore[union-attr]
            # unsqueeze_, transpose_, ...: the tensor itself becomes a view of what it was
            node.target = _functional(node)
            self.viewed[node] = target
            self.same[target] = node
            return
        if node.target is aten.copy_.default:  # aten.copy has no derivative
            like, source = node.args[:2]
            node.target, node.args = aten.expand_as.default, (source, like)
        else:
            if node.target is aten.bernoulli_.float and len(node.args) == 1 and "p" not in node.kwargs:
                node.args = (
                    *node.args,
                    0.5,
                )  # its default, left out by the tracer; aten.bernoulli.p has none
            node.target = _functional(node)
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "out"}
        self.same[node] = target
        node.meta["val"] = fake_value(node)
        new = node
        if node.meta["val"].dtype != target.meta["val"].dtype:  # in place, the target's type stays
            with self.graph.inserting_after(node):
                new = emit(self.graph, aten.to.dtype, (node, target.meta["val"].dtype), node)
        with self.graph.inserting_after(new):
            self.write(target, new)

    def tensor(self, node: fx.Node) -> fx.Node:
        """The node that names the tensor now."""
        while node in self.same:
            node = self.same[node]
        return node

    def present(self, node: fx.Node) -> fx.Node:
        return self.read(self.tensor(node))

    def viewed_by(self, node: fx.Node) -> fx.Node | None:
        """The tensor this node is a view of, if it is one."""
        source = self.source[node]
        if node.target is operator.getitem:  # an element of a list of views
            source = self.source[source] if _view_schema(source) else None
        elif not _view_schema(node):
            source = None
        if not isinstance(source, fx.Node):
            return None
        mine, its = node.meta.get("val"), source.meta.get("val")
        if not (isinstance(mine, torch.Tensor) and isinstance(its, torch.Tensor)):
            return None
        # reshape, contiguous, to(): a view or a copy, as the strides have it
        same = mine.untyped_storage()._cdata == its.untyped_storage()._cdata
        return source if same else None

    def owner(self, node: fx.Node) -> fx.Node:
        while node in self.viewed:
            node = self.viewed[node]
        return node

    def read(self, node: fx.Node) -> fx.Node:
        """The node that holds the present value; a view written through elsewhere is taken again."""
        version = self.writes.get(self.owner(node), 0)
        if node in self.viewed and self.seen.get(node) != version:
            source = self.read(self.viewed[node])
            self.value[node] = _view_again(self.graph, node, source)
            self.seen[node] = version
        return self.value.get(node, node)

    def write(self, target: fx.Node, new: fx.Node) -> None:
        """Carry a new value of `target` to the tensor it views, and so on to the storage's owner."""
        chain = [(target, new)]
        node, point = target, new
        while node in self.viewed:
            source = self.viewed[node]
            with self.graph.inserting_before(new):
                old = self.read(source)
            with self.graph.inserting_before(point.next):
                point = _scatter(self.graph, node, old, chain[-1][1])
            node = source
            chain.append((node, point))
        self.writes[node] = self.writes.get(node, 0) + 1
        for written, value in chain:
            self.value[written] = value
            self.seen[written] = self.writes[node]


def _written(node: fx.Node) -> fx.Node | None:
    """The argument that the node changes."""
    if not _mutates(node):
        return None
    written: Any = node.kwargs["out"] if "out" in node.kwargs else node.args[0]
    return written


def _functional(node: fx.Node) -> OpOverload:
    """The operator of the same name and arguments that changes none of them."""
    op = node.target
    assert isinstance(op, OpOverload)
    if op in _RENAMED:
        return _RENAMED[op]
    name = op._schema.name.split("::")[1]
    is_out = "out" in node.kwargs
    packet = getattr(getattr(torch.ops, op.namespace), name if is_out else name.removesuffix("_"), None)
    if packet is not None and (is_out or name.endswith("_")):
        wanted = _argument_types(op)
        overloads = [getattr(packet, overload) for overload in packet.overloads()]
        overloads.sort(key=lambda other: other._overloadname != op._overloadname)
        for other in overloads:
            if not other._schema.is_mutable and _argument_types(other) == wanted:
                return other
    raise TraceError(f"{op} changes its argument and has no functional form\n{_where(node)}")


def _argument_types(op: OpOverload) -> list[str]:
    return [str(a.type) for a in op._schema.arguments if not a.is_out]


def _view_schema(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload) or not node.target._schema.returns:
        return False
    alias = node.target._schema.returns[0].alias_info
    return alias is not None and not alias.is_write


def _view_again(graph: fx.Graph, view: fx.Node, source: fx.Node) -> fx.Node:
    if view.target is operator.getitem:
        producer = view.args[0]
        assert isinstance(producer, fx.Node)
        again = emit(graph, producer.target, (source, *producer.args[1:]), producer)
        return emit(graph, operator.getitem, (again, view.args[1]), view)
    return emit(graph, view.target, (source, *view.args[1:]), view)


def _scatter(graph: fx.Graph, view: fx.Node, old: fx.Node, new: fx.Node) -> fx.Node:
    """Replace the elements of the viewed tensor, `old`, that `view` sees by `new`."""
    op: Any = view.target
    if op is aten.as_strided.default:
        raise TraceError(
            f"an in-place write through {op} cannot be followed; write it out of place\n{_where(view)}"
        )
    if op is operator.getitem:
        found = _scatter_piece(graph, view, old, new)
    elif op is aten.slice.Tensor or op is aten.narrow.default:
        found = _scatter_slice(graph, view, old, new)
    else:
        found = _scatter_whole(graph, view, old, new)
    return _scatter_by_index(graph, view, old, new) if found is None else found


def _scatter_piece(graph: fx.Graph, view: fx.Node, old: fx.Node, new: fx.Node) -> fx.Node | None:
    """Write one of several pieces that an operator returns."""
    producer: Any = view.args[0]
    index: Any = view.args[1]
    if producer.target is aten.unbind.int:
        dim = producer.args[1] if len(producer.args) > 1 else 0
        return emit(graph, aten.select_scatter.default, (old, new, dim, index), view)
    if producer.target not in LIST_VIEWS:
        return None
    dim = producer.args[2] if len(producer.args) > 2 else 0
    sizes = [piece.shape[dim] for piece in producer.meta["val"]]
    start = sum(sizes[:index])
    return emit(graph, aten.slice_scatter.default, (old, new, dim, start, start + sizes[index]), view)


def _scatter_slice(graph: fx.Graph, view: fx.Node, old: fx.Node, new: fx.Node) -> fx.Node:
    args: Any = view.args
    if view.target is aten.narrow.default:
        args = (*args[:3], args[2] + args[3])
    elif 0 in view.meta["val"].shape:
        return old  # nothing was written
    return emit(graph, aten.slice_scatter.default, (old, new, *_bounded(args[1:], old)), view)


def _scatter_whole(graph: fx.Graph, view: fx.Node, old: fx.Node, new: fx.Node) -> fx.Node | None:
    """Write through a view that has an operator of its own for that, or sees all elements."""
    op: Any = view.target
    args: Any = view.args
    if op in _SCATTERS:
        return emit(graph, _SCATTERS[op], (old, new, *args[1:]), view)
    if op in TRANSPOSES:
        return emit(graph, op, (new, *args[1:]), view)
    if op is aten.permute.default:
        order = [d % len(args[1]) for d in args[1]]
        return emit(graph, op, (new, [order.index(d) for d in range(len(order))]), view)
    if op in RESHAPES:
        return emit(graph, aten.reshape_as.default, (new, old), view)
    return new if op in ALIASES or str(op).startswith("aten.to.") else None


def _bounded(arguments: tuple[Any, ...], sliced: fx.Node) -> tuple[Any, ...]:
    """Dimension, start, stop and step of a slice, without negative numbers, which torch.vmap mistakes."""
    defaults: tuple[Any, ...] = (0, None, None, 1)
    dim, start, stop, step = arguments + defaults[len(arguments) :]
    stop = None if isinstance(stop, int) and stop == _END else stop
    size = sliced.meta["val"].shape[dim]
    if isinstance(size, int) and all(isinstance(v, int | None) for v in (start, stop)):
        start, stop, _ = slice(start, stop).indices(size)
    return dim, start, stop, step


def _scatter_by_index(graph: fx.Graph, view: fx.Node, old: fx.Node, new: fx.Node) -> fx.Node:
    """Write through any view: the positions of its elements are the same view of 0, 1, 2, ..."""
    ones = emit(graph, aten.ones_like.default, (old,), view, {"dtype": torch.int64})
    count = emit(graph, aten.cumsum.default, (emit(graph, aten.reshape.default, (ones, [-1]), view), 0), view)
    numbers = emit(
        graph, aten.reshape_as.default, (emit(graph, aten.sub.Tensor, (count, 1), view), old), view
    )
    index = emit(graph, aten.reshape.default, (_view_again(graph, view, numbers), [-1]), view)
    flat, values = (emit(graph, aten.reshape.default, (value, [-1]), view) for value in (old, new))
    written = emit(graph, aten.scatter.src, (flat, 0, index, values), view)
    return emit(graph, aten.reshape_as.default, (written, old), view)


_END = 2**63 - 1  # how "to the end" is traced; with vmap it overflows
_SCATTERS = {
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}


def _where(node: fx.Node) -> str:
    return str(node.meta.get("stack_trace", "")).strip()
