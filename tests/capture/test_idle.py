"""A graph with its noise idle: dropout passes, other noise is its mean, values are freed in time."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from momentprop.capture.idle import outputs_of, run
from momentprop.capture.trace import trace
from networks import Apply


def idle(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    made = trace(Apply(function, "f"), x)
    (out,) = outputs_of(made.graph, made.root, [x])
    return out


@pytest.mark.parametrize(
    ("function", "mean"),
    [
        (lambda x: F.dropout(x, 0.5, True), lambda x: x),
        (lambda x: F.dropout2d(x[:, :, None, None], 0.5, True), lambda x: x[:, :, None, None]),
        (lambda x: F.alpha_dropout(x, 0.5, True), lambda x: x),
        (lambda x: F.feature_alpha_dropout(x[..., None], 0.5, True), lambda x: x[..., None]),
        (lambda x: x * torch.empty_like(x).bernoulli_(0.3), lambda x: x * 0.3),
        (lambda x: torch.bernoulli(x.sigmoid()), torch.sigmoid),
        (lambda x: x + torch.randn_like(x), lambda x: x),
        (lambda x: x + torch.randn(x.shape), lambda x: x),
        (lambda x: x + torch.rand_like(x), lambda x: x + 0.5),
        (lambda x: x + torch.rand(x.shape), lambda x: x + 0.5),
        (lambda x: x + torch.empty_like(x).uniform_(1, 5), lambda x: x + 3),
        (lambda x: x + torch.empty_like(x).normal_(2, 5), lambda x: x + 2),
        (lambda x: torch.normal(x, 2.0), lambda x: x),
        (lambda x: torch.normal(x, x.exp()), lambda x: x),
        (lambda x: x + torch.normal(1.0, 2.0, x.shape), lambda x: x + 1),
        (lambda x: F.rrelu(x, 0.25, 0.75, True), lambda x: F.leaky_relu(x, 0.5)),
    ],
    ids=range(16),
)
def test_each_kind_of_noise(function: Callable[[Tensor], Tensor], mean: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(3, 4)
    torch.testing.assert_close(idle(function, x), mean(x))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_within_recurrent_layers(kind: type[nn.RNNBase]) -> None:
    layer = kind(3, 5, num_layers=2, dropout=0.5, batch_first=True)
    x = torch.randn(2, 4, 3)
    made = trace(layer, x)
    outputs = outputs_of(made.graph, made.root, [*(layer.get_parameter(n) for n in made.state), x])
    torch.testing.assert_close(outputs[0], layer.eval()(x)[0])


def test_unless_centred_numbers_are_others_but_the_same_every_time() -> None:
    x = torch.randn(3, 4)
    made = trace(Apply(lambda x: x * (1 + torch.randn_like(x)) * torch.rand_like(x), "f"), x)
    state = torch.get_rng_state()
    *_, (_, values) = run(made.graph, made.root, [[x], [x]], centred=False)
    (first,), (second,) = values
    assert torch.equal(first, second)
    assert len((first / x).unique()) == x.numel()
    assert torch.equal(torch.get_rng_state(), state)


def test_values_are_freed_after_their_last_use() -> None:
    x = torch.randn(2, 3)
    made = trace(nn.Sequential(*[nn.Dropout(0.5), nn.Tanh()] * 10), x)
    alive: list[weakref.ref[Tensor]] = []
    most = 0
    for node, values in run(made.graph, made.root, [[x]]):
        if node.op == "call_function":
            alive.append(weakref.ref(values[0]))
        del values
        most = max(most, len({id(r()) for r in alive if r() is not None}))
    assert most <= 3


def test_a_view_needs_no_particular_strides() -> None:
    """Dropouts that copy nothing leave other strides than those of the trace."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    turned = graph.call_function(torch.ops.aten.transpose.int, (x, 0, 1))
    dropped = graph.call_function(torch.ops.aten.dropout.default, (turned, 0.5, True))
    graph.output([graph.call_function(torch.ops.aten.view.default, (dropped, [6]))])
    value = torch.arange(6.0).reshape(2, 3)
    (out,) = outputs_of(graph, nn.Module(), [value])
    assert torch.equal(out, value.T.reshape(6))
