"""A program for torch.onnx.export that decomposes what ONNX does not have, and leaves the rest as it is.

The exporter has every program decomposed by tracing it anew, with functionalization and free sizes, which
takes most of its time. Of a converted network, one operator in fifty is to be decomposed, and nothing writes
in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from momentprop.exports.onnx_types import promoted
from momentprop.graph.private import HigherOrderOperator, OpOverload
from momentprop.passes.canonical.decompositions import substitute, traced

aten = torch.ops.aten

# the exporter has them as they are; written as views they would compute sizes
_KEPT = (
    aten.contiguous.default,
    aten.expand_as.default,
    aten.mT.default,
    aten.reshape.default,
)
_STATEFUL = (aten.batch_norm.default, aten.instance_norm.default)  # they may update running averages


class FunctionalProgram(ExportedProgram):
    """An exported program whose `run_decompositions` goes operator by operator, where that is enough."""

    @staticmethod
    def of(program: ExportedProgram) -> ExportedProgram:
        """The same program; it shares weights, not the graph."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(program.graph, {}))
        graph.output_node().meta = dict(program.graph.output_node().meta)
        for node in graph.find_nodes(op="call_function", target=aten.view.default):
            node.target = aten.reshape.default  # which takes any strides: decompositions may have others
        for node in graph.find_nodes(op="call_function", target=aten.squeeze.default):
            sizes = node.args[0].meta["val"].shape  # those that are one, not a batch that may be
            dims = [d for d, size in enumerate(sizes) if isinstance(size, int) and size == 1]
            node.target, node.args = aten.squeeze.dims, (node.args[0], dims)
        return FunctionalProgram._with(program, graph)

    @staticmethod
    def _with(program: ExportedProgram, graph: fx.Graph) -> FunctionalProgram:
        signature, nodes = program.graph_signature, cast("Sequence[Any]", graph.output_node().args[0])
        outputs = [
            dataclasses.replace(spec, arg=dataclasses.replace(spec.arg, name=node.name))
            if isinstance(node, fx.Node)
            else spec
            for spec, node in zip(signature.output_specs, nodes, strict=True)
        ]
        return FunctionalProgram(
            root=program.graph_module,
            graph=graph,
            graph_signature=dataclasses.replace(signature, output_specs=outputs),
            state_dict=program.state_dict,
            range_constraints=program.range_constraints,
            module_call_graph=program.module_call_graph,
            example_inputs=program.example_inputs,
            constants=program.constants,
            verifiers=program.verifiers,
        )

    def run_decompositions(
        self, decomp_table: Mapping[Any, Callable[..., Any]] | None = None, **options: Any
    ) -> ExportedProgram:
        table = torch.export.default_decompositions() if decomp_table is None else decomp_table
        graph = _decomposed(self.graph, table)
        if graph is None:
            return super().run_decompositions(decomp_table, **options)
        program = FunctionalProgram._with(self, graph)
        program._graph_module = promoted(program.graph_module)
        return program


def _decomposed(graph: fx.Graph, table: Mapping[Any, Callable[..., Any]]) -> fx.Graph | None:
    """A copy without operators of the table; None where torch has to look at the whole."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    for node in list(copy.nodes):
        if node.op == "get_attr" or isinstance(node.target, HigherOrderOperator):
            return None
        if not isinstance(node.target, OpOverload):
            continue
        if not node.target._schema.returns:  # assertions
            copy.erase_node(node)
            continue
        if node.target is aten.detach_.default:  # which changes no value
            node.replace_all_uses_with(node.args[0])
            copy.erase_node(node)
            continue
        if node.target._schema.is_mutable:
            return None
        function = _decomposition(node.target, table)
        if function is None:
            continue
        expansion = traced(node, function, table)
        if expansion is not None and not _is_functional(expansion):
            expansion = _functionalized(node, function, table)
        if expansion is None or not _is_functional(expansion):
            return None
        substitute(copy, node, expansion)
    _share_sizes(copy)
    copy.eliminate_dead_code()
    return copy


def _functionalized(
    node: fx.Node, function: Callable[..., Any], table: Mapping[Any, Callable[..., Any]]
) -> fx.Graph | None:
    """Trace the function and replace every write in place by a result.

    It is traced twice: functionalization does not see into a composite operator, but it does into its trace.
    """
    inner = traced(node, function)
    if inner is None:
        return None
    pure = torch.func.functionalize(fx.GraphModule({}, inner))

    def run(*args: Any, **kwargs: Any) -> Any:
        return pure(*[v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, (Tensor, torch.SymInt))])

    return traced(node, run, table)


def _share_sizes(graph: fx.Graph) -> None:
    """Keep one node for every size, however many tensors have it."""
    first: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if node.target is aten.sym_size.int and isinstance(node.meta.get("val"), torch.SymInt):
            known = first.setdefault(node.meta["val"].node.expr, node)
            if known is not node:
                node.replace_all_uses_with(known)


def _is_functional(expansion: fx.Graph) -> bool:
    """Say whether nothing is written in place or held outside; strides of size-one dimensions don't count."""
    for node in list(expansion.nodes):
        if node.target is aten.as_strided_.default and len(node.args) == 3:
            given = node.args[0].meta["val"]
            layouts = zip(given.shape, given.stride(), node.meta["val"].stride(), strict=True)
            same_shape = given.shape == node.meta["val"].shape
            if same_shape and all(size == 1 or before == after for size, before, after in layouts):
                node.replace_all_uses_with(node.args[0])
                expansion.erase_node(node)
                continue
        if node.op == "get_attr" or (isinstance(node.target, OpOverload) and node.target._schema.is_mutable):
            return False
    return True


def _decomposition(op: OpOverload, table: Mapping[Any, Callable[..., Any]]) -> Callable[..., Any] | None:
    if op in table:
        return table[op]
    if op in _KEPT or not op._can_decompose():
        return None
    may_alias = any(value.alias_info is not None for value in op._schema.returns)
    return op.decompose if may_alias or op in _STATEFUL else None
