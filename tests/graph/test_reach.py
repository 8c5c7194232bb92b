"""What noise or an input reaches: a walk over the graph with two predicates."""

import torch
from torch import fx

from momentprop.graph.reach import creates_noise, reach, values_of

aten = torch.ops.aten


def example() -> tuple[fx.Graph, dict[str, fx.Node]]:
    """x -> dropout -> size; x + y; y -> exp."""
    graph = fx.Graph()
    nodes = {"x": graph.placeholder("x"), "y": graph.placeholder("y")}
    nodes["drop"] = graph.call_function(aten.dropout.default, (nodes["x"], 0.5, True))
    nodes["size"] = graph.call_function(aten.sym_size.int, (nodes["drop"], 0))
    nodes["sum"] = graph.call_function(aten.add.Tensor, (nodes["x"], nodes["y"]))
    nodes["exp"] = graph.call_function(aten.exp.default, (nodes["sum"],))
    graph.output([nodes["size"], nodes["exp"]])
    return graph, nodes


def names(found: set[fx.Node], nodes: dict[str, fx.Node]) -> set[str]:
    return {name for name, node in nodes.items() if node in found}


def test_from_given_nodes():
    graph, nodes = example()
    assert names(reach(graph, [nodes["y"]]), nodes) == {"y", "sum", "exp"}


def test_from_where_something_begins():
    graph, nodes = example()
    assert names(reach(graph, begins=creates_noise), nodes) == {"drop", "size"}


def test_not_past_what_carries_nothing_on():
    graph, nodes = example()
    found = reach(graph, begins=creates_noise, carries=lambda n: n.target is not aten.sym_size.int)
    assert names(found, nodes) == {"drop"}


def test_noise_that_is_switched_off():
    graph = fx.Graph()
    x = graph.placeholder("x")
    for arguments, creates in (((x, 0.5, True), True), ((x, 0.0, True), False), ((x, 0.5, False), False)):
        assert creates_noise(graph.call_function(aten.dropout.default, arguments)) is creates
    assert not creates_noise(graph.call_function(aten.exp.default, (x,)))


def test_what_lends_its_shape_alone_is_not_followed():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    index = graph.call_function(aten.expand_as.default, (x, y))
    values = graph.call_function(aten.expand_as.default, (y, x))
    assert {index, values} <= reach(graph, [y])
    assert reach(graph, [y], brings=values_of) == {y, values}
