"""What works element by element behind a dropout is taken case by case: kept, and dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import momentprop as mp
from exact import Model, assert_exact, layers, values
from momentprop.capture.trace import trace
from momentprop.passes.rewrites import REWRITES
from momentprop.rules.branches import Branches
from momentprop.rules.registry import RULES, Rule
from passed import operators, passed, rewritten

aten = torch.ops.aten

# of the dropped value and of x
FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tanh": lambda d, x: d.tanh(),
    "sigmoid": lambda d, x: d.sigmoid(),
    "gelu": lambda d, x: F.gelu(d),
    "square": lambda d, x: d * d,
    "squared relu": lambda d, x: d.relu() ** 2,
    "bell": lambda d, x: torch.exp(-d * d),
    "clamp": lambda d, x: d.clamp(-0.5, 0.7),
    "threshold": lambda d, x: F.threshold(d, 0.1, -1.0),
    "sign": lambda d, x: d.sign(),
    "gate": lambda d, x: d * d.sigmoid(),
    "gate of x": lambda d, x: d * x.sigmoid(),
    "maximum": lambda d, x: torch.maximum(d, d.tanh()),
    "smaller of a constant": lambda d, x: torch.fmin(torch.minimum(d, torch.tensor(0.4)), 2 * d),
    "filled": lambda d, x: d.masked_fill(torch.tensor([True, False, False]), 0.3) * d,
    "where": lambda d, x: torch.where(d > 0.5, d, 0 * d),
    "where of x": lambda d, x: torch.where(d > 0.1, x, d),
    "sum with itself": lambda d, x: d + d.relu(),
    "sum with x": lambda d, x: x + d.relu(),
    "interpolation": lambda d, x: torch.lerp(d, x.tanh(), 0.3),
    "affine maps around": lambda d, x: 2 * (3 - d / 2).sin() + 1,
    "reshaped": lambda d, x: d.reshape(-1, 3, 1).flatten(1).cos(),
    "relu of what is reshaped": lambda d, x: d.reshape(-1, 3, 1).relu().flatten(1),
    "halves": lambda d, x: torch.cat([d[:, 1:].tanh(), d[:, :1].exp()], 1),
    "parts of a split": lambda d, x: torch.cat([part.cos() for part in d.split([1, 2], 1)], 1),
}
functions = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


def kinds(model: nn.Module, *inputs: Any) -> list[Any]:
    return operators(passed(trace(model, inputs), REWRITES))


def count_branches(found: list[Any]) -> int:
    return sum(isinstance(op, Rule) and isinstance(op.op, Branches) for op in found)


class TestDroppedFunctions:
    @functions
    def test_exact_where_x_is_known(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        def run(m: Any, x: Tensor) -> Tensor:
            h = m.a(x)
            return F.linear(function(m.drop(h), h), m.matrix)

        assert_exact(Model(run, **layers()), values(2, 3))

    @pytest.mark.parametrize("drop", [F.dropout, F.dropout2d])
    def test_masks_are_shared_by_all_that_uses_them(self, drop: Callable[..., Tensor]) -> None:
        """Two functions of one dropped value, and the value itself, meet again behind other layers."""

        def run(m: Any, x: Tensor) -> Tensor:
            d = drop(x, 0.3, m.training)
            parts = [
                part.flatten(1) @ w for part, w in zip((d, d.sin(), d.square()), m.matrices, strict=True)
            ]
            return parts[0] + parts[1] - parts[2]

        model = Model(run, matrices=nn.ParameterList([nn.Parameter(values(8, 3)) for _ in range(3)]))
        assert_exact(model, values(2, 2, 2, 2))

    @pytest.mark.parametrize("drop", [nn.Dropout(0.3), nn.Dropout2d(0.3)])
    def test_batch_norm_between(self, drop: nn.Module) -> None:
        norm = nn.BatchNorm2d(2).eval()
        nn.init.normal_(norm.running_mean)
        nn.init.uniform_(norm.running_var, 0.5, 2.0)
        model = Model(lambda m, x: m.norm(m.some(x)).tanh().flatten(1) @ m.w, norm=norm, some=drop)
        model.w = nn.Parameter(values(8, 3))
        assert_exact(model, values(2, 2, 2, 2))

    @pytest.mark.parametrize("drop", [F.alpha_dropout, F.feature_alpha_dropout])
    @pytest.mark.parametrize("function", [torch.tanh, torch.relu])
    def test_dropouts_that_put_another_value(
        self, drop: Callable[..., Tensor], function: Callable[[Tensor], Tensor]
    ) -> None:
        class Net(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return function(drop(x, 0.3, True)).sum((2, 3))

        self.assert_agrees(Net(), torch.randn(1, 3, 2, 2).double())

    @functions
    def test_random_x(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        def run(m: Any, x: Tensor) -> Tensor:
            return F.linear(function(m.drop(x), x), m.matrix)

        steps = function in (FUNCTIONS["sign"], FUNCTIONS["where"], FUNCTIONS["where of x"])
        x = mp.Moments(values(1, 3), values(1, 3).square() / 4)
        self.assert_agrees(Model(run, **layers()), x, of_quadrature=0.15 if steps else 0.02)

    @pytest.mark.parametrize("shape", [(2, 4), (2, 4, 1, 1)])
    def test_dropout_by_hand(self, shape: tuple[int, ...]) -> None:
        class Net(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                mask = torch.bernoulli(torch.full_like(x[:, :, :1, :1] if x.dim() > 2 else x, 0.7))
                return (x * mask / 0.7).tanh().sum(1)

        x = torch.randn(*shape[:2], *([2, 2] if len(shape) > 2 else [])).double()
        assert count_branches(kinds(Net(), x)) == 1
        self.assert_agrees(Net(), x)

    def assert_agrees(self, model: nn.Module, x: Any, of_quadrature: float = 0.0) -> None:
        """Within 5 standard errors of samples, and what quadrature of kinks and steps may be off."""
        error = of_quadrature
        out = mp.convert(model, (x,), "accurate")(x)
        mc = mp.monte_carlo(model, (x,), n_samples=20_000)
        assert ((out.mean - mc.mean).abs() <= 5 * mc.mean_error + error * mc.std).all()
        assert ((out.variance - mc.variance).abs() <= 5 * mc.variance_error + 2 * error * mc.variance).all()

    def test_a_rule_of_ones_own_without_a_linear_part(self) -> None:
        """It is asked for the values that are kept; its gain comes by quadrature, here exact."""

        @mp.rule(aten.square.default, elementwise=True, override=True)
        def square(x: mp.Moments) -> mp.Moments:
            return mp.Moments(x.mean**2 + x.variance + 100, 4 * x.mean**2 * x.variance + 2 * x.variance**2)

        model = Model(lambda m, x: m.drop(x, 0.25).square() @ torch.eye(3).double())
        x = mp.Moments(values(2, 3), 0.25)
        out = mp.convert(model, (x,), "accurate")(x)
        kept, spread = x.mean / 0.75, x.variance / 0.75**2
        mean = kept**2 + spread + 100
        variance = 0.75 * (4 * kept**2 * spread + 2 * spread**2) + 0.75 * 0.25 * mean**2
        torch.testing.assert_close(out.mean, 0.75 * mean)
        torch.testing.assert_close(out.variance, variance)

    def test_jumps_are_those_of_masks(self) -> None:
        model = nn.Sequential(nn.Dropout(0.2), nn.Tanh(), nn.Linear(3, 1)).double()
        x = values(1, 3)
        out = mp.convert(model, x, "accurate", jumps=3)(x)
        expected = -(x / 0.8).tanh() * model[2].weight
        assert out.jumps is not None
        found = out.jumps.effects.flatten().sort().values
        torch.testing.assert_close(found, expected.flatten().sort().values)
        assert (out.jumps.probabilities == 0.2).all()

    @pytest.mark.parametrize(
        "function",
        [lambda d: d, lambda d: 2 * d - 1, lambda d: d.relu(), lambda d: F.linear(d, torch.ones(2, 3))],
    )
    def test_what_rules_know_exactly_is_left(self, function: Callable[[Tensor], Tensor]) -> None:
        assert count_branches(kinds(Model(lambda m, x: function(m.drop(x)).float()), torch.randn(2, 3))) == 0

    def test_heads_keep_their_logits(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.3), nn.Sigmoid())
        assert mp.convert(model, torch.randn(2, 3))(torch.randn(2, 3)).logits is not None

    def test_other_random_values_stay_outside(self) -> None:
        model = Model(lambda m, x: (m.drop(x).tanh() * m.drop(x)).sin(), **layers())
        found = kinds(model, values(2, 3))
        assert count_branches(found) == 1
        assert aten.mul.Tensor in found
        assert aten.sin.default in found

    def test_the_same_function_for_every_mask(self) -> None:
        for function in FUNCTIONS.values():
            rewritten(Model(lambda m, x, f=function: f(F.dropout(x, 0.5, m.training), x)), values(2, 3))

    def test_exports_and_types(self) -> None:
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.GELU(), nn.Linear(8, 2)).eval()
        x = torch.randn(4, 3)
        network = mp.convert(model, x)
        expected = network(x)
        assert torch.equal(network.freeze()(x).variance, expected.variance)
        whole = torch.compile(network, fullgraph=True, backend="eager")
        assert torch.equal(whole(x).variance, expected.variance)
        for dtype, error in ((torch.float64, 1e-5), (torch.bfloat16, 0.05), (torch.float16, 0.01)):
            found = mp.convert(model.to(dtype), x.to(dtype))(x.to(dtype)).std
            torch.testing.assert_close(found.float(), expected.std, rtol=error, atol=error)
        assert any(row.operator == "dropped_gelu" for row in network.summary())


ARGUMENTS: dict[Any, tuple[Any, ...]] = {
    aten.clamp.Tensor: (torch.tensor(-0.5), torch.tensor(0.7)),
    aten.clamp.default: (-0.5, 0.7),
    aten.clamp_max.Tensor: (torch.tensor(0.7),),
    aten.clamp_max.default: (0.7,),
    aten.clamp_min.Tensor: (torch.tensor(-0.5),),
    aten.clamp_min.default: (-0.5,),
    aten.pow.Tensor_Scalar: (3,),
    aten.prelu.default: (torch.tensor([0.2]),),
    aten.threshold.default: (0.1, -1.0),
}
POSITIVE = (
    aten.log.default,
    aten.log1p.default,
    aten.sqrt.default,
    aten.rsqrt.default,
    aten.reciprocal.default,
)
ELEMENTWISE = sorted(
    {r.op for r in RULES if r.elementwise and r.op not in POSITIVE and "aten" in str(r.op)}, key=str
)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("op", ELEMENTWISE, ids=str)
def test_every_activation_behind_a_dropout(op: Any, p: float) -> None:
    """Mean and variance of kept and dropped, by hand; both tiers, alike."""
    x = torch.randn(2, 3).double()
    arguments = [a.double() if isinstance(a, Tensor) else a for a in ARGUMENTS.get(op, ())]
    model = Model(lambda m, x: op(m.drop(x, p), *arguments) @ torch.ones(3, 1).double())
    kept, dropped = op(x / (1 - p), *arguments), op(0 * x, *arguments)
    mean, variance = (1 - p) * kept + p * dropped, p * (1 - p) * (kept - dropped) ** 2
    for tier in ("fast", "accurate"):
        out = mp.convert(model, x, tier)(x)
        torch.testing.assert_close(out.mean, mean.sum(1, keepdim=True), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(out.variance, variance.sum(1, keepdim=True), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("op", ELEMENTWISE, ids=str)
def test_every_activation_behind_a_dropout_of_a_random_value(op: Any) -> None:
    """Beside the integral over a fine grid: std to the 2 % that rules state for kinks, mean to 1 % of it."""
    p, x = 0.3, mp.Moments(torch.tensor([[-1.0, 0.2, 1.5]]).double(), 0.25)
    arguments = [a.double() if isinstance(a, Tensor) else a for a in ARGUMENTS.get(op, ())]
    z = torch.linspace(-7, 7, 4001).double()[:, None]
    weight = torch.exp(-z * z / 2) / torch.exp(-z * z / 2).sum()
    kept, dropped = op((x.mean + 0.5 * z) / (1 - p), *arguments), op(torch.zeros(3).double(), *arguments)
    mean = ((1 - p) * weight * kept).sum(0) + p * dropped
    variance = ((1 - p) * weight * (kept - mean) ** 2).sum(0) + p * (dropped - mean) ** 2
    model = Model(lambda m, x: -op(m.drop(x, p), *arguments))  # sigmoid alone would be a head
    for tier in ("fast", "accurate"):
        out = mp.convert(model, (x,), tier)(x)
        assert ((out.mean[0] + mean).abs() <= 0.01 * variance.sqrt() + 1e-12).all()
        torch.testing.assert_close(out.std[0], variance.sqrt(), rtol=0.02, atol=1e-12)
