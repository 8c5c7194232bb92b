"""bnn.summary(): every operator with the rule in use."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import momentprop as mp
from momentprop.rules.registry import RULES
from momentprop.summary import Row
from small import cnn, mlp

aten = torch.ops.aten


def rows_of(model: nn.Module, x: Tensor, fidelity: str, random_only: bool = True) -> dict[str, Row]:
    rows = mp.convert(model, x, fidelity).summary(random_only)
    return {row.operator: row for row in rows}


@pytest.mark.parametrize("fidelity", ["paper", "fast", "accurate"])
def test_rows_name_rule_exactness_shape_and_place(fidelity: str) -> None:
    summary = mp.convert(mlp(), torch.zeros(2, 4), fidelity).summary()
    dropout, linear = summary
    assert (dropout.operator, dropout.module, dropout.shape) == ("aten.dropout.default", "2", "[batch, 8]")
    assert (linear.operator, linear.module, linear.shape) == ("aten.linear.default", "3", "[batch, 3]")
    assert linear.exactness == RULES.find(aten.linear.default).exactness
    assert linear.rule.startswith("families.")
    assert dropout.random
    assert linear.random
    assert summary.fidelity == fidelity
    assert len(summary) == 2
    assert summary.head == f"{fidelity}: 2 of 4 operators random, 0 approximate, no fallbacks"


def test_operators_that_no_noise_reaches() -> None:
    rows = rows_of(mlp(), torch.zeros(2, 4), "paper", random_only=False)
    assert [row.random for row in rows.values()] == [
        True,
        False,
        True,
    ]  # the first linear shows under the last
    relu = rows["aten.relu.default"]
    assert (relu.rule, relu.exactness, relu.random) == ("plain", "exact", False)


def test_prints_as_a_table() -> None:
    summary = mp.convert(mlp(), torch.zeros(2, 4)).summary()
    head, samples, titles, line, *rows = str(summary).splitlines()
    assert head == summary.head
    assert samples == "the batch is dimension 0 of the inputs"
    assert titles.split() == ["node", "operator", "module", "rule", "exactness", "shape", "random"]
    assert set(line) == {"-", " "}
    assert len(rows) == len(summary)
    start = titles.index("exactness")
    assert all(row[start - 2 : start] == "  " for row in rows)  # columns are aligned
    assert repr(summary) == str(summary)


def test_sizes_that_hold_the_batch() -> None:
    class Merged(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x, 0.5, self.training).reshape(-1, 2)

    rows = rows_of(Merged(), torch.zeros(2, 4), "paper")
    assert rows["aten.reshape.default"].shape == "[2*batch, 2]"


def test_one_operator_that_stands_for_several() -> None:
    """Dropout, a small dense layer and an activation in a row are one in tier `accurate`."""
    model = nn.Sequential(nn.Dropout(0.01), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
    rows = rows_of(model, torch.zeros(2, 4), "accurate")
    assert rows["aten.relu.default"].rule == "engine.jump.Jump"
    assert rows["aten.relu.default"].is_approximate
    assert rows["aten.dropout.default"].rule == "part of relu"
    assert not rows["aten.dropout.default"].is_approximate
    assert rows_of(model, torch.zeros(2, 4), "fast")["aten.dropout.default"].exactness == "exact"


def test_says_what_was_decomposed() -> None:
    class Stack(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.hstack([x, x])

    summary = mp.convert(nn.Sequential(nn.Dropout(0.5), Stack()), torch.zeros(2, 4), "fast").summary()
    made = [row for row in summary if "decomposed from aten.hstack.default" in row.rule]
    assert [row.operator for row in made] == ["aten.cat.default"]
    assert made[0].module == "1"
    assert not any("decomposed" in row.rule for row in summary if row.module != "1")


def test_says_where_fallbacks_were_used() -> None:
    @torch.library.custom_op("momentprop_test::strange", mutates_args=())
    def strange(x: Tensor) -> Tensor:
        return x.sin()

    strange.register_fake(torch.empty_like)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return strange(self.net(x))

    bnn = mp.convert(Model(), torch.zeros(2, 4), "fast", unsupported="sample")
    (row,) = bnn.summary().fallbacks
    assert row.fallback == row.rule == "sample"
    assert row.is_approximate
    assert "sample for momentprop_test.strange.default in the model itself" in bnn.summary().head


def test_is_of_the_example_inputs_whatever_is_called() -> None:
    x = torch.randn(2, 3, 8, 8)
    noisy = mp.Moments(x, 0.1)
    certain, uncertain = (mp.convert(cnn().eval(), v) for v in (x, noisy))
    before, other = str(certain.summary()), uncertain.summary()
    assert len(other) > len(certain.summary())
    assert "aten.conv2d.padding" in {row.operator for row in other}
    certain(noisy)
    uncertain(x)
    assert str(certain.summary()) == str(certain.double().summary()) == before
    assert str(uncertain.summary()) == str(other)


def test_a_part_deeper_down_may_be_called_summary() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.summary = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.summary(x)

    bnn = mp.convert(nn.Sequential(nn.Dropout(0.5), Head()), torch.zeros(2, 2))
    assert "1.summary.weight" in bnn.state_dict()

    class Top(Head):
        def forward(self, x: Tensor) -> Tensor:
            return self.summary(nn.functional.dropout(x, 0.5, self.training))

    with pytest.raises(mp.MomentpropError, match="called 'summary'"):
        mp.convert(Top(), torch.zeros(2, 2))
