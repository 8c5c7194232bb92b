"""New nodes know their value and their place; erasing takes along what nothing else needs."""

import torch
from torch import nn

from momentprop.capture.trace import trace
from momentprop.graph.edit import Editor
from momentprop.graph.place import place_of

aten = torch.ops.aten


def edited():
    made = trace(nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2), nn.Tanh()), torch.zeros(4, 3))
    graph = made.copy_graph()
    nodes = {node.target: node for node in graph.nodes}
    return graph, nodes, Editor(graph)


def test_new_nodes_have_value_and_place():
    graph, nodes, edit = edited()
    tanh = nodes[aten.tanh.default]
    with edit.at(tanh):
        wide = edit.op(aten.cat.default, [tanh.args[0]] * 2, 1)
        there = edit.op(aten.neg.default, tanh.args[0], place=nodes[aten.linear.default], value="known")
    assert wide.meta["val"].shape[1] == 4
    assert place_of(wide).module == "2"
    assert place_of(there).module == "1"
    assert there.meta["val"] == "known"
    order = list(graph.nodes)
    assert order.index(wide) < order.index(there) < order.index(tanh)


def test_what_depends_on_noise_is_followed():
    _, nodes, edit = edited()
    weight = nodes[aten.linear.default].args[1]
    with edit.at(nodes[aten.tanh.default]):
        assert edit.op(aten.neg.default, nodes[aten.linear.default]) in edit.varying
        constant = edit.op(aten.neg.default, weight)
        assert constant not in edit.varying
        assert edit.op(aten.dropout.default, constant, 0.5, True) in edit.varying


def test_replacing_erases_what_only_the_old_one_needed():
    graph, nodes, edit = edited()
    x = nodes[aten.dropout.default].args[0]
    edit.replace(nodes[aten.tanh.default], nodes[aten.dropout.default])
    assert {node.op for node in graph.nodes} == {"placeholder", "call_function", "output"}
    assert [n.target for n in graph.nodes if n.op == "call_function"] == [aten.dropout.default]
    assert edit.erased == {nodes[aten.tanh.default], nodes[aten.linear.default]}
    assert x in graph.nodes
    graph.lint()


def test_several_results_are_replaced_each():
    made = trace(nn.Sequential(nn.Dropout(0.5), Halves()), torch.zeros(2, 4))
    graph = made.copy_graph()
    (split,) = [n for n in graph.nodes if len(n.users) == 2 and n.op == "call_function"]
    edit = Editor(graph)
    with edit.at(split):
        parts = [edit.op(aten.slice.Tensor, split.args[0], 1, i, i + 2) for i in (0, 2)]
    edit.replace(split, parts)
    graph.lint()
    assert all(part.users for part in parts)


class Halves(nn.Module):
    def forward(self, x):
        a, b = torch.split(x, [2, 2], 1)
        return a.sin() * b
