"""Bad input gets a clear error: what, where in the user's model, what next."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import momentprop as mp
from momentprop.rules.registry import RULES
from small import cnn, mlp


def test_all_missing_rules_at_once_with_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = [getattr(torch.ops.aten, name).default for name in ("cummax", "multi_margin_loss", "logcumsumexp")]
    rules = {key: rule for key, rule in RULES._rules.items() if key[0] not in ops}
    monkeypatch.setattr(RULES, "_rules", rules)  # they have none, whatever rules there will be

    class Inner(nn.Module):
        def forward(self, x):
            return torch.cummax(x, 1).values

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.linear, self.dropout = Inner(), nn.Linear(4, 4), nn.Dropout(0.5)

        def forward(self, x):
            x = self.dropout(torch.logcumsumexp(x, 1))  # it stands before the dropout: no rule needed
            x = self.inner(self.linear(x))
            return x.sum() + F.multi_margin_loss(x, torch.zeros(len(x), dtype=torch.long))

    with pytest.raises(mp.MissingRuleError) as error:
        mp.convert(Outer(), torch.rand(2, 4))
    inner, outer = error.value.places
    assert [p.operator for p in (inner, outer)] == ["aten.cummax.default", "aten.multi_margin_loss.default"]
    assert [p.module for p in (inner, outer)] == ["inner", ""]
    assert "return torch.cummax(x, 1).values" in inner.source
    assert "F.multi_margin_loss(x, " in outer.source  # the user's line, not torch's
    assert "@mp.rule(torch.ops.aten.cummax.default)" in str(error.value)
    assert "logcumsumexp" not in str(error.value)


def test_uncertain_input_needs_rules_before_the_first_dropout_too() -> None:
    class Early(nn.Module):
        def forward(self, x):
            return F.dropout(torch.logcumsumexp(x, 1), 0.5, self.training)

    x = torch.rand(2, 4)
    bnn = mp.convert(Early(), x)
    assert bnn(x).shape == (2, 4)
    with pytest.raises(mp.MissingRuleError, match="logcumsumexp"):
        bnn(mp.Moments(x, 0.1))
    with pytest.raises(mp.MissingRuleError, match="logcumsumexp"):
        mp.convert(Early(), mp.Moments(x, 0.1))


def test_random_numbers_without_a_rule_are_reported() -> None:
    class Counts(nn.Module):
        def forward(self, x):
            return F.dropout(x, 0.5, self.training) + torch.poisson(x)

    with pytest.raises(mp.MissingRuleError, match="draws random numbers"):
        mp.convert(Counts(), torch.rand(2, 4))


@pytest.mark.parametrize("p", [0.0, None])
def test_no_dropout(p: float | None) -> None:
    model = nn.Sequential(nn.Linear(4, 2)) if p is None else mlp(p)
    idle = "it holds no nn.Dropout" if p is None else "with p = 0"
    with pytest.raises(mp.NoDropoutError, match=f"no active dropout: .*{idle}.*with_dropout"):
        mp.convert(model, torch.zeros(2, 4))


def test_no_dropout_but_an_uncertain_input() -> None:
    model = nn.Linear(4, 2)
    x = mp.Moments(torch.zeros(2, 4), 1.0)
    torch.testing.assert_close(mp.convert(model, x)(x).variance, (model.weight**2).sum(1).expand(2, 2))


def test_dropping_everything() -> None:
    with pytest.raises(mp.DropProbabilityError, match=r"p = 1\.0"):
        mp.convert(mlp(1.0), torch.zeros(2, 4))


def test_wrong_inputs() -> None:
    bnn = mp.convert(mlp(), torch.zeros(2, 4))
    with pytest.raises(mp.InputError, match=r"shape \[batch, 4\], not \[2, 5\]"):
        bnn(torch.zeros(2, 5))
    with pytest.raises(mp.InputError, match="not list"):
        bnn([[0.0] * 4])
    with pytest.raises(mp.InputError, match="expected 1 positional"):
        bnn(torch.zeros(2, 4), torch.zeros(2, 4))
    with pytest.raises(mp.InputError, match="negative variance"):
        bnn(mp.Moments(torch.zeros(2, 4), -1.0))
    with pytest.raises(mp.InputError, match="no tensor"):
        mp.convert(mlp(), (1, 2))
    with pytest.raises(mp.InputError, match="a tensor, a tuple"):
        mp.convert(mlp(), "x")
    with pytest.raises(ValueError, match="fidelity must be one of"):
        mp.convert(mlp(), torch.zeros(2, 4), fidelity="papper")
    with pytest.raises(TypeError, match=r"must be an nn\.Module"):
        mp.convert(torch.relu, torch.zeros(2, 4))
    with pytest.raises(mp.TraceError, match="could not be traced"):
        mp.convert(mlp(), torch.zeros(2, 9))


def test_nan_stays_nan_and_stays_in_its_row() -> None:
    bnn = mp.convert(cnn().eval(), torch.zeros(2, 3, 8, 8))
    x = torch.randn(3, 3, 8, 8)
    x[1, 0, 0, 0] = torch.nan
    out = bnn(x)
    assert out.mean[1].isnan().any()
    assert out.mean[[0, 2]].isfinite().all()
    assert out.variance[[0, 2]].isfinite().all()


def test_dropout_inside_a_subgraph_is_not_overlooked() -> None:
    class Autocast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = self.linear(F.dropout(x, 0.5, self.training))
            return x.float()

    with pytest.raises(mp.MissingRuleError, match=r"not followed into torch\.autocast(.|\n)*enabled=False"):
        mp.convert(Autocast(), torch.randn(2, 3))


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.drop = nn.GRU(4, 5, batch_first=True), nn.Dropout(0.5)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(self.drop(x), lengths, True, enforce_sorted=False)
        return self.rnn(packed)[1][0]


def test_packed_sequences_get_advice_that_fits() -> None:
    x, lengths = torch.randn(2, 3, 4), torch.tensor([3, 2])
    with pytest.raises(mp.TraceError) as error:
        mp.convert(Packs(), (x, lengths))
    assert "padded sequences" in str(error.value)
    assert "self.rnn(packed)" in str(error.value)  # the user's line
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True)
    with pytest.raises(mp.InputError, match="hold a PackedSequence"):
        mp.convert(nn.GRU(4, 5), (packed,))


def test_names_the_converted_network_needs_itself() -> None:
    model = nn.Sequential(nn.Dropout(0.5))
    model.fidelity = nn.Linear(2, 2)
    with pytest.raises(mp.MomentpropError, match="called 'fidelity'"):
        mp.convert(model, torch.randn(2, 2))


def test_mean_and_variance_of_different_types() -> None:
    bnn = mp.convert(mlp(), torch.zeros(2, 4))
    with pytest.raises(mp.InputError, match=r"variance of torch\.float64"):
        bnn(mp.Moments(torch.zeros(2, 4), torch.ones(2, 4).double()))
