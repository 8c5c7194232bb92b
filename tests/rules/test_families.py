import importlib
from pathlib import Path

import pytest
import torch

from momentprop import rules
from momentprop.moments import Moments
from momentprop.rules import families
from momentprop.rules.registry import EXACT_IF_GAUSSIAN, RULES, Registry, Role, Variant
from rule_settings import Setting

aten = torch.ops.aten
HERE = Path(__file__).parent


@pytest.fixture
def registry(monkeypatch):
    """An empty registry to declare rules in."""
    empty = Registry()
    monkeypatch.setattr("momentprop.rules.registry.RULES", empty)
    return empty


def settings_of_all_files() -> set[tuple]:
    """Operators and variants of rules that stand in a setting of one of the test files beside this one.

    A file whose rules no setting fits lists their operators as OPERATORS, and tests them in its own way.
    """
    tested: set[tuple] = set()
    for path in HERE.glob("test_*.py"):
        found = vars(importlib.import_module(path.stem))
        tested.update((op, variant) for op in found.get("OPERATORS", ()) for variant in (None, *Variant))
        for value in found.values():
            for setting in value if isinstance(value, list) else [value]:
                if isinstance(setting, Setting):
                    tested.add((setting.op, setting.rule.variant))
    return tested


def test_every_rule_is_tested():
    shipped = {(r.op, r.variant) for r in RULES if r.function.__module__.startswith("momentprop.rules.")}
    missing = sorted(map(str, shipped - settings_of_all_files()))
    assert not missing, "add a setting for each to its file in tests/rules"


def test_every_rule_file_has_a_test_file():
    assert {f"test_{name}" for name in rules.__all__} <= {p.stem for p in HERE.glob("test_*.py")}


def test_only_random():
    refuses = families.only_random("input", "other")
    assert refuses({}, frozenset()) is None
    assert refuses({}, frozenset({"input", "other"})) is None
    assert refuses({}, frozenset({"input", "weight", "bias"})) == (
        "its argument bias, weight is random, which has no rule"
    )


def test_rearrangement_of_constants_and_random_values(registry):
    families.rearrangement(aten.cat.default)
    found = registry.find(aten.cat.default)
    out = found([Moments(torch.ones(1), 2.0), torch.full((1,), 3.0)])
    assert out.mean.tolist() == [1.0, 3.0]
    assert out.variance.tolist() == [2.0, 0.0]
    assert "index is random" in registry_refusal(registry, aten.gather.default, "index")


def registry_refusal(registry: Registry, op, name: str) -> str:
    families.rearrangement(op)
    return registry.find(op).refuses({}, frozenset({"self", name}))


def test_linear_map_squares_the_weight_and_drops_the_bias(registry):
    families.linear_map(aten.linear.default, pull=lambda *_: lambda cotangent: [cotangent])
    found = registry.find(aten.linear.default)
    out = found(Moments(torch.ones(1, 2), 1.0), torch.tensor([[2.0, -3.0]]), torch.tensor([5.0]))
    assert out.mean.tolist() == [[4.0]]
    assert out.variance.tolist() == [[13.0]]


def test_elementwise(registry):
    families.elementwise(aten.neg.default, lambda mean, variance: (-mean, variance), reference="here")
    found = registry.find(aten.neg.default)
    assert (found.exactness, found.reference) == (EXACT_IF_GAUSSIAN, "here")
    out = found(Moments(torch.ones(1), 2.0))
    assert (out.mean.item(), out.variance.item()) == (-1.0, 2.0)


def test_shape_query_ignores_values(registry):
    families.shape_query(aten.zeros_like.default)
    found = registry.find(aten.zeros_like.default)
    assert found.role is Role.SHAPE
    assert torch.equal(found(Moments(torch.ones(2), 1.0)), torch.zeros(2))


def test_pack():
    one = families.pack(torch.ones(1), torch.zeros(1))
    assert isinstance(one, Moments)
    several = families.pack([torch.ones(1)] * 2, (torch.zeros(1),) * 2)
    assert [m.mean.item() for m in several] == [1.0, 1.0]


def test_broadcast():
    mean = torch.zeros(2, 3, dtype=torch.float64)
    for variance in (torch.ones(3), torch.ones(2, 1), torch.ones(()), 1.0):
        out = families.broadcast(variance, mean)
        assert torch.equal(out, torch.ones_like(mean))
        assert out.dtype == mean.dtype


def test_squared():
    assert families.squared(-3, torch.float32) == 9
    assert families.squared(torch.tensor(200, dtype=torch.uint8), torch.float32).item() == 40_000
