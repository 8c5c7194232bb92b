"""Operators without a rule: first order against the Jacobian, samples against larger samples."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import momentprop as mp
from momentprop.passes.stand_ins.pointwise import trapezoid
from momentprop.passes.stand_ins.probes import Columns, grouped, groups, points
from momentprop.rules.registry import RULES

aten = torch.ops.aten

TIERS = ("paper", "fast", "accurate")
METHODS = ("linearize", "sample")
OPERATORS = (
    *(aten.lgamma.default, aten.erfinv.default, aten.atan2.default, aten.logcumsumexp.default),
    *(aten.topk.default, aten.sort.default, aten.cummax.default, aten.cdist.default, aten.argmax.default),
    *(aten.linalg_det.default, aten.sinc.default, aten.gt.Scalar, aten.bucketize.Tensor),
)


@pytest.fixture(autouse=True)
def without_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """These operators have no rule, whatever rules there will be."""
    monkeypatch.setattr(RULES, "_rules", {k: v for k, v in RULES._rules.items() if k[0] not in OPERATORS})


class Apply(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *x: Tensor) -> Any:
        return self.function(*x)


@torch.library.custom_op("momentprop_test::wave", mutates_args=())
def wave(x: Tensor, scale: float) -> Tensor:
    return torch.sin(scale * x).cumsum(1)


@wave.register_fake
def _(x: Tensor, scale: float) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.scale = inputs[1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (x,) = ctx.saved_tensors
    return ctx.scale * torch.cos(ctx.scale * x) * grad.flip(1).cumsum(1).flip(1), None


wave.register_autograd(_backward, setup_context=_keep)


@torch.library.custom_op("momentprop_test::opaque", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    return torch.sin(x)


@opaque.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


BY_ELEMENT: dict[str, Callable[[Tensor], Tensor]] = {
    "lgamma": lambda x: torch.lgamma(x + 3),
    "sinc": torch.sinc,
    "floor": torch.floor,
    "logit": lambda x: torch.logit(0.5 + 0.1 * x, 1e-3),
    "entr": lambda x: torch.special.entr(x.abs() + 0.5),
    "atan2, broadcast": lambda x: torch.atan2(x[:, 1:], x[:, :1] + 5),
}
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "logcumsumexp": lambda x: torch.logcumsumexp(x, 1),
    "sort": lambda x: torch.sort(x, 1).values,
    "topk, two results": lambda x: torch.topk(x, 2, 1).values,
    "det": lambda x: torch.linalg.det(x[:, :4].reshape(-1, 2, 2))[:, None],
    "a custom operator": lambda x: wave(x, 1.5),
}


def moments(n: int = 6, batch: int = 3, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> mp.Moments:
    generator = torch.Generator().manual_seed(0)
    mean, spread = torch.randn(2, batch, n, generator=generator, dtype=torch.float64)
    return mp.Moments(mean.to(dtype), (scale * spread.exp() / 10).to(dtype))


def jacobian(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """[batch, outputs, inputs]"""
    rows = [torch.autograd.functional.jacobian(function, row[None])[0, ..., 0, :] for row in x]
    return torch.stack([r.reshape(-1, x.shape[1]) for r in rows])


def convert(function: Callable[..., Any], x: Any, fidelity: str, unsupported: str) -> mp.BayesianNetwork:
    return mp.convert(Apply(function), x, fidelity, unsupported=unsupported)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("fidelity", TIERS)
def test_first_order_is_the_jacobian_at_the_mean(name: str, fidelity: str) -> None:
    function, x = FUNCTIONS[name], moments()
    bnn = convert(function, x, fidelity, "linearize")
    out = bnn(x)
    j = jacobian(function, x.mean)
    expected = j @ torch.diag_embed(x.variance) @ j.mT
    torch.testing.assert_close(out.mean, function(x.mean))
    if fidelity == "accurate":  # nothing is treated as independent that is not
        torch.testing.assert_close(out.covariance, expected)
    elif name != "det":  # several operators in a row
        torch.testing.assert_close(out.variance, expected.diagonal(dim1=1, dim2=2))
    assert [row.fallback for row in bnn.summary().fallbacks] == ["linearize"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_sample_agrees_with_a_larger_one(name: str) -> None:
    """Documented: the mean to 0.1 std, the std to 15 %, in tier `accurate` 25 %."""
    function, x = FUNCTIONS[name], moments()
    torch.manual_seed(0)
    samples = function((x.mean + x.std * torch.randn(20_000, *x.shape, dtype=x.dtype)).flatten(0, 1))
    samples = samples.reshape(20_000, x.shape[0], -1)
    for fidelity in ("fast", "accurate"):
        out = convert(function, x, fidelity, "sample")(x)
        if fidelity == "fast" and name == "det":
            continue  # several operators in a row
        assert ((out.mean - samples.mean(0)).abs() <= 0.1 * samples.std(0)).all()
        assert (out.std / samples.std(0) - 1).abs().max() < (0.15 if fidelity == "fast" else 0.25)
    again = convert(function, x, "accurate", "sample")(x)
    assert torch.equal(again.mean, out.mean)
    assert torch.equal(again.covariance, out.covariance)


@pytest.mark.parametrize("name", BY_ELEMENT)
@pytest.mark.parametrize("fidelity", TIERS)
def test_nobody_has_to_ask_for_elementwise_operators(name: str, fidelity: str) -> None:
    function, x = BY_ELEMENT[name], moments()
    torch.manual_seed(0)
    samples = function((x.mean + x.std * torch.randn(20_000, *x.shape, dtype=x.dtype)).flatten(0, 1))
    samples = samples.reshape(20_000, x.shape[0], -1)
    out = mp.convert(Apply(function), x, fidelity)(x)
    assert ((out.mean - samples.mean(0)).abs() <= 0.1 * samples.std(0)).all()
    assert ((out.std - samples.std(0)).abs() <= 0.1 * samples.std(0) + 0.01).all()


def test_complex_numbers_get_no_quadrature() -> None:
    with pytest.raises(mp.MissingRuleError, match="angle"):
        mp.convert(Apply(lambda x: torch.angle(torch.complex(x, x))), moments())


def test_an_elementwise_operator_is_averaged_over_a_grid() -> None:
    """Documented: the mean to 0.02 std, the std to 6 %, here of a function with waves as long as two std."""
    x = mp.Moments(torch.linspace(-3, 3, 41, dtype=torch.float64)[:, None], 1.0)
    torch.manual_seed(0)
    samples = torch.sinc(x.mean + torch.randn(41, 200_000, dtype=torch.float64))
    bnn = mp.convert(Apply(torch.sinc), x)
    out = bnn(x)
    (row,) = bnn.summary()
    assert "quadrature with 61 points" in row.exactness
    assert "no fallbacks" in bnn.summary().head
    assert ((out.mean[:, 0] - samples.mean(1)).abs() <= 0.02 * samples.std(1)).all()
    assert (out.std[:, 0] / samples.std(1) - 1).abs().max() < 0.06


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", [*FUNCTIONS, *BY_ELEMENT])
def test_is_the_operator_where_variance_vanishes(name: str, method: str) -> None:
    function, x = (FUNCTIONS | BY_ELEMENT)[name], moments(scale=0.0)
    for fidelity in TIERS:
        out = convert(function, x, fidelity, method)(x)
        torch.testing.assert_close(out.mean, function(x.mean), rtol=1e-12, atol=1e-12)
        assert (out.variance <= 1e-24).all()


@pytest.mark.parametrize("method", METHODS)
def test_an_infinite_derivative_where_nothing_is_random(method: str) -> None:
    x = mp.Moments(torch.tensor([[1.0, 0.5]]), torch.tensor([[0.0, 0.01]]))  # erfinv'(1) is infinite
    out = convert(torch.erfinv, x, "accurate", method)(x)
    assert out.variance[0, 0] < 1e-20
    assert out.covariance.isfinite().all()


def test_points_outside_the_domain_are_left_out() -> None:
    x = mp.Moments(torch.tensor([[0.5]]), torch.tensor([[0.25]]))
    out = convert(torch.erfinv, x, "accurate", "sample")(x)
    assert out.mean.isfinite().all()
    assert out.covariance.isfinite().all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["lgamma", "logcumsumexp", "topk, two results"])
def test_float32_is_near_float64_and_gradients_flow(name: str, method: str) -> None:
    function, x = (FUNCTIONS | BY_ELEMENT)[name], moments(batch=2)
    bnn = convert(function, x, "accurate", method)
    single = mp.Moments(x.mean.float(), x.variance.float())
    low, high = copy.deepcopy(bnn).float()(single), bnn(x)
    torch.testing.assert_close(low.mean, high.mean.float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(low.covariance, high.covariance.float(), rtol=1e-3, atol=1e-4)

    def run(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        out = bnn(mp.Moments(mean, variance))
        return out.mean, out.covariance

    leaves = [x.mean.requires_grad_(), x.variance.requires_grad_()]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("method", METHODS)
def test_a_sample_does_not_depend_on_its_place_in_the_batch(method: str) -> None:
    function, x = FUNCTIONS["logcumsumexp"], moments(n=80, batch=5)
    for fidelity in ("fast", "accurate"):
        bnn = convert(function, x, fidelity, method)
        out = bnn(x)
        for i in (0, 3):
            alone = bnn(mp.Moments(x.mean[i : i + 1], x.variance[i : i + 1]))
            torch.testing.assert_close(alone.mean, out.mean[i : i + 1])
            torch.testing.assert_close(alone.variance, out.variance[i : i + 1])
        assert bnn(mp.Moments(x.mean[:0], x.variance[:0])).shape == (0, 80)


def test_many_elements_are_put_into_groups() -> None:
    """The estimate of a dense map's variance is good to sqrt(2 / 61); that of a selection is exact."""
    x = moments(n=400, batch=2)
    out = convert(FUNCTIONS["sort"], x, "fast", "linearize")(x)
    torch.testing.assert_close(out.variance, x.variance.gather(1, x.mean.argsort(1)))
    j = jacobian(FUNCTIONS["logcumsumexp"], x.mean)
    exact = (j.square() * x.variance[:, None]).sum(-1)
    bnn = convert(FUNCTIONS["logcumsumexp"], x, "fast", "linearize")
    assert (bnn(x).variance / exact - 1).abs().max() < 5 * (2 / 61) ** 0.5
    assert "variance from 61 deviations" in next(iter(bnn.summary())).exactness
    swept = convert(FUNCTIONS["logcumsumexp"], x, "accurate", "linearize")(x)
    torch.testing.assert_close(swept.variance, exact)  # no estimate is needed there


def test_deviations_of_groups_add_up_without_bias() -> None:
    torch.manual_seed(0)
    shapes = [(torch.SymInt, 70), (30,)]
    columns = Columns.of(shapes)
    stds = [torch.rand(3, 70, dtype=torch.float64), torch.rand(30, dtype=torch.float64)]
    deviations = grouped(stds, columns)
    squares = [sum(deviations(g)[i].square() for g in range(groups(columns))) for i in (0, 1)]
    torch.testing.assert_close(squares[0], stds[0].square())
    torch.testing.assert_close(squares[1], stds[1].square())


@pytest.mark.parametrize(("pairs", "columns"), [(32, 1), (32, 50), (4, 3)])
def test_points_are_standard_normal(pairs: int, columns: int) -> None:
    table = points(pairs, [Columns(0, (columns,))])
    assert table.shape == (pairs, columns)
    torch.testing.assert_close(table.square().mean(0), torch.ones(columns, dtype=torch.float64))
    level = (torch.arange(pairs, dtype=torch.float64) + 0.5) / pairs
    quantiles = torch.erfinv(level) * 2**0.5
    for column in table.T:
        sizes = column.abs().sort().values
        torch.testing.assert_close(sizes / sizes[-1], quantiles / quantiles[-1])
    for block in table.split(pairs // 2, 1):
        products = block.T @ block / pairs
        assert (products - torch.eye(block.shape[1])).abs().max() < (0.05 if pairs == 32 else 0.5)


@pytest.mark.parametrize("method", METHODS)
def test_indices_and_comparisons_are_taken_at_the_mean(method: str) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, indices = torch.topk(x, 2, 1)
        rest = torch.where(x.roll(1, 1) > 0, x, 0.1 * x) + torch.argmax(x, 1, keepdim=True)
        return values, indices.to(x.dtype), rest

    x = moments()
    for fidelity in ("fast", "accurate"):
        bnn = convert(function, x, fidelity, method)
        values, indices, rest = bnn(x)
        assert torch.equal(indices.mean, torch.topk(x.mean, 2, 1).indices.to(x.dtype))
        assert (indices.variance == 0).all()
        assert (values.variance > 0).all()
        torch.testing.assert_close(rest.mean, function(x.mean)[2])
        torch.testing.assert_close(rest.variance, torch.where(x.mean.roll(1, 1) > 0, 1.0, 0.01) * x.variance)
        notes = {row.operator: row.exactness for row in bnn.summary().fallbacks}
        assert notes["aten.gt.Scalar"] == "taken at the mean"


def test_results_of_which_the_first_is_no_number() -> None:
    """Noise and gain go to the second result."""

    @torch.library.custom_op("momentprop_test::split", mutates_args=())
    def split(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.argmax(1), x.abs()

    @split.register_fake
    def _(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.new_empty(x.shape[0], dtype=torch.long), torch.empty_like(x)

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    split.register_autograd(lambda ctx, _, grad: grad * ctx.saved_tensors[0].sign(), setup_context=keep)
    x = mp.Moments(torch.zeros(2, 3, dtype=torch.float64), 1.0)
    out = convert(lambda x: split(x)[1], x, "accurate", "sample")(x)
    torch.testing.assert_close(out.variance, torch.full_like(x.mean, 1 - 2 / torch.pi), rtol=0.03, atol=0)
    torch.testing.assert_close(out.covariance, torch.diag_embed(out.variance))


def test_without_a_derivative_the_slope_serves_and_no_covariance_is_made_up() -> None:
    x = moments()
    slope = (torch.sin(x.mean + x.std) - torch.sin(x.mean - x.std)) / 2
    bnn = convert(opaque, x, "fast", "linearize")
    torch.testing.assert_close(bnn(x).variance, slope.square())
    assert "by slopes over one std" in next(iter(bnn.summary())).exactness
    for method in METHODS:
        with pytest.raises(mp.MissingRuleError, match=f"unsupported='{method}' does not help"):
            convert(opaque, x, "accurate", method)
    with pytest.warns(mp.FidelityNote, match="does not help"):
        assert convert(opaque, x, "auto", "sample").fidelity == "fast"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: torch.lgamma(x) * torch.poisson(x.abs()), "draws random numbers"),
        (lambda x: torch.masked_select(x, x > 0).sum()[None] + x, "has no rule"),
        (lambda x: torch.fft.fft(x, dim=1).abs(), "complex"),
    ],
    ids=["random numbers", "shape from data", "complex"],
)
def test_what_stays_an_error(function: Callable[[Tensor], Tensor], reason: str, method: str) -> None:
    for fidelity in ("fast", "accurate"):
        with pytest.raises(mp.MissingRuleError, match=reason):
            convert(function, moments(), fidelity, method)


def test_without_being_asked_all_places_are_named_and_the_way_out() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.cummax(torch.logcumsumexp(x, 1), 1).values

    with pytest.raises(mp.MissingRuleError, match='unsupported="linearize"') as error:
        mp.convert(Apply(function), moments())
    found = [place.operator for place in error.value.places]
    assert found == ["aten.logcumsumexp.default", "aten.cummax.default"]
    with pytest.raises(ValueError, match="unsupported must be one of"):
        mp.convert(Apply(function), moments(), unsupported="guess")


def test_cases_that_a_rule_refuses() -> None:
    @mp.rule(aten.logcumsumexp.default, refuses=lambda *_: "not today")
    def refused(x: mp.Moments, dim: int) -> mp.Moments:
        raise AssertionError

    x = moments()
    with pytest.raises(mp.MissingRuleError, match="not today"):
        mp.convert(Apply(FUNCTIONS["logcumsumexp"]), x)
    j = jacobian(FUNCTIONS["logcumsumexp"], x.mean)
    out = convert(FUNCTIONS["logcumsumexp"], x, "accurate", "linearize")(x)
    torch.testing.assert_close(out.covariance, j @ torch.diag_embed(x.variance) @ j.mT)


def test_inputs_that_become_uncertain_later() -> None:
    """The fallback of an operator follows which of its inputs are random."""
    x, y = moments(), moments(batch=3, scale=2.0)
    both = torch.atan2
    bnn = mp.convert(Apply(both), (x, y.mean), "accurate")
    fast = mp.convert(Apply(both), (x, y.mean), "fast")
    for a, b in ((x, y.mean), (x.mean, y), (x, y)):
        fresh = mp.convert(Apply(both), (a, b), "accurate")
        expected = fresh(a, b).covariance
        close = {"rtol": 1e-6, "atol": 1e-9}
        torch.testing.assert_close(bnn(a, b).covariance, expected, **close)
        torch.testing.assert_close(fast(a, b).variance, expected.diagonal(dim1=1, dim2=2), **close)


@pytest.mark.parametrize("method", METHODS)
def test_compiles_and_exports_into_one_graph(method: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = nn.functional.dropout(x, 0.3, self.training)
            x = self.first(x)
            if method == "linearize":  # as a sample it is many operators to compile
                x = torch.topk(x, 3, 1).values
            return self.last(torch.lgamma(x[:, :3] + 5))

    torch.manual_seed(0)
    x = torch.randn(4, 6)
    bnn = mp.convert(Model(), x, "accurate", unsupported=method)
    expected = bnn(x)
    compiled = torch.compile(bnn, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x).covariance, expected.covariance)
    exported = torch.export.export(bnn, (x,), strict=False).module()
    torch.testing.assert_close(exported(x).covariance, expected.covariance)
    moved = copy.deepcopy(bnn).double()(x.double())
    torch.testing.assert_close(moved.covariance.float(), expected.covariance, rtol=1e-3, atol=1e-6)


def test_behind_many_convolutions() -> None:
    """Past results that are indices too."""
    layers = [nn.Conv2d(2, 2, 3, padding=1) for _ in range(8)]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.last = nn.Sequential(*layers), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layers(nn.functional.dropout(x, 0.2, self.training)).flatten(1)
            return self.last(torch.topk(x, 4, 1).values)

    torch.manual_seed(0)
    x = torch.randn(2, 2, 4, 4)
    model = Model()
    bnn = mp.convert(model, x, "accurate", unsupported="sample")
    ratio = bnn(x).std / mp.monte_carlo(model, x, n_samples=1000).std
    assert ((ratio > 0.5) & (ratio < 2)).all()


@pytest.mark.parametrize("method", METHODS)
def test_stacked_members_and_inference_mode(method: str) -> None:
    def member() -> nn.Sequential:
        head = Apply(lambda x: torch.logcumsumexp(torch.sinc(x), 1))
        return nn.Sequential(nn.Dropout(0.2), nn.Linear(5, 3), head)

    torch.manual_seed(0)
    x = torch.randn(3, 5)
    members = [mp.convert(member(), x, unsupported=method) for _ in range(2)]
    ensemble = mp.Ensemble(members, stack=True)
    for out, bnn in zip(ensemble(x), members, strict=True):
        torch.testing.assert_close(out.covariance, bnn(x).covariance)
    with torch.inference_mode():  # a fallback is made anew, now that the input is random too
        assert (members[0](mp.Moments(x, 0.1)).variance > members[0](x).variance).any()


@pytest.mark.parametrize(("pairs", "reach"), [(30, 5.0), (4, 3.0), (1, 1.7)])
def test_equidistant_points_are_standard_normal(pairs: int, reach: float) -> None:
    nodes = trapezoid(pairs, reach)
    assert len(nodes) == pairs
    assert 2 * sum(w * z * z for z, w in nodes) == pytest.approx(1, abs=1e-14)
    assert 2 * sum(w for _, w in nodes) < 1
    fourth = 2 * sum(w * z**4 for z, w in nodes)
    assert fourth == pytest.approx(3, rel={30: 1e-3, 4: 0.1, 1: 0.7}[pairs])


def test_kinks_and_jumps_by_equidistant_points() -> None:
    """Documented: the mean to 0.02 std, the std to 6 %, wherever the kink is."""
    x = mp.Moments(torch.linspace(-2, 2, 23, dtype=torch.float64)[:, None], 1.0)
    out = convert(lambda x: torch.special.i0e(x), x, "fast", "sample")(x)
    z = torch.linspace(-8, 8, 100_001, dtype=torch.float64)
    weight = torch.exp(-z * z / 2) / torch.exp(-z * z / 2).sum()
    values = torch.special.i0e(x.mean + z)
    mean = (values * weight).sum(1, keepdim=True)
    std = ((values - mean).square() * weight).sum(1, keepdim=True).sqrt()
    assert ((out.mean - mean).abs() < 0.02 * std).all()
    assert (out.std / std - 1).abs().max() < 0.06
