"""Recurrent layers as one operator: what the same layer gives that is written out, operator by operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import momentprop as mp

aten = torch.ops.aten
OPERATORS = [
    *(getattr(aten, name).input for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")),
    *(getattr(aten, f"{name}_cell").default for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")),
]
LAYERS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


def lstm_step(given: Tensor, weights: list[Any], states: list[Tensor]) -> list[Tensor]:
    i, f, g, o = (given + F.linear(states[0], weights[1], weights[3])).chunk(4, -1)
    c = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return [h if weights[4] is None else F.linear(h, weights[4]), c]


def gru_step(given: Tensor, weights: list[Any], states: list[Tensor]) -> list[Tensor]:
    by_state = F.linear(states[0], weights[1], weights[3])
    (r, z, n), (r_h, z_h, n_h) = given.chunk(3, -1), by_state.chunk(3, -1)
    r, z = (r + r_h).sigmoid(), (z + z_h).sigmoid()
    n = (n + r * n_h).tanh()
    return [z * states[0] + (1 - z) * n]


def rnn_step(given: Tensor, weights: list[Any], states: list[Tensor]) -> list[Tensor]:
    return [(given + F.linear(states[0], weights[1], weights[3])).tanh()]


def relu_step(given: Tensor, weights: list[Any], states: list[Tensor]) -> list[Tensor]:
    return [(given + F.linear(states[0], weights[1], weights[3])).relu()]


STEPS = {"lstm": lstm_step, "gru": gru_step, "rnn": rnn_step, "relu": relu_step}


class Network(nn.Module):
    """A recurrent layer between dropouts, as it is or written out; dropout of its first state or weights."""

    def __init__(self, kind: str, by_hand: bool, states: bool = False, weights: bool = False, **options: Any):
        super().__init__()
        torch.manual_seed(0)
        if kind == "relu":
            options["nonlinearity"] = "relu"
        self.layer = LAYERS.get(kind, nn.RNN)(3, 4, **options)
        self.drop, self.kind, self.by_hand = nn.Dropout(0.2), kind, by_hand
        self.states, self.weights = states, weights
        n = 1 + self.layer.bidirectional
        self.head = nn.Linear(n * (self.layer.proj_size or 4), 2)
        sizes = [self.layer.proj_size or 4, 4] if kind == "lstm" else [4]
        self.first = nn.ParameterList([torch.randn(n, 1, size) for size in sizes])
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.7)

    def _weights(self) -> list[Any]:
        found = list(self.layer.parameters())
        return [F.dropout(w, 0.2, self.training) if self.weights and w.dim() > 1 else w for w in found]

    def forward(self, x: Tensor) -> list[Tensor]:
        layer, x = self.layer, self.drop(x)
        first = [s.expand(-1, x.shape[0], -1) for s in self.first]
        first = [self.drop(s) for s in first] if self.states else first
        if self.by_hand:
            y, last = self._written_out(x, first)
        else:
            x = x if layer.batch_first else x.transpose(0, 1)
            hx: Any = first if self.kind == "lstm" else first[0]
            op = getattr(torch, layer.mode.lower())
            y, *last = op(
                x, hx, self._weights(), layer.bias, 1, 0.0, False, layer.bidirectional, layer.batch_first
            )
            y = y if layer.batch_first else y.transpose(0, 1)
        return [self.head(self.drop(y)).mean(1), *last]

    def _written_out(self, x: Tensor, first: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        layer, all_weights = self.layer, self._weights()
        n = len(all_weights) // (1 + layer.bidirectional)
        outputs, ends = [], []
        for d in range(1 + layer.bidirectional):
            mine: list[Any] = all_weights[d * n : (d + 1) * n]
            biases = mine[2:4] if layer.bias else [None, None]
            weights = [*mine[:2], *biases, mine[-1] if layer.proj_size else None]
            given = F.linear(x, weights[0], weights[2]).unbind(1)
            states, found = [s[d] for s in first], []
            for t in range(len(given)) if d == 0 else reversed(range(len(given))):
                states = STEPS[self.kind](given[t], weights, states)
                found.append(states[0])
            outputs.append(torch.stack(found if d == 0 else found[::-1], 1))
            ends.append(states)
        return torch.cat(outputs, -1), [torch.stack(parts) for parts in zip(*ends, strict=True)]


CASES: list[tuple[str, dict[str, Any]]] = [
    ("lstm", {"batch_first": True, "bidirectional": True}),
    ("lstm", {"states": True}),
    ("lstm", {"bidirectional": True, "proj_size": 2, "bias": False, "states": True}),
    ("gru", {"bidirectional": True}),
    ("gru", {"batch_first": True, "bias": False, "states": True}),
    ("rnn", {"batch_first": True, "bidirectional": True, "states": True}),
    ("relu", {"bidirectional": True}),
    ("lstm", {"weights": True, "bidirectional": True}),
    ("gru", {"weights": True, "batch_first": True}),
]


def outputs_of(kind: str, by_hand: bool, fidelity: str, options: dict[str, Any]) -> list[mp.Moments]:
    model = Network(kind, by_hand, **options).double().eval()
    x = torch.randn(3, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return mp.convert(model, x, fidelity=fidelity)(x)


@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
@pytest.mark.parametrize("fidelity", ["fast", "accurate"])
def test_as_written_out(kind: str, options: dict[str, Any], fidelity: str) -> None:
    if options.get("weights") and fidelity == "fast":
        pytest.skip("written out, one draw for a whole sequence is one operator, which knows more")
    found, expected = (outputs_of(kind, by_hand, fidelity, options) for by_hand in (False, True))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.mean, theirs.mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine.variance, theirs.variance, rtol=1e-3, atol=1e-7)
        if fidelity == "accurate":
            torch.testing.assert_close(mine.covariance, theirs.covariance, rtol=1e-3, atol=1e-4)


def test_random_weights_with_a_projection_are_refused() -> None:
    with pytest.raises(mp.MissingRuleError, match="proj_size"):
        outputs_of("lstm", False, "fast", {"weights": True, "proj_size": 2})


def plain_network(kind: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = LAYERS[kind](3, 5, 2, dropout=0.3, batch_first=True, **options)
            self.drop, self.head = nn.Dropout(0.3), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(self.drop(x))[0].mean(1))

    return Pooled().eval()


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("fidelity", ["paper", "fast", "accurate"])
def test_extreme_inputs(kind: str, fidelity: str) -> None:
    """Gates that saturate: finite, and never a negative variance."""
    model = plain_network(kind)
    for size in (1e4, 1e20):
        x = torch.randn(3, 4, 3) * size
        out = mp.convert(model, x, fidelity)(x)
        assert out.mean.isfinite().all()
        assert out.variance.isfinite().all()
        assert out.variance.min() > 0


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float16, 0.005), (torch.bfloat16, 0.03)])
def test_16_bits(kind: str, dtype: torch.dtype, error: float) -> None:
    x = torch.randn(3, 6, 3)
    expected = mp.convert(plain_network(kind), x, "accurate")(x)
    out = mp.convert(plain_network(kind).to(dtype), x.to(dtype), "accurate")(x.to(dtype))
    assert out.mean.dtype == dtype
    assert (out.std.float() / expected.std - 1).abs().max() < error


def test_long_sequences_are_few_steps() -> None:
    """The graph does not grow with the number of steps."""
    sizes = []
    for n_steps in (5, 100):
        network = mp.convert(plain_network("lstm"), torch.randn(2, n_steps, 3), "accurate")
        sizes.append(str(network.summary(random_only=False)).count("\n"))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("kind", LAYERS)
def test_a_last_state_alone(kind: str) -> None:
    """The output of the layer is not used, and of an LSTM the last cell alone is."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.drop = LAYERS[kind](3, 4, batch_first=True), nn.Dropout(0.3)

        def forward(self, x: Tensor) -> Tensor:
            last: Any = self.layer(self.drop(x))[1]
            return (last[1] if kind == "lstm" else last)[0]

    torch.manual_seed(0)
    model, x = Last().eval(), torch.randn(3, 5, 3)
    out, mc = mp.convert(model, x, "accurate")(x), mp.monte_carlo(model, x, n_samples=4000)
    assert 0.9 < (out.std / mc.std).median() < 1.1
    assert ((out.mean - mc.mean).abs() / mc.std).max() < 0.6  # gates of one unit share their inputs
