"""What a program refuses, with its place, and what its plan knows before it runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import momentprop as mp
from exact import Model, assert_exact, values
from momentprop.network import inside
from small import mlp

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda x: x - x.mean(0), "aten.mean.dim"),
        (lambda x: x.softmax(0), "aten.softmax.int"),
        (lambda x: x.flip(0), "aten.flip.default"),
        (lambda x: x + x.flip(0), "aten.flip.default"),
        (lambda x: x + x[:1], "aten.slice.Tensor"),
        (lambda x: x.roll(1, 0), "aten.roll.default"),
    ],
    ids=["mean", "softmax", "flip", "flip and add", "first", "roll"],
)
def test_mixing_samples_is_reported_with_its_place(
    function: Callable[[Tensor], Tensor], operator: str
) -> None:
    class Mixes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)  # here

    model = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Linear(4, 4), Mixes()))
    with pytest.raises(mp.CovarianceError, match="samples of the batch share noise") as error:
        mp.convert(model, torch.randn(5, 4), "accurate")
    assert f"{operator}  in 1.1" in str(error.value)
    assert "test_program.py" in str(error.value)


def test_a_fixed_batch() -> None:
    model = Model(lambda m, x: m.drop(x).view(4, 6))
    with pytest.raises(mp.CovarianceError, match="batch size is fixed"):
        mp.convert(model, values(4, 2, 3), "accurate")


def test_batches_that_are_moved_before_an_embedding() -> None:
    """Time first, as recurrent networks have it: no samples mix."""
    model = Model(lambda m, t: m.a(m.drop(m.e(t.t()))).sum(0), e=nn.Embedding(9, 2), a=nn.Linear(2, 2))
    assert_exact(model, torch.tensor([[1, 2], [3, 4], [5, 6]]))


@pytest.mark.parametrize("tier", ["paper", "fast", "accurate"])
def test_what_is_random_is_known_beforehand(tier: str) -> None:
    """A program tells an observer exactly those values, and forgets each when it is used last."""
    x = torch.randn(3, 4)
    made = inside(mp.convert(mlp().eval(), x, tier))
    plan, seen = made.built.program.plan, {}
    made.built.program.run([*made.state, x], seen.__setitem__)
    assert set(seen) == {step.name for step in plan.steps if step.random} == {"dropout", "linear_1"}
    assert {name for step in plan.steps if step.swept for name in [step.name]} == (
        set(seen) if tier == "accurate" else set()
    )
    forgotten = [name for step in plan.steps for name in step.last_use_of]
    assert len(forgotten) == len(set(forgotten))
    assert "linear_1" not in forgotten
    assert {"linear", "relu", "dropout"} <= set(forgotten)
