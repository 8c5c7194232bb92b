"""Softmax over segments is recognised in the ways that graph attention writes it."""

import pytest
import torch

import momentprop as mp
from momentprop.capture.trace import trace
from momentprop.passes.canonical import CANONICAL
from momentprop.rules.segments import SEGMENT_SOFTMAX
from networks import Apply
from passed import passed

SEGMENT = torch.tensor([0, 0, 0, 1, 2, 2, 0, 2])


def stabilised(x):
    """torch_geometric.utils.softmax along the first dimension, after a transpose."""
    x = x.T
    index = SEGMENT.view(-1, 1).expand_as(x)
    greatest = x.new_zeros(3, x.shape[1]).scatter_reduce(0, index, x.detach(), "amax", include_self=False)
    weight = (x - greatest.index_select(0, SEGMENT)).exp()
    total = weight.new_zeros(3, x.shape[1]).scatter_add(0, index, weight) + 1e-16
    return (weight / total.index_select(0, SEGMENT)).T


def bare(x):
    """As chemprop aggregates, along the last dimension."""
    weight = x.exp()
    total = torch.zeros(x.shape[0], 3).scatter_reduce(1, SEGMENT.expand_as(x), weight, "sum")
    return weight / total[:, SEGMENT]


def by_rows(x):
    """The index is taken out of a table of edges each time."""
    edges, weight = torch.stack([SEGMENT, SEGMENT]), x.exp()
    total = torch.zeros(x.shape[0], 3).index_add(1, edges[1], weight)
    return weight / total.index_select(1, edges[1])


def added(x):
    weight = x.exp()
    total = torch.zeros(x.shape[0], 3).index_add(1, SEGMENT, weight)
    return weight / total.gather(1, SEGMENT.expand(x.shape))


@pytest.mark.parametrize("fidelity", ["fast", "accurate"])
@pytest.mark.parametrize("function", [stabilised, bare, by_rows, added])
def test_softmax_over_segments(function, fidelity):
    torch.manual_seed(0)
    model, x = Apply(function, "f"), mp.Moments(torch.randn(3, 8) * 2, 0.3)
    recognised = passed(trace(model, x), CANONICAL)
    assert any(node.target is SEGMENT_SOFTMAX for node in recognised.graph.nodes)
    gone = (torch.ops.aten.exp.default, torch.ops.aten.sub.Tensor, torch.ops.aten.scatter_reduce.two)
    assert not any(
        node.target in gone for node in recognised.graph.nodes
    )  # the maximum is not needed any more
    out, mc = mp.convert(model, x, fidelity)(x), mp.monte_carlo(model, x, 20_000)
    assert ((out.mean - mc.mean).abs() <= 0.05 * mc.std + 5 * mc.mean_error).all()
    assert ((out.std - mc.std).abs() <= 0.2 * mc.std + 1e-3).all()
    none = mp.Moments(x.mean, 0.0)
    torch.testing.assert_close(mp.convert(model, none, fidelity)(none).mean, function(x.mean))


def test_the_sum_of_a_segment_is_certain():
    def whole(x):
        weights = stabilised(x)
        return torch.zeros(x.shape[0], 3).index_add(1, SEGMENT, weights)

    x = mp.Moments(torch.randn(3, 8), 0.5)
    torch.testing.assert_close(
        mp.convert(Apply(whole, "f"), x, "accurate")(x).std, torch.zeros(3, 3), atol=0.01, rtol=0
    )


def test_another_index_is_no_softmax():
    def other(x):
        weight = x.exp()
        return weight / torch.zeros(x.shape[0], 3).index_add(1, SEGMENT, weight)[:, SEGMENT.flip(0)]

    recognised = passed(trace(Apply(other, "f"), torch.zeros(2, 8)), CANONICAL)
    assert not any(node.target is SEGMENT_SOFTMAX for node in recognised.graph.nodes)
