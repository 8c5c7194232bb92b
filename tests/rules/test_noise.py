import pytest
import torch

from linear_part import linear_part
from momentprop.moments import Moments
from properties import DTYPES, Samples, gaussian_samples
from rule_settings import Setting, X, setting

aten = torch.ops.aten
N = 100_000


def probabilities(*shape):
    return torch.linspace(0, 1, 6, dtype=torch.float64).reshape(shape or (6,))


def std(*shape):
    return torch.linspace(0.1, 2, 6, dtype=torch.float64).reshape(shape or (6,))


LIKE = torch.zeros(2, 3, dtype=torch.float64)
SOURCES = [
    setting(aten.bernoulli.p, LIKE, 0.3),
    setting(aten.bernoulli.p, LIKE, 1.0),
    setting(aten.bernoulli.default, probabilities(2, 3)),
    setting(aten.randn.default, [2, 3], dtype=torch.float64),
    setting(aten.randn_like.default, LIKE),
    setting(aten.rand.default, [4], dtype=torch.float64),
    setting(aten.rand_like.default, LIKE),
    setting(aten.normal_functional.default, LIKE, 1.5, 0.4),
    setting(aten.normal.float_float, 1.5, 0.4, [3], dtype=torch.float64),
    setting(aten.normal.Tensor_float, std(), 0.4),
    setting(aten.normal.float_Tensor, 1.5, std()),
    setting(aten.normal.Tensor_Tensor, std(), std(2, 3).mT.reshape(6)),
    setting(aten.uniform.default, LIKE, -1.0, 2.0),
]


def repeated(case: Setting) -> torch.Tensor:
    """Many draws of the operator at once."""

    def wide(value):
        if isinstance(value, torch.Tensor):
            return value.expand(N, *value.shape).contiguous()
        return [N, *value] if isinstance(value, list) else value

    return case.op(*map(wide, case.args), **case.kwargs)


@pytest.mark.parametrize("case", SOURCES, ids=lambda case: case.op.name())
def test_agrees_with_sampling(case):
    out = case.rule(*case.args, **case.kwargs)
    draws = repeated(case)
    assert out.shape == draws.shape[1:]
    assert out.dtype == draws.dtype
    Samples(draws).assert_agrees(out)
    torch.testing.assert_close(case.linear_part(case.args).noise, out.variance)


@pytest.mark.parametrize("case", SOURCES, ids=lambda case: case.op.name())
def test_draws_no_random_numbers(case):
    state = torch.get_rng_state()
    out = case.rule(*case.args, **case.kwargs)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(case.rule(*case.args, **case.kwargs).mean, out.mean)


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.bernoulli.p, (0.3,)),
        (aten.randn_like.default, ()),
        (aten.rand_like.default, ()),
        (aten.normal_functional.default, (1.0, 2.0)),
        (aten.uniform.default, (0.0, 3.0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_random_tensor_lends_its_shape_alone(op, args, dtype):
    x = Moments(torch.randn(2, 3, dtype=dtype), 1.0)
    rule = setting(op).rule
    out, reference = rule(x, *args), rule(x.mean, *args)
    assert out.dtype == dtype
    assert torch.equal(out.mean, reference.mean)
    assert torch.equal(out.variance, reference.variance)
    part = linear_part(rule, x, *args)
    assert part.pull(torch.ones(1, 2, 3, dtype=dtype)) == [None]
    assert torch.equal(part.noise, out.variance)


@pytest.mark.parametrize(
    ("op", "args"),
    [(aten.normal.Tensor_float, (0.5,)), (aten.normal.Tensor_Tensor, (std(2, 3).mT.contiguous(),))],
    ids=str,
)
def test_noise_around_a_random_mean(op, args):
    shape = (3, 2)
    case = setting(op, X(*shape), *args)
    (x, *rest) = case.arguments()
    out = case.rule(x, *rest)
    values = gaussian_samples(x, N)
    wide = [a.expand(N, *a.shape).contiguous() if isinstance(a, torch.Tensor) else a for a in rest]
    Samples(op(values, *wide)).assert_agrees(out)
    part = case.linear_part((x, *rest))
    assert part.gain is None
    torch.testing.assert_close(part.noise + x.variance, out.variance)


def test_a_random_mean_may_be_broadcast():
    rule = setting(aten.normal.Tensor_Tensor).rule
    x, spread = Moments(torch.randn(1, 3), 0.5), torch.rand(4, 3)
    out = rule(x, spread)
    assert out.shape == (4, 3)
    part = linear_part(rule, x, spread)
    rows = torch.randn(2, 4, 3)
    torch.testing.assert_close(part.pull(rows)[0], rows.sum(1, keepdim=True))
    torch.testing.assert_close(part.noise, spread**2)


def test_bernoulli_of_random_probabilities():
    """B^2 = B, so its moments are those of its mean probability."""
    case = setting(aten.bernoulli.default, X(4))
    p = Moments(torch.tensor([0.2, 0.4, 0.45, 0.7], dtype=torch.float64), 0.002)
    out = case.rule(p)
    draws = torch.bernoulli(gaussian_samples(p, N).clamp(0, 1))
    Samples(draws).assert_agrees(out)
    torch.testing.assert_close(case.linear_part((p,)).noise + p.variance, out.variance)


def test_a_random_std_is_refused():
    rule = setting(aten.normal.Tensor_Tensor).rule
    assert rule.refuses({}, frozenset({"mean"})) is None
    assert "std" in rule.refuses({}, frozenset({"std"}))


def test_never_one_is_no_noise():
    out = setting(aten.bernoulli.p).rule(torch.ones(3), 0.0)
    assert torch.equal(out, torch.zeros(3))
