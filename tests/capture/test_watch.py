"""What is changed in a model after its conversion is refused, not ignored."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import momentprop as mp


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop_rate, self.count = 0.2, 0

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, self.drop_rate, self.training)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Sequential(nn.Linear(8, 3)), Own())


X = torch.linspace(-1, 1, 8).view(2, 4)


def replace_part(model: Any) -> None:
    model[3][0] = nn.Linear(8, 3)


def replace_parameter(model: Any) -> None:
    model[0].weight = nn.Parameter(torch.ones(8, 4))


def load_by_assignment(model: Any) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def remove_part(model: Any) -> None:
    del model[1]


def append_part(model: Any) -> None:
    model.append(nn.Tanh())


def set_rate(model: Any) -> None:
    model[2].p = 0.5


def set_own_rate(model: Any) -> None:
    model[4].drop_rate = 0.5


CHANGES: list[tuple[Callable[[Any], None], str]] = [
    (set_rate, r"2\.p is 0\.5, and was 0\.3;"),
    (set_own_rate, r"4\.drop_rate is 0\.5, and was 0\.2;"),
    (replace_part, r"3\.0 is another module;"),
    (append_part, r"Sequential has 6 parts, and had 5;"),
    (remove_part, r"1 is another module;"),
    (replace_parameter, r"0\.weight is another parameter;"),
    (load_by_assignment, r"0\.weight is another parameter;"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=lambda v: getattr(v, "__name__", ""))
class TestChanges:
    def test_are_refused_wherever_the_network_is_used(
        self, change: Callable[[Any], None], message: str
    ) -> None:
        model = network()
        converted = mp.convert(model, X)
        converted(X)
        change(model)
        for use in (
            lambda: converted(X),
            lambda: mp.monte_carlo(converted, X),
            lambda: mp.Ensemble([converted, converted])(X),
            lambda: converted.freeze(),
        ):
            with pytest.raises(mp.ChangedError, match=message + ".* convert it again"):
                use()
        mp.convert(model, X)(X)

    def test_are_no_concern_of_a_copy(self, change: Callable[[Any], None], message: str) -> None:
        model = network()
        converted = mp.convert(model, X)
        expected = converted(X).std
        copies = [copy.deepcopy(converted), mp.convert(model, X).double().float()]
        change(model)
        for own in copies:
            torch.testing.assert_close(own(X).std, expected)


def test_what_changes_nothing_is_let_pass() -> None:
    model = network()
    converted = mp.convert(model, X)
    with torch.no_grad():
        model[0].weight.mul_(2)
    model.load_state_dict(network().state_dict())
    model.train()
    model[4].count = 3
    torch.testing.assert_close(converted(X).std, mp.convert(model, X)(X).std)
    converted.float()  # nothing moves
    model[2].p = 0.5
    with pytest.raises(mp.ChangedError):
        converted(X)


def test_the_model_is_not_kept_alive() -> None:
    model = network()
    gone = weakref.ref(model)
    converted = mp.convert(model, X)
    before = converted(X).std
    del model
    gc.collect()
    assert gone() is None
    assert torch.equal(converted(X).std, before)
