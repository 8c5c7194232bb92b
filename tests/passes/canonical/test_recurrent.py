"""Recurrent layers taken apart: the same function, and its moments against sampling."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import momentprop as mp
from momentprop.capture.trace import trace
from momentprop.passes.canonical.recurrent import split_recurrent
from small import assert_untouched, snapshot

aten = torch.ops.aten
LAYERS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
CELLS = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "rnn": nn.RNNCell}


class Whole(nn.Module):
    """Everything a layer returns, of dropped or plain inputs, with or without first states."""

    def __init__(self, kind: str, p: float = 0.0, first: bool = False, **options: Any) -> None:
        super().__init__()
        options = {"num_layers": 2, "batch_first": True, **options}
        nonlinearity = options.pop("nonlinearity", None)
        if nonlinearity is not None:
            options["nonlinearity"] = nonlinearity
        self.layer = LAYERS[kind](3, 4, **options)
        self.drop = nn.Dropout(p)
        n = self.layer.num_layers * (1 + self.layer.bidirectional)
        sizes = [self.layer.proj_size or 4, 4] if kind == "lstm" else [4]
        self.first = [torch.linspace(-1, 1, n * s).reshape(n, 1, s) for s in sizes] if first else []
        self.batch_first = self.layer.batch_first

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.drop(x)
        states = [s.expand(-1, x.shape[0], -1) for s in self.first]
        hx: Any = None if not states else tuple(states) if len(states) == 2 else states[0]
        y, last = self.layer(x if self.batch_first else x.transpose(0, 1), hx)
        return [y, *(last if isinstance(last, tuple) else [last])]


CASES = [
    ("lstm", {}),
    ("lstm", {"bidirectional": True}),
    ("lstm", {"bias": False, "first": True}),
    ("lstm", {"proj_size": 2, "bidirectional": True, "first": True}),
    ("lstm", {"proj_size": 2, "bias": False, "batch_first": False}),
    ("gru", {}),
    ("gru", {"bidirectional": True, "first": True, "batch_first": False}),
    ("gru", {"bias": False, "num_layers": 3}),
    ("rnn", {"bidirectional": True}),
    ("rnn", {"nonlinearity": "relu", "first": True}),
    ("rnn", {"bias": False, "num_layers": 1}),
]


@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
@pytest.mark.parametrize("fidelity", ["fast", "accurate"])
def test_without_noise_it_is_the_layer(kind: str, options: dict[str, Any], fidelity: str) -> None:
    """An uncertain input of variance 0 takes every layer apart."""
    model = Whole(kind, **options).double().eval()
    model.first = [s.double() for s in model.first]
    x = mp.Moments(torch.randn(2, 3, 3, dtype=torch.float64), 0.0)
    outputs = mp.convert(model, x, fidelity=fidelity)(x)
    for out, expected in zip(outputs, model(x.mean), strict=True):
        torch.testing.assert_close(out.mean, expected, rtol=1e-6, atol=1e-6)
        assert out.variance.max() < 1e-20


@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_taken_apart_it_runs_as_the_layer(kind: str, options: dict[str, Any]) -> None:
    """The same function, layer by layer, with the same masks: none, and all of them."""
    model = Whole(kind, dropout=0.4 if options.get("num_layers") != 1 else 0.0, **options).eval()
    x = torch.randn(2, 3, 3)
    traced = trace(model, x)
    for uncertain in (False, True):
        expanded = split_recurrent(traced, [uncertain])
        values: dict[Any, Any] = {}
        state = [dict(model.named_parameters()).get(n, traced.constants.get(n)) for n in traced.state]
        placeholders = [n for n in expanded.graph.nodes if n.op == "placeholder"]
        values.update(zip(placeholders, [*state, x], strict=True))
        for node in expanded.graph.nodes:
            if node.op == "call_function":
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
                idle = node.target is aten.dropout.default
                values[node] = args[0] if idle else node.target(*args, **kwargs)
                found, known = (pytree.tree_leaves(v) for v in (values[node], node.meta["val"]))
                pairs = [p for p in zip(found, known, strict=True) if isinstance(p[0], Tensor)]
                assert all(value.shape[1:] == fake.shape[1:] for value, fake in pairs)
                assert "stack_trace" in node.meta
        outputs = next(reversed(expanded.graph.nodes)).args[0]
        for node, expected in zip(outputs, model(x), strict=True):
            torch.testing.assert_close(values[node], expected)


def test_one_operator_for_each_layer() -> None:
    model = Whole("lstm", dropout=0.3, num_layers=3, bidirectional=True).eval()
    targets = [n.target for n in split_recurrent(trace(model, torch.randn(2, 5, 3)), [False]).graph.nodes]
    assert targets.count(aten.lstm.input) == 3
    assert targets.count(aten.dropout.default) == 2
    plain = Whole("lstm", num_layers=3)
    traced = trace(plain, torch.randn(2, 5, 3))
    assert split_recurrent(traced, [False]) is traced  # where no noise is, all layers stay one


def test_the_first_layer_is_as_it_was() -> None:
    """No noise reaches it: it is no step with moments."""
    summary = str(mp.convert(Tagger("gru", last=True), torch.randn(2, 5, 3)).summary())
    assert summary.count("aten.gru.input") == 1


def test_one_layer_has_no_dropout_between() -> None:
    with pytest.warns(UserWarning, match="dropout option"):
        layer = nn.GRU(3, 4, dropout=0.5, batch_first=True)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[0]

    with pytest.raises(mp.NoDropoutError):
        mp.convert(Model(), torch.randn(2, 5, 3))


class Tagger(nn.Module):
    """A recurrent network with dropout between its layers, and a head."""

    def __init__(self, kind: str, last: bool, **options: Any) -> None:
        super().__init__()
        self.layer = LAYERS[kind](3, 8, num_layers=2, batch_first=True, dropout=0.3, **options)
        self.head = nn.Linear(8 * (1 + self.layer.bidirectional), 2)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)[0]
        return self.head(y[:, -1] if self.last else y)


@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_agrees_with_sampling(kind: str, bidirectional: bool) -> None:
    torch.manual_seed(0)
    model = Tagger(kind, last=False, bidirectional=bidirectional).eval()
    x = torch.randn(4, 6, 3)
    bnn = mp.convert(model, x, fidelity="accurate")
    before = snapshot(model)
    out = bnn(x)
    assert_untouched(model, before)
    mc = mp.monte_carlo(model, x, n_samples=4000)
    ratio = out.std / mc.std
    assert 0.95 < ratio.median() < 1.05
    assert ratio.min() > 0.85
    assert ratio.max() < 1.15
    assert ((out.mean - mc.mean).abs() / mc.std).max() < 0.15


@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn"])
def test_cells_in_a_loop(kind: str) -> None:
    torch.manual_seed(0)

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.drop, self.head = CELLS[kind](12, 6), nn.Dropout(0.2), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            state = None
            for t in range(4):
                state = self.cell(self.drop(x[:, t]), state)
            return self.head(state[0] if kind == "lstm" else state)

    model, x = Loop().eval(), torch.randn(3, 4, 12)
    exact = mp.convert(model, mp.Moments(x, 0.0), fidelity="fast")
    out = mp.convert(model, x, fidelity="accurate")(x)
    mc = mp.monte_carlo(model, x, n_samples=4000)
    assert 0.93 < (out.std / mc.std).median() < 1.07
    assert ((out.mean - mc.mean).abs() / mc.std).max() < 0.6  # gates of one unit share their dropped inputs
    assert exact(x).variance.min() > 0


def test_sampling_draws_the_masks_between_layers() -> None:
    """Against a plain loop over the layer itself, many samples at once."""
    torch.manual_seed(0)
    model, x = Tagger("lstm", last=True).eval(), torch.randn(2, 5, 3)
    mc = mp.monte_carlo(model, x, n_samples=2000, samples_at_once=500)
    model.train()
    with torch.no_grad():
        plain = torch.stack([model(x) for _ in range(2000)])
    error = (plain.var(0) / 2000 + mc.mean_error**2).sqrt()
    assert ((mc.mean - plain.mean(0)).abs() <= 5 * error).all()
    assert ((mc.variance - plain.var(0)).abs() <= 7 * mc.variance_error).all()
    alone = mp.monte_carlo(model, x, n_samples=10, samples_at_once=1)
    torch.testing.assert_close(alone.samples, mc.samples[:10], rtol=1e-4, atol=1e-5)


class TimeFirst(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.drop, self.layer = nn.Dropout(0.3), kind(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.drop(x))[0]


def test_a_layer_whose_steps_are_the_batch_is_refused() -> None:
    with (
        pytest.warns(mp.TraceNote, match="batch_dim=1"),
        pytest.raises(mp.MissingRuleError, match="number of steps"),
    ):
        mp.convert(TimeFirst(nn.LSTM), torch.randn(5, 2, 3), "fast")


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU])
def test_a_layer_whose_steps_the_tracer_fixes_is_named(kind: type[nn.Module]) -> None:
    x = torch.randn(5, 2, 3)
    with pytest.warns(mp.TraceNote, match="batch_dim=1"):
        bnn = mp.convert(TimeFirst(kind), x, "fast")
    with pytest.raises(mp.InputError, match=r"shape \[5, 2, 3\]"):
        bnn(x[:4])


def test_gradients_reach_all_weights() -> None:
    model, x = Tagger("gru", last=True), torch.randn(2, 4, 3)
    out = mp.convert(model, x)(x)
    (out.mean.sum() + out.variance.sum()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


def test_any_batch_size_and_an_uncertain_input() -> None:
    model = Tagger("lstm", last=True).eval()
    bnn = mp.convert(model, torch.zeros(1, 4, 3))
    for batch, certain in itertools.product((1, 3), (True, False)):
        x = torch.randn(batch, 4, 3)
        out = bnn(x if certain else mp.Moments(x, 0.01))
        assert out.mean.shape == (batch, 2)
        assert out.variance.min() > 0
