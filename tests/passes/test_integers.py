"""Integer and boolean outputs are refused where noise reaches them, and else passed through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import momentprop as mp

X = torch.linspace(-1, 1, 8).view(2, 4)


class Returns(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.dense, self.drop, self.last = nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 3)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.last(self.drop(self.dense(x))))


REACHED = [
    lambda x, y: y.argmax(-1),
    lambda x, y: (y, y.max(-1).indices),
    lambda x, y: {"logits": y, "positive": y > 0},
    lambda x, y: (y, (y.argmax(-1) == 1).long() + 1),
]


@pytest.mark.parametrize("function", REACHED, ids=range(len(REACHED)))
@pytest.mark.parametrize("fidelity", ["auto", "fast", "paper"])
def test_refused_where_noise_reaches_them(function: Any, fidelity: str) -> None:
    with pytest.raises(
        mp.MomentpropError, match=r"(int64|bool).*depends on .*(.|\n)*test_integers.*(.|\n)*logits"
    ):
        mp.convert(Returns(function), X, fidelity=fidelity)


def test_passed_through_where_nothing_reaches_them(tmp_path: Any) -> None:
    model = Returns(lambda x, y: (y, x.argmax(-1), torch.ones_like(y, dtype=torch.bool), x))
    expected = model.eval()(X)
    network = mp.convert(model, X)
    mp.save(network, tmp_path / "network.pt2")
    for use in (
        network,
        network.freeze(),
        mp.Ensemble([network, mp.convert(model, X)]),
        mp.load(tmp_path / "network.pt2"),
    ):
        found = use(X)
        out, label, mask, same = found[0] if isinstance(found, list) else found
        assert isinstance(out, mp.Moments)
        assert isinstance(same, mp.Moments)
        assert torch.equal(label, expected[1])
        assert torch.equal(mask, expected[2])
    assert torch.equal(mp.monte_carlo(model, X)[1], expected[1])


def test_samples_of_labels_are_no_less_random() -> None:
    mc = mp.monte_carlo(Returns(lambda x, y: (10 * y).argmax(-1)), 3 * X, n_samples=200)
    assert mc.std.is_floating_point()
    assert mc.samples.unique().numel() > 1
