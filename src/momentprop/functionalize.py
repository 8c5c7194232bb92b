"""In-place operators of a traced graph -> their functional forms, aliasing respected.

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
from torch._ops import OpOverload

from momentprop.errors import TraceError

aten = torch.ops.aten

_RENAMED = {aten.bernoulli_.float: aten.bernoulli.p}
_LIST_VIEWS = (
    aten.split.Tensor,
    aten.split.sizes,
    aten.split_with_sizes.default,
    aten.chunk.default,
)


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
    """Tracks, for every node, which tensor it views and which node holds its present value."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.viewed: dict[fx.Node, fx.Node] = {}  # a view -> what it views
        self.value: dict[fx.Node, fx.Node] = {}  # a node -> the node holding its present value
        self.writes: dict[fx.Node, int] = {}  # a storage's owner -> number of writes so far
        self.seen: dict[fx.Node, int] = {}  # a node -> the write its value reflects
        self.source: dict[fx.Node, Any] = {}  # a node -> its first argument as the model wrote it

    def run(self) -> None:
        for node in list(self.graph.nodes):
            with self.graph.inserting_before(node):
                self.source[node] = node.args[0] if node.args else None
                node.args = fx.map_arg(node.args, self.read)
                node.kwargs = fx.map_arg(node.kwargs, self.read)
                if _mutates(node):
                    target = self.source[node]
                    if node.target is aten.copy_.default:  # aten.copy has no derivative
                        like, source = node.args[:2]
                        cast = _call(self.graph, aten.to.other, (source, like), node)
                        node.target, node.args = aten.expand_as.default, (cast, like)
                    else:
                        node.target = _functional(node)
                    self.viewed[node] = target
                    with self.graph.inserting_after(node):
                        self.write(target, node)
                elif (source := self.viewed_by(node)) is not None:
                    self.viewed[node] = source
            self.seen[node] = self.writes.get(self.owner(node), 0)

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
            self.value[node] = source if _is_alias(node) else _view_again(self.graph, node, source)
            self.seen[node] = version
        return self.value.get(node, node)

    def write(self, target: fx.Node, new: fx.Node) -> None:
        """Carry a new value of `target` to the tensor it views, and so on to the storage's owner."""
        chain = [(target, new)]
        node, point = target, new
        while node in self.viewed:
            source = self.viewed[node]
            if not _is_alias(node):
                with self.graph.inserting_before(new):
                    old = self.read(source)
                with self.graph.inserting_after(point):
                    point = _scatter(self.graph, node, old, chain[-1][1])
            node = source
            chain.append((node, point))
        self.writes[node] = self.writes.get(node, 0) + 1
        for written, value in chain:
            self.value[written] = value
            self.seen[written] = self.writes[node]


def _functional(node: fx.Node) -> OpOverload:
    op = node.target
    assert isinstance(op, OpOverload)
    if op in _RENAMED:
        return _RENAMED[op]
    name = op._schema.name.split("::")[1]
    packet = getattr(getattr(torch.ops, op.namespace), name.removesuffix("_"), None)
    found = getattr(packet, op._overloadname, None) if name.endswith("_") else None
    if found is None:
        raise TraceError(f"{op} changes its argument and has no functional form\n{_where(node)}")
    return found


def _is_alias(node: fx.Node) -> bool:
    """Result of an in-place operator: the same tensor as its argument."""
    return node.target is not operator.getitem and not _view_schema(node)


def _view_schema(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload) or not node.target._schema.returns:
        return False
    alias = node.target._schema.returns[0].alias_info
    return alias is not None and not alias.is_write


def _view_again(graph: fx.Graph, view: fx.Node, source: fx.Node) -> fx.Node:
    if view.target is operator.getitem:
        producer = view.args[0]
        assert isinstance(producer, fx.Node)
        again = _call(graph, producer.target, (source, *producer.args[1:]), producer)
        return _call(graph, operator.getitem, (again, view.args[1]), view)
    return _call(graph, view.target, (source, *view.args[1:]), view)


def _scatter(graph: fx.Graph, view: fx.Node, old: fx.Node, new: fx.Node) -> fx.Node:
    """The viewed tensor, `old`, with the elements seen by `view` replaced by `new`."""
    op: Any = view.target
    args: Any = view.args
    like = old
    if op is operator.getitem:
        producer = args[0]
        if producer.target is aten.unbind.int:
            dim = producer.args[1] if len(producer.args) > 1 else 0
            return _call(graph, aten.select_scatter.default, (old, new, dim, args[1]), like)
        if producer.target in _LIST_VIEWS:
            dim = producer.args[2] if len(producer.args) > 2 else 0
            sizes = [piece.shape[dim] for piece in producer.meta["val"]]
            start = sum(sizes[: args[1]])
            stop = start + sizes[args[1]]
            return _call(graph, aten.slice_scatter.default, (old, new, dim, start, stop), like)
    if op is aten.slice.Tensor:
        return _call(graph, aten.slice_scatter.default, (old, new, *args[1:]), like)
    if op is aten.select.int:
        return _call(graph, aten.select_scatter.default, (old, new, *args[1:]), like)
    if op is aten.diagonal.default:
        return _call(graph, aten.diagonal_scatter.default, (old, new, *args[1:]), like)
    if op is aten.narrow.default:
        return _call(graph, aten.slice_scatter.default, (old, new, args[1], args[2], args[2] + args[3]), like)
    if op in (aten.transpose.int, aten.t.default, aten.swapaxes.default, aten.swapdims.default):
        return _call(graph, op, (new, *args[1:]), like)
    if op is aten.permute.default:
        order = [d % len(args[1]) for d in args[1]]
        inverse = [order.index(d) for d in range(len(order))]
        return _call(graph, op, (new, inverse), like)
    if op in (
        aten.view.default,
        aten.view_as.default,
        aten.reshape.default,
        aten.reshape_as.default,
        aten.flatten.using_ints,
        aten.unflatten.int,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
    ):
        return _call(graph, aten.reshape_as.default, (new, old), like)
    if op in (aten.detach.default, aten.alias.default, aten.contiguous.default) or str(op).startswith(
        "aten.to."
    ):
        return new
    raise TraceError(
        f"an in-place write through {op} cannot be followed; write it out of place\n{_where(view)}"
    )


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta = dict(like.meta)
    return node


def _where(node: fx.Node) -> str:
    return str(node.meta.get("stack_trace", "")).strip()
