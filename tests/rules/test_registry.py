import pytest
import torch

import momentprop as mp
from momentprop import tiers
from momentprop.errors import MomentpropError, RuleError
from momentprop.graph.schema import bind
from momentprop.rules.registry import EXACT, RULES, Registry, Role, Rule, Variant, rule

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def restored():
    """Whatever a test registers is gone after it."""
    before = dict(RULES._rules)
    yield
    RULES._rules.clear()
    RULES._rules.update(before)


def identity(x):
    return x


def test_registered_rule_is_found_and_called():
    @rule(aten.exp.default, exactness=EXACT, reference="log-normal", override=True)
    def exp(x):
        mean = torch.exp(x.mean + x.variance / 2)
        return mp.Moments(mean, mean**2 * torch.expm1(x.variance))

    found = RULES.find(aten.exp.default)
    assert found.function is exp
    assert (found.exactness, found.reference) == (EXACT, "log-normal")
    out = found(mp.Moments(torch.zeros(2), 1.0))
    torch.testing.assert_close(out.mean, torch.full((2,), 0.5).exp())


def test_one_function_for_several_operators():
    rule(aten.sinh.default, aten.cosh.default)(identity)
    assert RULES.find(aten.sinh.default).op is aten.sinh.default
    assert RULES.find(aten.cosh.default).op is aten.cosh.default


def test_duplicate_is_refused():
    before = RULES.find(aten.relu.default)
    with pytest.raises(RuleError, match=r"aten\.relu\.default already has a rule; pass override=True"):
        rule(aten.relu.default)(identity)
    assert RULES.find(aten.relu.default) is before


def test_override_replaces():
    rule(aten.relu.default, override=True)(identity)
    assert RULES.find(aten.relu.default).function is identity


PAPER = (Variant.PAPER,)


def test_override_of_a_variant_leaves_the_others():
    general = RULES.find(aten.relu.default)
    rule(aten.relu.default, variant=Variant.PAPER)(identity)
    assert RULES.find(aten.relu.default, PAPER).function is identity
    assert RULES.find(aten.relu.default) is general


def test_override_of_the_default_replaces_every_variant():
    assert RULES.find(aten.softmax.int, PAPER).variant is Variant.PAPER
    rule(aten.softmax.int, override=True)(lambda x, dim, dtype=None: x)
    for tier in tiers.ALL:
        assert tier.rules.find(aten.softmax.int) is RULES.find(aten.softmax.int)
        assert tier.rules.find(aten.softmax.int).exactness == "user-defined"


def test_lookup_by_variant():
    def for_paper(x):
        return x

    rule(aten.sinh.default, variant=Variant.PAPER)(for_paper)
    assert RULES.find(aten.sinh.default, PAPER).function is for_paper
    assert RULES.find(aten.sinh.default) is None
    with pytest.raises(RuleError, match="already has a rule"):
        rule(aten.sinh.default, variant=Variant.PAPER)(identity)


def test_unknown_variant_is_refused():
    with pytest.raises(RuleError, match=r"variant must be one of .*PAPER.*, not 'papre'"):
        rule(aten.sinh.default, variant="papre")(identity)


def test_softmax_has_a_variant_of_the_paper():
    assert RULES.find(aten.softmax.int, PAPER) is not RULES.find(aten.softmax.int)
    assert RULES.find(aten.softmax.int).variant is None


def _name(value):
    """Without the address in memory, which is another in every process."""
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize("missing", [aten.sinh.default, aten.relu, torch.relu, "relu", None, len], ids=_name)
def test_unknown_operators_are_not_found(missing):
    assert RULES.find(missing) is None


def test_remove():
    rule(aten.sinh.default)(identity)
    RULES.remove(aten.sinh.default)
    assert RULES.find(aten.sinh.default) is None
    RULES.remove(aten.sinh.default)  # nothing to remove is fine


def test_packet_lists_its_overloads():
    with pytest.raises(RuleError, match=r"several overloads; name one of: .*aten\.add\.Tensor") as error:
        rule(aten.add)(identity)
    assert "aten.add.Scalar" in str(error.value)


@pytest.mark.parametrize("op", [aten.relu_.default, aten.add_.Tensor, aten.relu.out], ids=str)
def test_in_place_operator_is_refused(op):
    with pytest.raises(RuleError, match=r"changes its argument.*without the underscore"):
        rule(op)(identity)


@pytest.mark.parametrize("op", [torch.relu, torch.nn.ReLU, "aten.relu.default", None], ids=_name)
def test_anything_but_an_operator_is_refused(op):
    with pytest.raises(RuleError, match=r"belongs to an operator such as torch\.ops\.aten\.relu\.default"):
        rule(op)(identity)


def test_no_operator_is_refused():
    with pytest.raises(RuleError, match="name at least one operator"):
        rule()


@pytest.mark.parametrize(
    ("op", "function", "count"),
    [
        (aten.sinh.default, lambda: None, "1 to 1 positional arguments (self)"),
        (aten.sinh.default, lambda x, y: None, "1 to 1 positional arguments (self)"),
        (aten.histc.default, lambda x: None, "1 to 4 positional arguments (self, bins, min, max)"),
        (aten.histc.default, lambda x, low, high: None, "1 to 4 positional arguments"),
        (aten.sinh.default, lambda x, *, required: None, "1 to 1 positional arguments (self)"),
    ],
)
def test_wrong_signature_is_refused(op, function, count):
    with pytest.raises(RuleError) as error:
        rule(op)(function)
    assert f"the rule for {op} must take {count}" in str(error.value)
    assert RULES.find(op) is None


def test_defaults_may_be_given_or_left_out():
    rule(aten.histc.default)(lambda x, bins=100, low=0, high=0: x)
    rule(aten.sinh.default)(lambda *args, **kwargs: args[0])


def test_rule_errors_are_caught_as_value_errors():
    assert issubclass(RuleError, ValueError)
    assert issubclass(RuleError, MomentpropError)


def test_plain_tensors_run_the_operator():
    found = Rule(aten.cat.default, lambda tensors, dim=0: "rule", EXACT, "")
    x, random = torch.ones(2), mp.Moments(torch.ones(2), 1.0)
    assert torch.equal(found([x, x]), torch.ones(4))
    assert found([x, random]) == "rule"
    assert found(tensors=[[random]]) == "rule"


def test_noise_begins_at_plain_tensors():
    found = Rule(aten.relu.default, lambda x: "rule", EXACT, "", role=Role.SOURCE)
    assert found(torch.ones(2)) == "rule"


def test_rule_is_named_after_its_operator():
    assert RULES.find(aten.relu.default).__name__ == "aten_relu_default"


def test_iteration_is_sorted_and_complete():
    rules = list(RULES)
    assert {(r.op, r.variant) for r in rules} == set(RULES._rules)
    assert [str(r.op) for r in rules] == sorted(str(r.op) for r in rules)
    assert len([r for r in rules if r.op is aten.softmax.int]) == 2


def test_registries_are_independent():
    own = Registry()
    own.add(Rule(aten.relu.default, identity, EXACT, ""))
    assert len(list(own)) == 1
    assert RULES.find(aten.relu.default).function is not identity


def test_every_shipped_rule_is_documented():
    for shipped in RULES:
        if shipped.function.__module__.startswith("momentprop."):
            assert shipped.exactness != "user-defined"
            assert shipped.reference


def test_bind_fills_in_defaults():
    x, y = torch.ones(2), torch.zeros(2)
    assert bind(aten.add.Tensor, (x, y), {}) == {"self": x, "other": y, "alpha": 1}
    assert bind(aten.add.Tensor, (x, y), {"alpha": 3})["alpha"] == 3
    bound = bind(aten.max_pool2d.default, (x, [2, 2]), {"ceil_mode": True})
    assert bound == {
        "self": x,
        "kernel_size": [2, 2],
        "stride": [],
        "padding": [0, 0],
        "dilation": [1, 1],
        "ceil_mode": True,
    }


def test_bind_takes_names_for_positions():
    assert bind(aten.relu.default, (), {"self": 1}) == {"self": 1}
    assert bind(aten.linear.default, (1, 2), {}) == {"input": 1, "weight": 2, "bias": None}


def test_bind_overrides_defaults_by_position():
    assert bind(aten.sum.dim_IntList, (1, [0], True), {})["keepdim"] is True
