"""Turns an exported program into one functional graph in the vocabulary that rules are written for."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from momentprop.capture.attention import drops_weights, spell_out_attention
from momentprop.capture.functionalize import functionalize
from momentprop.capture.marked import spell_out_marked
from momentprop.capture.noise import normalize_noise
from momentprop.errors import DropProbabilityError
from momentprop.graph.edit import emit, remove_unused
from momentprop.graph.ops import DROPOUTS, VIEWS
from momentprop.graph.place import place_of
from momentprop.graph.private import OpOverload
from momentprop.graph.schema import pass_by_position

aten = torch.ops.aten
higher_order = torch.ops.higher_order


def normalize(program: ExportedProgram, prefix: str) -> tuple[fx.Graph, tuple[str, ...], frozenset[str]]:
    """The graph without assertions, idle dropouts and unused state; the names of its state, and of what of
    it the model writes to. Names in the program start with `prefix`."""
    graph = program.graph_module.graph
    inline_regions(graph)
    for node in list(graph.nodes):
        if _is_assertion(node.target):
            graph.erase_node(node)
        else:
            _spell_out(node)
    written = {node.name for node in functionalize(graph)}
    for node in list(graph.nodes):
        if drops_weights(node):
            spell_out_attention(graph, node)
    for node in list(graph.nodes):
        if node.target in DROPOUTS:
            _check_dropout(graph, node)
    remove_unused(graph)
    _spell_out_numbers(graph, program)
    normalize_noise(graph)
    spell_out_marked(graph)
    kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
    specs = program.graph_signature.input_specs
    targets = {s.arg.name: str(s.target).removeprefix(prefix) for s in specs if s.kind in kinds}
    state = drop_unused_state(graph, targets)
    return graph, state, frozenset(targets[name] for name in written if name in targets)


def drop_unused_state(graph: fx.Graph, targets: dict[str, str]) -> tuple[str, ...]:
    """Remove placeholders of state that nothing uses; what the others stand for."""
    state = []
    for node in list(graph.nodes):
        if node.op == "placeholder" and node.name in targets:
            if node.users:
                state.append(targets[node.name])
            else:
                graph.erase_node(node)
    graph.lint()
    return tuple(state)


def inline_regions(graph: fx.Graph) -> None:
    """Inline as plain nodes what the tracer wraps for no_grad, enable_grad or a disabled autocast."""
    for node in list(graph.nodes):
        if node.target is higher_order.wrap_with_set_grad_enabled:
            region, inputs = node.args[1], node.args[2:]
        elif node.target is higher_order.wrap_with_autocast and not node.args[2]:
            region, inputs = node.args[4], node.args[5:]
        else:
            continue
        inner = getattr(graph.owning_module, str(region.target))
        inline_regions(inner.graph)
        placeholders = [n for n in inner.graph.nodes if n.op == "placeholder"]
        mapping = dict(zip(placeholders, inputs, strict=True))
        for nested in inner.graph.find_nodes(op="get_attr"):  # regions of other kinds, within this one
            setattr(graph.owning_module, f"{region.target}_{nested.target}", getattr(inner, nested.target))
            nested.target = f"{region.target}_{nested.target}"
        with graph.inserting_before(node):
            outputs: Any = graph.graph_copy(inner.graph, mapping)
        for user in list(node.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(outputs[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
        if not region.users:
            graph.erase_node(region)


def _spell_out(node: fx.Node) -> None:
    """Pass by position all arguments that the schema allows so: rules need to look in one place only."""
    if not isinstance(node.target, OpOverload):
        return
    if node.target in VIEWS:
        # the idiom x.view(x.size(0), -1) fails for an empty batch: say what -1 stands for, where it is known
        known = node.meta["val"].shape
        size = [
            known[d] if isinstance(s, int) and s == -1 and isinstance(known[d], int) else s
            for d, s in enumerate(node.args[1])  # type: ignore[arg-type]
        ]
        node.args = (node.args[0], size, *node.args[2:])
    pass_by_position(node)


def _spell_out_numbers(graph: fx.Graph, program: ExportedProgram) -> None:
    """Write the values of tensors made in `forward` into the graph: torch.tensor(0.3), say."""
    made = {
        s.arg.name: s.target
        for s in program.graph_signature.input_specs
        if s.kind is InputKind.CONSTANT_TENSOR
    }
    for node in graph.find_nodes(op="placeholder"):
        value = program.constants.get(made.get(node.name, ""))
        if isinstance(value, torch.Tensor) and value.dim() == 0 and node.users:
            user = next(iter(node.users))
            with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
                options = {"dtype": value.dtype, "device": value.device}
                number = emit(graph, aten.full.default, ([], value.item()), user, options, node.meta["val"])
            node.replace_all_uses_with(number)


def _check_dropout(graph: fx.Graph, node: fx.Node) -> None:
    source, probability, train = node.args
    if not train or probability == 0:
        node.replace_all_uses_with(source)  # type: ignore[arg-type]
        graph.erase_node(node)
    elif not 0 < probability < 1:  # type: ignore[operator]
        raise DropProbabilityError(
            f"dropout with p = {probability} leaves nothing to propagate; use 0 <= p < 1\n  {place_of(node)}"
        )


def _is_assertion(target: Any) -> bool:
    return isinstance(target, OpOverload) and target._schema.name.startswith(
        ("aten::_assert", "aten::sym_constrain")
    )
