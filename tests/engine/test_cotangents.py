"""What the backward sweep refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import momentprop as mp


@pytest.fixture(scope="module")
def weighted() -> Iterator[Any]:
    """An operator of one's own with two inputs: 2 x + 3 y."""

    @torch.library.custom_op("tests::weighted", mutates_args=())
    def weighted(x: Tensor, y: Tensor) -> Tensor:
        return 2 * x + 3 * y

    weighted.register_fake(lambda x, y: torch.empty_like(x))
    return torch.ops.tests.weighted.default


class Model(nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.first, self.second, self.op = nn.Dropout(0.5), nn.Dropout(0.5), op

    def forward(self, x: Tensor) -> Tensor:
        return self.op(self.first(x), self.second(x))


def register(op: Any, pull: Any) -> None:
    @mp.rule(op, override=True)
    def rule(x: mp.Moments, y: mp.Moments) -> mp.Propagated:
        moments = mp.Moments(2 * x.mean + 3 * y.mean, 4 * x.variance + 9 * y.variance)
        return mp.Propagated(moments, lambda: mp.mapped(pull))


def test_one_cotangent_for_each_random_input(weighted: Any) -> None:
    register(weighted, lambda cotangent: [2 * cotangent, 3 * cotangent])
    x = torch.ones(1, 2)
    out = mp.convert(Model(weighted).eval(), x, "accurate")(x)
    torch.testing.assert_close(out.covariance[0], 13 * torch.eye(2))


@pytest.mark.parametrize(("count", "pulled"), [("1", [2.0]), ("3", [2.0, 3.0, 4.0]), ("0", [])])
def test_another_number_of_cotangents_is_refused_with_the_place(
    weighted: Any, count: str, pulled: list[float]
) -> None:
    """A missing one used to count as zero: the standard deviation was 0.71 of the right one."""
    register(weighted, lambda cotangent: [cotangent * factor for factor in pulled])
    x = torch.ones(1, 2)
    with pytest.raises(mp.RuleError, match=rf"returns {count} cotangents for 2 random inputs") as error:
        mp.convert(Model(weighted).eval(), x, "accurate")(x)
    assert "weighted" in str(error.value)
    assert "test_cotangents.py" in str(error.value)
