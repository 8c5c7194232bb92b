"""Compositions of element-wise operators that use one value several times become one activation."""

import math

import pytest
import torch
import torch.nn.functional as F

import momentprop as mp
from gaussian_layer import Apply
from momentprop.capture.trace import trace
from momentprop.passes.canonical import CANONICAL
from momentprop.rules.registry import Rule
from passed import passed

aten = torch.ops.aten


def tanh_gelu(x, w):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


COMPOSITIONS = {
    "swish": lambda x, w: x * torch.sigmoid(x),
    "scaled swish": lambda x, w: x * torch.sigmoid(w * x) + 1,
    "mish": lambda x, w: x * torch.tanh(F.softplus(x)),
    "tanh-GELU": tanh_gelu,
    "cube": lambda x, w: x * x * x,
    "residual": lambda x, w: x + torch.tanh(x) * 2,
    "square": lambda x, w: x * x,
}


@pytest.mark.parametrize("fidelity", ["paper", "fast", "accurate"])
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_moments_of_compositions(name, fidelity):
    """Factors are one function of the same value: as sampling has it, where independence is far off."""
    torch.manual_seed(0)
    model = Apply(COMPOSITIONS[name])
    x = mp.Moments(torch.randn(2, 16) * 2, 0.5)
    out = mp.convert(model, x, fidelity)(x)
    mc = mp.monte_carlo(model, x, 20_000)
    assert ((out.mean - mc.mean).abs() < 5 * mc.mean_error + 0.005 * mc.std).all()
    assert ((out.variance - mc.variance).abs() < 5 * mc.variance_error + 0.02 * mc.variance).all()


def n_rules(graph):
    return sum(isinstance(node.target, Rule) for node in graph.nodes)


def test_only_what_meets_itself_is_composed():
    model = Apply(lambda x, w: torch.tanh(x * w) + 1)
    assert n_rules(passed(trace(model, torch.zeros(2, 16)), CANONICAL).graph) == 0
    for function in (lambda x, w: x * w.sigmoid(), lambda x, w: x * x.mean(1, keepdim=True), lambda x, w: x):
        assert n_rules(passed(trace(Apply(function), torch.zeros(2, 16)), CANONICAL).graph) == 0
    assert n_rules(passed(trace(Apply(tanh_gelu), torch.zeros(2, 16)), CANONICAL).graph) == 1


@pytest.mark.parametrize("fidelity", ["paper", "fast", "accurate"])
def test_compositions_inside_others_are_used_elsewhere_too(fidelity):
    """Both are composed: the smaller one could not be propagated in parts."""

    class Model(Apply):
        def forward(self, x):
            y = self.first(x)
            on = y * (y > 0)
            return on.tanh() * on, on.sum(1), on

    model, x = Model(None), mp.Moments(torch.randn(2, 16), 0.5)
    outputs, sampled = mp.convert(model, x, fidelity)(x), mp.monte_carlo(model, x, 20_000)
    for out, mc in zip(outputs, sampled, strict=True):
        assert ((out.mean - mc.mean).abs() < 5 * mc.mean_error + 0.02 * mc.std).all()


@pytest.mark.parametrize("function", [F.logsigmoid, F.hardswish, lambda x: F.prelu(x, torch.tensor([0.2]))])
def test_activations_that_torch_does_not_call_pointwise(function):
    """The larger of two equal values: not that of two independent ones."""
    model = Apply(lambda x, w: torch.maximum(function(x), function(x)))
    assert n_rules(passed(trace(model, torch.zeros(2, 16)), CANONICAL).graph) == 1


def test_parts_used_elsewhere_stay():
    class Model(Apply):
        def forward(self, x):
            y = self.first(x)
            gate = torch.sigmoid(y)
            return y * gate, gate.sum(1)

    model, x = Model(None), mp.Moments(torch.randn(2, 16), 0.5)
    swish, total = mp.convert(model, x, "fast")(x)
    mc_swish, mc_total = mp.monte_carlo(model, x, 20_000)
    assert ((swish.std / mc_swish.std - 1).abs() < 0.05).all()
    assert ((total.mean - mc_total.mean).abs() < 0.05 * mc_total.std).all()
