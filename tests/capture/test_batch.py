"""Where the samples are: named by the caller, observed in the model, and said in messages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import momentprop as mp
from momentprop.capture.batch import Batch


class Tagger(nn.Module):
    """[time, batch, features] -> [time, batch, tags], or [batch, tags]."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.drop, self.rnn, self.out, self.last = nn.Dropout(0.3), nn.GRU(4, 5), nn.Linear(5, 2), last

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.rnn(self.drop(x))
        return self.out(h[-1] if self.last else h)


class Folded(nn.Module):
    """[batch * 3, features] -> [batch, classes]."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.drop, self.out = nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(18, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.drop(self.features(x).relu()).view(-1, 18))


class Graph(nn.Module):
    """Nodes and edges -> a value for every node."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop, self.out = nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 2)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        h = self.drop(self.inner(nodes).relu())
        return self.out(h + torch.zeros_like(h).index_add(0, edges[1], h[edges[0]]))


def graph(nodes: int, edges: int) -> tuple[Tensor, Tensor]:
    return torch.randn(nodes, 4), torch.randint(nodes, (2, edges))


@pytest.mark.parametrize("last", [True, False])
def test_time_first(last: bool) -> None:
    torch.manual_seed(0)
    model, x = Tagger(last).eval(), torch.randn(3, 5, 4)
    bnn = mp.convert(model, x[:, :2], batch_dim=1)
    assert bnn.fidelity == "accurate"
    assert "dimension 1 of the inputs" in str(bnn.summary())
    assert "float32[3, batch, 4]" in repr(bnn)
    out, mc = bnn(x), mp.monte_carlo(bnn, x, 2000)
    torch.testing.assert_close(out.std, mc.std, rtol=0.12, atol=0)
    assert out.covariance.shape == ((5, 2, 2) if last else (5, 6, 6))
    alone = bnn(x[:, 3:4])
    torch.testing.assert_close(alone.covariance[0], out.covariance[3])
    assert mp.monte_carlo(model, x, 10, batch_dim=1).shape == out.shape
    with pytest.raises(mp.InputError, match=r"\[3, batch, 4\]"):
        bnn(torch.randn(4, 5, 4))


def test_files_keep_the_dimension(tmp_path: Path) -> None:
    x = torch.randn(3, 5, 4)
    bnn = mp.convert(Tagger(True), x, batch_dim=1)
    mp.save(bnn, tmp_path / "net.pt2")
    torch.testing.assert_close(mp.load(tmp_path / "net.pt2")(x[:, :4]).covariance, bnn(x[:, :4]).covariance)
    torch.testing.assert_close(bnn.freeze()(x).covariance, bnn(x).covariance)


def test_one_dimension_for_each_input() -> None:
    class Masked(Tagger):
        def forward(self, x: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
            return super().forward(x * mask.T[..., None] * scale)

    model, x = Masked(True), torch.randn(3, 5, 4)
    inputs = x, torch.ones(5, 3), torch.ones(4)
    for named in ((1, 0, None), [1, 0, None]):
        bnn = mp.convert(model, inputs, "accurate", batch_dim=named)
        assert bnn(x[:, :2], torch.ones(2, 3), torch.ones(4)).shape == (2, 2)
    bnn = mp.convert(model, (inputs[:2], {"scale": inputs[2]}), batch_dim=((1, 0), {"scale": None}))
    assert bnn(x[:, :2], torch.ones(2, 3), scale=torch.ones(4)).shape == (2, 2)
    for wrong in ((1, 0), "first", (1, 0, 0.5)):
        with pytest.raises(mp.InputError, match="batch_dim must be"):
            mp.convert(model, inputs, batch_dim=wrong)


def test_a_layer_that_takes_the_batch_for_time_is_named() -> None:
    model = nn.Sequential(nn.RNN(4, 4), First(), nn.Dropout(0.5))
    x = torch.randn(3, 5, 4)
    with pytest.warns(mp.TraceNote, match=r"takes the batch for time(.|\n)*batch_dim=1(.|\n)* in 0"):
        mp.convert(model, x, "fast")
    with pytest.warns(mp.TraceNote), pytest.raises(mp.CovarianceError, match="fixes the size of the batch"):
        mp.convert(model, x, "accurate")
    mp.convert(model, x, "accurate", batch_dim=1)


class Attends(nn.Module):
    def __init__(self, dropout: float, need_weights: bool, batch_first: bool) -> None:
        super().__init__()
        self.drop, self.need_weights = nn.Dropout(0.2), need_weights
        self.layer = nn.MultiheadAttention(8, 2, dropout, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(x)
        return self.layer(x, x, x, need_weights=self.need_weights)[0]


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_attention_that_takes_the_batch_for_time_is_named(dropout: float, need_weights: bool) -> None:
    """Tier accurate refuses it, where samples mix; fast has no covariance to notice it by."""
    x = torch.randn(6, 5, 8)
    with pytest.warns(mp.TraceNote, match=r"takes the batch for time(.|\n)*batch_dim=1(.|\n)* in layer"):
        mp.convert(Attends(dropout, need_weights, False), x, "fast")
    mp.convert(Attends(dropout, need_weights, False), x, "fast", batch_dim=1)  # warnings are errors
    mp.convert(Attends(dropout, need_weights, True), x, "fast")
    mp.convert(Attends(dropout, need_weights, False), x, "fast", batch_dim=None)


class First(nn.Module):
    def forward(self, found: tuple[Tensor, Tensor]) -> Tensor:
        return found[0]


def test_messages_about_mixed_samples_name_the_assumption() -> None:
    class Mixes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x, 0.5, self.training).cumsum(0)

    x = torch.randn(3, 5, 4)
    with pytest.raises(mp.CovarianceError, match=r"dimension 0 of the inputs\. Say batch_dim= for another"):
        mp.convert(Mixes(), x, "accurate")
    assert mp.convert(Mixes(), x, batch_dim=1)(x).covariance.shape == (5, 12, 12)


def test_rows_that_the_model_puts_together() -> None:
    torch.manual_seed(0)
    model, x = Folded().eval(), torch.randn(12, 4)
    bnn = mp.convert(model, x[:6])
    assert "3 rows a sample" in str(bnn.summary())
    out, mc = bnn(x), mp.monte_carlo(model, x, 4000)
    assert out.covariance.shape == (4, 2, 2)
    torch.testing.assert_close(out.std, mc.std, rtol=0.08, atol=0)
    torch.testing.assert_close(bnn(x[3:6]).covariance[0], out.covariance[1])
    with pytest.raises(mp.InputError, match=r"\[3\*batch, 4\]"):
        bnn(x[:4])
    with pytest.raises(mp.ExportError, match="3 rows of the batch"):
        mp.save(bnn, "never.pt2")
    unfolded = mp.convert(Folded(), torch.randn(3, 4))
    assert unfolded(x).shape == (4, 2)


def test_rows_that_are_steps_of_a_recurrent_layer() -> None:
    class Night(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.rnn, self.out = nn.Dropout(0.3), nn.GRU(4, 5, batch_first=True), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.rnn(self.drop(x).view(-1, 3, 4))[0].reshape(-1, 5))

    torch.manual_seed(0)
    x = torch.randn(12, 4)
    bnn = mp.convert(Night(), x[:6])
    out, mc = bnn(x), mp.monte_carlo(bnn, x, 2000)
    assert (out.shape, out.covariance.shape) == ((12, 2), (4, 6, 6))
    assert abs((out.std / mc.std).median() - 1) < 0.1


def test_the_inputs_together_are_one_sample() -> None:
    torch.manual_seed(0)
    model = Graph().eval()
    with pytest.raises(mp.CovarianceError, match="batch_dim=None"):
        mp.convert(model, graph(5, 6), "accurate")
    bnn = mp.convert(model, graph(5, 6), batch_dim=None)
    assert "one sample" in str(bnn.summary())
    nodes, edges = graph(6, 9)
    out, mc = bnn(nodes, edges), mp.monte_carlo(model, (nodes, edges), 4000, batch_dim=None)
    assert out.covariance.shape == (1, 12, 12)
    torch.testing.assert_close(out.std, mc.std, rtol=0.08, atol=0)
    sampled = torch.cov(mc.samples.flatten(1).T)
    assert (out.covariance[0] - sampled).abs().max() < 0.1 * sampled.max()
    few = mp.convert(model, graph(5, 6), outputs=[0, 3], batch_dim=None)(nodes, edges)
    torch.testing.assert_close(few.covariance[0], out.covariance[0][[0, 3]][:, [0, 3]])
    with pytest.warns(mp.FidelityNote, match="100 outputs"):
        mp.convert(model, graph(50, 6), batch_dim=None)
    with pytest.raises(mp.InputError, match=r"\[any, 4\]"):
        bnn(torch.randn(6, 5), edges)


def test_a_graph_some_of_whose_edges_are_left_out() -> None:
    """How many there are depends on the values of the edges."""

    class WithoutLoops(Graph):
        def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
            return super().forward(nodes, edges[:, edges[0] != edges[1]])

    torch.manual_seed(0)
    model, (nodes, edges) = WithoutLoops().eval(), graph(5, 9)
    edges[1, 0] = edges[0, 0]
    out = mp.convert(model, (nodes, edges), "accurate", batch_dim=None)(nodes, edges)
    mc = mp.monte_carlo(model, (nodes, edges), 4000, batch_dim=None)
    torch.testing.assert_close(out.std, mc.std, rtol=0.08, atol=0)


def test_what_is_said_of_the_batch() -> None:
    assert str(Batch((None,))) == "the model fixes the size of the batch"
    assert str(Batch((1, 0))) == "the batch is dimension 0 or 1 of the inputs"
