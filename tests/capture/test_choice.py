"""Which dropouts count: those that `dropout=` chooses, or else those that the modules' modes tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import momentprop as mp


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.drop = nn.Linear(4, 6), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.dense(x))


class Own(nn.Module):
    """Drops by hand."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.4, self.training)


class Network(nn.Module):
    def __init__(self, head: nn.Module | None = None) -> None:
        super().__init__()
        self.encoder, self.head, self.last = Encoder(), head or nn.Dropout(0.4), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.head(self.encoder(x)))


X = torch.linspace(-1, 1, 12).view(3, 4)


def std_without(model: Network, *off: str) -> Tensor:
    """What counts, with the other dropouts taken out."""
    for name in off:
        setattr(
            model.encoder if name == "encoder" else model,
            "drop" if name == "encoder" else name,
            nn.Identity(),
        )
    return mp.convert(model.eval(), X)(X).std


def pair(head: type[nn.Module] | None = None) -> tuple[Network, Network]:
    """A model, and the same again."""
    made = [Network(head() if head else None) for _ in range(2)]
    made[1].load_state_dict(made[0].state_dict())
    return made[0], made[1]


@pytest.mark.parametrize(
    ("choice", "off"),
    [
        (r"encoder\..*", "head"),
        ("head", "encoder"),
        (Own, "encoder"),
        (nn.Dropout, "head"),
        ((nn.Dropout1d, Own), "encoder"),
        (lambda name, module: getattr(module, "p", 1) < 0.35, "head"),
    ],
    ids=["names", "one name", "class", "torch's class", "classes", "predicate"],
)
def test_dropout_chooses(choice: Any, off: str) -> None:
    model, other = pair(Own)
    expected = std_without(other, off)
    for mode in (True, False):
        model.train(mode)
        torch.testing.assert_close(mp.convert(model, X, dropout=choice)(X).std, expected)
    mc = mp.monte_carlo(model, X, n_samples=2000, dropout=choice)
    assert ((mc.variance - expected**2).abs() <= 5 * mc.variance_error + 1e-9).all()


def test_a_choice_of_nothing_names_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"dropout='nothing' chooses no .*encoder\.drop \(Dropout\), head"):
        mp.convert(Network(), X, dropout="nothing")
    with pytest.raises(TypeError, match="dropout must be a class"):
        mp.convert(Network(), X, dropout=3)


def test_a_converted_network_has_made_its_choice() -> None:
    with pytest.raises(ValueError, match="chosen when it was converted"):
        mp.monte_carlo(mp.convert(Network(), X), X, dropout="head")


@pytest.mark.parametrize("head", [None, Own], ids=["nn.Dropout", "by hand"])
class TestModes:
    def test_all_in_eval_or_all_in_training_count(self, head: type[nn.Module] | None) -> None:
        model, other = pair(head)
        expected = std_without(other)
        for mode in (True, False):
            torch.testing.assert_close(mp.convert(model.train(mode), X)(X).std, expected)

    def test_a_part_in_eval_is_left_out_with_a_note(self, head: type[nn.Module] | None) -> None:
        model, other = pair(head)
        expected = std_without(other, "encoder")
        model.train().encoder.eval()
        with pytest.warns(mp.TraceNote, match=r"encoder\.drop is left out.*`dropout=`"):
            network = mp.convert(model, X)
        torch.testing.assert_close(network(X).std, expected)
        with pytest.warns(mp.TraceNote, match=r"encoder\.drop"):
            mc = mp.monte_carlo(model, X, n_samples=2000)
        assert ((mc.variance - expected**2).abs() <= 5 * mc.variance_error + 1e-9).all()

    def test_dropout_modules_put_in_training_one_by_one(self, head: type[nn.Module] | None) -> None:
        """As sampling loops do: model.eval(), and then every nn.Dropout.train()."""
        model, other = pair(head)
        model.eval().encoder.drop.train()
        expected = std_without(other, "head")
        with pytest.warns(mp.TraceNote, match=r"of head is left out"):
            torch.testing.assert_close(mp.convert(model, X)(X).std, expected)

    def test_a_choice_outweighs_modes(self, head: type[nn.Module] | None) -> None:
        model, other = pair(head)
        model.train().encoder.eval()
        expected = std_without(other)
        torch.testing.assert_close(mp.convert(model, X, dropout=nn.Module)(X).std, expected)

    def test_a_network_around_one_in_eval(self, head: type[nn.Module] | None) -> None:
        """What holds it is in training mode, as every new module is, and drops nothing itself."""
        model, other = pair(head)
        expected = std_without(other)
        torch.testing.assert_close(mp.convert(nn.Sequential(model.eval()), X)(X).std, expected)

        class Around(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = model

            def forward(self, x: Tensor) -> Tensor:
                return self.inner(x)

        torch.testing.assert_close(mp.convert(Around(), X)(X).std, expected)


def test_validate_sees_modes_and_choices() -> None:
    model = Network()
    model.train().encoder.eval()
    options: Any = {"n_samples": 200, "targets": False, "tiers": ["accurate"], "layers": False}
    with pytest.warns(mp.TraceNote, match=r"encoder\.drop"):
        report = mp.validate(model, [X], **options)
    assert [m.training for m in (model, model.encoder)] == [True, False]
    chosen = mp.validate(model, [X], **options, dropout="head")
    every = mp.validate(model, [X], **options, dropout=nn.Module)
    assert report.scatter == chosen.scatter != every.scatter


@pytest.mark.parametrize("off", ["self_attn", "rest"])
def test_attention_without_its_dropout_is_computed_alike(off: str) -> None:
    """In eval mode torch takes a fused path, which knows no dropout of the parts."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True)
    x = torch.randn(2, 3, 4)
    choice = nn.Dropout if off == "self_attn" else nn.MultiheadAttention
    network = mp.convert(layer, x, dropout=choice)
    torch.testing.assert_close(network(x).mean, layer.eval()(x), rtol=0.2, atol=0.2)
    out = network(x)
    if off == "self_attn":
        layer.self_attn.dropout = 0.0
    else:
        layer.dropout.p = layer.dropout1.p = layer.dropout2.p = 0.0
    torch.testing.assert_close(out.std, mp.convert(layer, x)(x).std)
