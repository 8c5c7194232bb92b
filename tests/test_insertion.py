"""mp.with_dropout: a copy with dropout before chosen layers."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import momentprop as mp
from small import assert_untouched, snapshot


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 4, 3, padding=1))
        self.body = nn.Linear(4 * 16, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(self.stem(x).flatten(1))))


def dropouts(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if isinstance(m, nn.modules.dropout._DropoutNd)]


X = torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("where", "chosen"),
    [
        (nn.Linear, ["body", "head"]),
        ((nn.Conv2d, nn.Linear), ["stem.0", "stem.2", "body", "head"]),
        ("head", ["head"]),
        (r"stem\.\d|body", ["stem.0", "stem.1", "stem.2", "body"]),
        (lambda name, module: isinstance(module, nn.Conv2d) and name != "stem.0", ["stem.2"]),
    ],
    ids=["class", "classes", "name", "pattern", "function"],
)
def test_dropout_stands_before_the_chosen_layers(where: Any, chosen: list[str]) -> None:
    model = Net()
    dropped = mp.with_dropout(model, 0.3, where)
    assert dropouts(dropped) == [f"{name}.input_dropout" for name in chosen]
    rows = mp.convert(dropped, X).summary()
    assert [r.module for r in rows if r.operator == "aten.dropout.default"] == dropouts(dropped)


def test_converts_as_if_dropout_had_been_written_there() -> None:
    model = Net()
    dropped = mp.with_dropout(model, 0.3)

    class Written(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = nn.functional.dropout(self.stem(x).flatten(1), 0.3, self.training)
            return self.head(nn.functional.dropout(torch.relu(self.body(x)), 0.3, self.training))

    written = Written()
    written.load_state_dict(dropped.state_dict())
    ours, theirs = mp.convert(dropped, X)(X), mp.convert(written, X)(X)
    torch.testing.assert_close(ours.mean, theirs.mean)
    torch.testing.assert_close(ours.covariance, theirs.covariance)
    samples = [mp.monte_carlo(m, X, n_samples=10).samples for m in (dropped, written)]
    torch.testing.assert_close(*samples)


def test_the_model_is_left_alone_and_state_dicts_fit_both_ways() -> None:
    model = Net().eval()
    before = snapshot(model)
    dropped = mp.with_dropout(model, 0.5)
    assert_untouched(model, before)
    assert list(dropped.state_dict()) == list(model.state_dict())
    other = Net()
    dropped.load_state_dict(other.state_dict())
    torch.testing.assert_close(dropped(X), other.eval()(X))
    model.load_state_dict(dropped.state_dict())
    assert not any(a is b for a, b in zip(model.parameters(), dropped.parameters(), strict=True))


def test_follows_train_and_eval() -> None:
    model = Net().eval()
    dropped = mp.with_dropout(model, 0.5)
    assert not any(m.training for m in dropped.modules())
    assert torch.equal(dropped(X), model(X))
    dropped.train()
    assert not torch.equal(dropped(X), dropped(X))
    assert torch.equal(dropped.eval()(X), model(X))
    assert all(m.training for m in mp.with_dropout(Net().train(), 0.5).modules())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles(duplicate: Any) -> None:
    dropped = mp.with_dropout(Net(), 0.2)
    again = duplicate(dropped)
    assert dropouts(again) == dropouts(dropped)
    torch.testing.assert_close(mp.convert(again, X)(X).covariance, mp.convert(dropped, X)(X).covariance)


def test_another_kind_of_dropout() -> None:
    dropped = mp.with_dropout(Net(), 0.2, lambda name, _: name == "stem.2", dropout=nn.Dropout2d)
    rows = list(mp.convert(dropped, X).summary())
    assert rows[0].operator == "aten.feature_dropout.default"


def test_a_layer_called_by_keyword_and_a_model_that_is_a_layer() -> None:
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(input=x)

    x = torch.randn(3, 4)
    for model in (Keyword(), nn.Linear(4, 2)):
        assert (mp.convert(mp.with_dropout(model, 0.5), x)(x).variance > 0).all()


def test_attention_is_dropped_as_a_whole() -> None:
    """One input given three times is dropped once; its output projection is never called as a layer."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    dropped = mp.with_dropout(attention, 0.5, nn.MultiheadAttention).train()
    seen = []
    dropped.register_forward_pre_hook(lambda _, args: seen.append(args))
    x = torch.randn(2, 3, 8)
    dropped(x, x, x)
    ((query, key, value),) = seen
    assert query is key is value
    assert (query == 0).any()
    with pytest.raises(ValueError, match=r"only out_proj.*choose nn\.MultiheadAttention"):
        mp.with_dropout(attention, 0.5)
    encoder = mp.with_dropout(nn.TransformerEncoderLayer(8, 2, 16, 0.0), 0.5)
    assert [n for n in dropouts(encoder) if "input" in n] == [
        "linear1.input_dropout",
        "linear2.input_dropout",
    ]


@pytest.mark.parametrize("where", [nn.LSTM, "no_such_layer", nn.Sequential, lambda *_: False])
def test_nothing_to_choose(where: Any) -> None:
    with pytest.raises(ValueError, match=re.escape("Layers of the model: stem.0 (Conv2d)")):
        mp.with_dropout(Net(), 0.5, where)


def test_bad_arguments() -> None:
    for p in (-0.1, 1.0, 2.0):
        with pytest.raises(mp.DropProbabilityError, match="p must be in 0 <= p < 1"):
            mp.with_dropout(Net(), p)
    with pytest.raises(TypeError, match="where must name classes of modules"):
        mp.with_dropout(Net(), 0.1, (int,))
    with pytest.raises(TypeError, match="where must be a class"):
        mp.with_dropout(Net(), 0.1, 3)
    with pytest.raises(TypeError, match=r"must be an nn\.Module"):
        mp.with_dropout(torch.relu, 0.1)
    with pytest.raises(ValueError, match="body has a part called 'input_dropout' already"):
        mp.with_dropout(mp.with_dropout(Net(), 0.1), 0.1)
