"""Preparing a trace: canonical, rewritten, covered; everything in one place, and the trace itself stays."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import momentprop as mp
from momentprop import tiers
from momentprop.capture.trace import trace
from momentprop.graph.place import DECOMPOSED
from momentprop.passes.prepare import prepare
from momentprop.rules.registry import Rule
from networks import Apply
from passed import operators

aten = torch.ops.aten


def prepared(model: nn.Module, x: torch.Tensor, tier: tiers.Tier = tiers.FAST, uncertain: bool = False):
    return prepare(trace(model, x), tier.rules, tier.passes, [uncertain])


def test_the_trace_given_stays_and_noise_is_followed() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.ReLU(), nn.Linear(4, 2))
    made = trace(model, torch.randn(5, 3))
    before = str(made.graph)
    done = prepare(made, tiers.FAST.rules, tiers.FAST.passes, [False])
    assert str(made.graph) == before
    assert [node.target for node in done.trace.graph.nodes if node in done.random] == [
        aten.dropout.default,
        aten.linear.default,
    ]
    assert aten.batch_norm.default not in operators(done.trace)
    assert aten.batch_norm.default in operators(
        prepare(made, tiers.PAPER.rules, tiers.PAPER.passes, [False]).trace
    )


def test_what_is_uncertain_decides_what_is_random() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 2)), torch.randn(5, 3)
    certain, uncertain = prepared(model, x), prepared(model, x, uncertain=True)
    assert len(uncertain.random) == len(certain.random) + 2  # the input and the first layer
    assert not prepared(nn.Linear(3, 2), x).random


@pytest.mark.parametrize("fidelity", ["paper", "fast", "accurate"])
def test_patterns_see_what_operators_are_decomposed_into(fidelity: str) -> None:
    """(x - sigmoid(x))^2 is one function of x, where the loss is the operator that says so."""
    torch.manual_seed(0)
    model = Apply(lambda x: F.mse_loss(x, x.sigmoid(), reduction="none"), "f")
    x = mp.Moments(torch.randn(2, 6, dtype=torch.float64), 0.5)
    out, mc = mp.convert(model, x, fidelity)(x), mp.monte_carlo(model, x, n_samples=20_000)
    assert ((out.mean - mc.mean).abs() < 5 * mc.mean_error + 0.005 * mc.std).all()
    assert ((out.variance - mc.variance).abs() < 5 * mc.variance_error + 0.02 * mc.variance).all()
    graph = prepared(model, x.mean, uncertain=True).trace.graph
    (composed,) = [node for node in graph.nodes if isinstance(node.target, Rule)]
    assert composed.meta[DECOMPOSED] == "aten.mse_loss.default"


def test_all_that_is_missing_is_named_at_once() -> None:
    model = Apply(lambda x: torch.cummax(torch.logcumsumexp(F.dropout(x, 0.5, True), 1), 1).values, "f")
    with pytest.raises(mp.MissingRuleError) as error:
        prepared(model, torch.randn(2, 4))
    assert [place.operator for place in error.value.places] == [
        "aten.logcumsumexp.default",
        "aten.cummax.default",
    ]


@pytest.mark.parametrize("fidelity", ["paper", "fast", "accurate"])
def test_an_index_in_the_shape_of_random_values_is_no_random_index(fidelity: str) -> None:
    def added(x: torch.Tensor) -> torch.Tensor:
        h = F.dropout(x, 0.5, True)
        index = torch.tensor([0, 2, 0]).expand_as(h)
        return torch.zeros_like(x).scatter_add(1, index, h)

    out = mp.convert(Apply(added, "f"), torch.ones(2, 3), fidelity)(torch.ones(4, 3))
    torch.testing.assert_close(out.mean, torch.tensor([2.0, 0.0, 1.0]).expand(4, 3))
    torch.testing.assert_close(out.variance, torch.tensor([2.0, 0.0, 1.0]).expand(4, 3))
