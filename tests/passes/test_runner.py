"""Passes are applied until nothing changes; those that say so keep the function, on any graph."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import fx, nn

from graphs import graphs
from momentprop.capture.idle import outputs_of
from momentprop.capture.trace import Trace, trace
from momentprop.graph.edit import Editor
from momentprop.passes.canonical import CANONICAL
from momentprop.passes.rewrites import REWRITES
from momentprop.passes.runner import Pass, run
from networks import BATCH, Shape
from passed import passed

aten = torch.ops.aten


def outputs(made: Trace, model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """With its noise idle."""
    state = [
        made.constants[n] if n in made.constants else functools.reduce(getattr, n.split("."), model)
        for n in made.state
    ]
    return outputs_of(made.graph, made.root, [*state, x])


# torch says so once per process, for the plain network too
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@settings(deadline=None, max_examples=settings.default.max_examples, suppress_health_check=list(HealthCheck))
@given(graphs())
def test_exact_passes_keep_the_function(network: tuple[nn.Sequential, Shape]) -> None:
    model, shape = network
    assert all(one.exact for one in (*CANONICAL, *REWRITES))
    x = torch.randn(BATCH, *shape, dtype=torch.float64)
    before = trace(model.double(), x, dropout=torch.nn.Module)
    expected = outputs(before, model, x)
    for passes in (CANONICAL, REWRITES, (*CANONICAL, *REWRITES)):
        after = passed(before, passes)
        for one, other in zip(outputs(after, model, x), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def chain(*ops: object) -> fx.Graph:
    """Operators one after the other."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    for op in ops:
        x = graph.call_function(op, (x,))
    graph.output([x])
    return graph


def targets(graph: fx.Graph) -> list[object]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def test_a_pass_sees_what_later_passes_made() -> None:
    def exp_is_sin(node: fx.Node, edit: Editor) -> fx.Node:
        return edit.op(aten.sin.default, node.args[0])

    def cos_is_exp(node: fx.Node, edit: Editor) -> fx.Node:
        return edit.op(aten.exp.default, node.args[0])

    passes = (
        Pass((aten.exp.default,).__contains__, exp_is_sin, exact=False),
        Pass((aten.cos.default,).__contains__, cos_is_exp, exact=False),
    )
    graph = chain(aten.tanh.default, aten.cos.default)
    run(graph, passes)
    assert targets(graph) == [aten.tanh.default, aten.sin.default]
    assert str(passes[0]) == "exp_is_sin"


def test_what_a_pass_leaves_alone_stays() -> None:
    graph = chain(aten.tanh.default, aten.cos.default)
    run(graph, (Pass((aten.cos.default,).__contains__, lambda node, edit: None),))
    assert targets(graph) == [aten.tanh.default, aten.cos.default]


def test_nodes_that_were_only_needed_by_the_old_one_go_and_are_not_looked_at() -> None:
    looked: list[object] = []

    def skip(node: fx.Node, edit: Editor) -> fx.Node | None:
        looked.append(node.target)
        source = node.args[0]
        return source.args[0] if node.target is aten.cos.default else None

    graph = chain(aten.neg.default, aten.tanh.default, aten.cos.default)
    run(graph, (Pass((aten.cos.default, aten.tanh.default).__contains__, skip, exact=False),))
    assert targets(graph) == [aten.neg.default]
    assert looked == [aten.tanh.default, aten.cos.default]
