"""Noise that all samples of a batch share: the covariance of each sample's outputs all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import momentprop as mp
from momentprop.engine.per_sample import PerSample
from momentprop.network import inside


class Positions(nn.Module):
    """A dropped table of positions, as many transformers have it."""

    def __init__(self, *shape: int, head: str = "logits") -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(*shape))
        self.layer = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 8))
        self.out, self.head = nn.Linear(8, 3), head
        self.own = False  # whether every sample has a mask of its own

    def forward(self, x: Tensor) -> Any:
        positions = self.positions.expand_as(x) if self.own else self.positions
        y = self.layer(x + F.dropout(positions, 0.1, self.training))
        z = self.out(y.mean(1))
        return {
            "logits": lambda: z,
            "softmax": lambda: z.softmax(-1),
            "time first": lambda: self.out(y).transpose(0, 1),
            "several": lambda: (z, self.positions, {"length": x.shape[1], "all": self.out(y)}),
        }[self.head]()


@pytest.mark.parametrize("shape", [(1, 4, 8), (4, 8), (8,)], ids=str)
def test_agrees_with_sampling(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, x = Positions(*shape).eval(), torch.randn(3, 4, 8)
    bnn = mp.convert(model, x)
    assert bnn.fidelity == "accurate"
    assert isinstance(inside(bnn).built.program, PerSample)
    out = bnn(x)
    mc = mp.monte_carlo(model, x, n_samples=4000)
    assert ((out.std / mc.std) - 1).abs().max() < 0.15
    assert 0.93 < (out.std / mc.std).median() < 1.07
    if len(shape) == 3:
        model.own = True
        same = mp.convert(model, x)
        assert not isinstance(inside(same).built.program, PerSample)
        torch.testing.assert_close(same(x).covariance, out.covariance)


@pytest.mark.parametrize("head", ["logits", "softmax", "time first", "several"])
def test_a_batch_is_its_samples(head: str) -> None:
    """Whatever the batch is, and wherever in the output it is."""
    model, x = Positions(4, 8, head=head).double().eval(), torch.randn(3, 4, 8, dtype=torch.float64)
    bnn = mp.convert(model, x, fidelity="accurate")
    whole, expected = bnn(x), model(x)
    parts = [bnn(one[None]) for one in x]
    if head == "several":
        whole, parts = (whole[0], whole[2]["all"]), [(p[0], p[2]["all"]) for p in parts]
        assert bnn(x)[2]["length"] == 4
        torch.testing.assert_close(bnn(x)[1].mean, model.positions)
        expected = (expected[0], expected[2]["all"])
    else:
        whole, parts, expected = (whole,), [(p,) for p in parts], (expected,)
    for i, out in enumerate(whole):
        assert out.shape == expected[i].shape
        batch = 1 if head == "time first" else 0
        for name in ("mean", "variance"):
            joined = torch.cat([getattr(p[i], name) for p in parts], batch)
            torch.testing.assert_close(getattr(out, name), joined)
        torch.testing.assert_close(out.covariance, torch.cat([p[i].covariance for p in parts]))
        if out.logits is not None:
            torch.testing.assert_close(
                out.logits.moments.mean, torch.cat([p[i].logits.moments.mean for p in parts])
            )


def test_a_dropped_parameter_is_exact() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x + F.dropout(self.w, 0.2, self.training)

    model, x = Model(), torch.randn(4, 3, dtype=torch.float64)
    out = mp.convert(model, x, "accurate")(x)
    torch.testing.assert_close(out.mean, x + model.w)
    torch.testing.assert_close(out.covariance, torch.diag(model.w**2 / 4).expand(4, 3, 3))


def test_uncertain_inputs_selected_outputs_and_gradients() -> None:
    model = Positions(1, 4, 8).eval()
    bnn = mp.convert(model, torch.randn(2, 4, 8), outputs=2)
    out = bnn(mp.Moments(torch.randn(3, 4, 8), 0.1))
    assert out.covariance.shape == (3, 2, 2)
    assert out.indices.shape == (3, 2)
    assert (out.variance > bnn(torch.zeros(3, 4, 8)).variance * 0).all()
    out.variance.sum().backward()
    assert model.positions.grad.isfinite().all()


def test_samples_that_influence_each_other_are_still_refused() -> None:
    class Mixing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x - x.mean(0), 0.5, True) + F.dropout(torch.ones(3), 0.5, True)

    with pytest.raises(mp.CovarianceError):
        mp.convert(Mixing(), torch.randn(4, 3), fidelity="accurate")


def test_an_empty_batch_and_a_compiled_one() -> None:
    model, x = Positions(4, 8, head="several").eval(), torch.randn(3, 4, 8)
    bnn = mp.convert(model, x, fidelity="accurate")
    out = bnn(x[:0])
    assert out[0].mean.shape == (0, 3)
    assert out[0].covariance.shape == (0, 3, 3)
    torch.testing.assert_close(out[1].mean, model.positions)
    single = mp.convert(Positions(4, 8).eval(), x)
    compiled = torch.compile(single, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x).covariance, single(x).covariance)
        assert compiled(torch.cat([x, x])).mean.shape == (6, 3)


def test_a_recurrent_layer_before_all_noise(tmp_path: Path) -> None:
    """It stays PyTorch's own, which vmap does not know: samples run one by one."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.positions = nn.LSTM(4, 8, batch_first=True), Positions(5, 8)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.positions(self.rnn(x)[0])
            return y

    torch.manual_seed(0)
    model, x = Reader().eval(), torch.randn(3, 5, 4)
    bnn = mp.convert(model, x, "accurate")
    out, mc = bnn(x), mp.monte_carlo(model, x, 4000)
    torch.testing.assert_close(out.std, mc.std, rtol=0.1, atol=0)
    torch.testing.assert_close(bnn(x[1:2]).covariance, out.covariance[1:2])
    assert bnn(x[:0]).covariance.shape == (0, 3, 3)
    with pytest.raises(mp.ExportError, match="one by one"):
        mp.save(bnn, tmp_path / "never.pt2")
