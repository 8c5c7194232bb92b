import pytest
import torch

from linear_part import linear_part
from momentprop.moments import Moments
from properties import LinearRule, Samples, gaussian_samples
from rule_settings import C, X, positive, setting

aten = torch.ops.aten


def integers(shape, generator):
    return torch.randint(1, 5, shape, generator=generator)


def mask(shape, generator):
    return torch.randint(2, shape, generator=generator).bool()


SETTINGS = [
    setting(aten.add.Tensor, X(2, 3), X(2, 3)),
    setting(aten.add.Tensor, X(2, 3), X(3), alpha=-2),
    setting(aten.add.Tensor, X(2, 1), X(1, 3), alpha=0.5),
    setting(aten.add.Tensor, X(3), C(2, 3)),
    setting(aten.add.Tensor, C(2, 3), X(3), alpha=3),
    setting(aten.add.Tensor, C(3), X(2, 3)),
    setting(aten.add.Tensor, X(), C(2)),
    setting(aten.add.Tensor, X(2, 3), C(3, make=integers), alpha=2),
    setting(aten.add.Tensor, C(2, 3, make=integers), X(3)),
    setting(aten.add.Tensor, X(2, 3), 2),
    setting(aten.add.Tensor, X(2, 3), 1.5, alpha=2),
    setting(aten.add.Scalar, X(2, 3), 1.5),
    setting(aten.add.Scalar, X(2, 3), 2, -3),
    setting(aten.sub.Tensor, X(2, 3), X(3)),
    setting(aten.sub.Tensor, X(3), X(2, 3), alpha=-2),
    setting(aten.sub.Tensor, C(2, 3), X(3), alpha=0.5),
    setting(aten.sub.Tensor, X(2, 3), C(3), alpha=0.5),
    setting(aten.sub.Tensor, X(2, 3), 2.5),
    setting(aten.sub.Scalar, X(2, 3), 1.5),
    setting(aten.sub.Scalar, X(2, 3), 2, 4),
    setting(aten.rsub.Tensor, X(2, 3), X(3), alpha=3),
    setting(aten.rsub.Tensor, C(2, 3), X(3), alpha=3),
    setting(aten.rsub.Tensor, X(3), C(2, 3), alpha=0.5),
    setting(aten.rsub.Scalar, X(2, 3), 1),
    setting(aten.rsub.Scalar, X(2, 3), 1.5, -2),
    setting(aten.mul.Tensor, X(2, 3), C(2, 3)),
    setting(aten.mul.Tensor, C(2, 3), X(3)),
    setting(aten.mul.Tensor, X(2, 1), C(1, 3)),
    setting(aten.mul.Tensor, X(3), C(2, 3)),
    setting(aten.mul.Tensor, X(2, 3), -2),
    setting(aten.mul.Tensor, X(2, 3), 0.5),
    setting(aten.mul.Tensor, X(2, 3), C(3, make=integers)),
    setting(aten.mul.Tensor, X(8), C(8, make=mask)),
    setting(aten.mul.Scalar, X(2, 3), -0.5),
    setting(aten.mul.Scalar, X(2, 3), 3),
    setting(aten.div.Tensor, X(2, 3), C(3, make=positive)),
    setting(aten.div.Tensor, X(3), C(2, 3, make=positive)),
    setting(aten.div.Tensor, X(2, 3), C(3, make=integers)),
    setting(aten.div.Tensor, X(2, 3), -4),
    setting(aten.div.Scalar, X(2, 3), 0.5),
    setting(aten.div.Scalar, X(2, 3), -3),
    setting(aten.neg.default, X(2, 3)),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
class TestArithmetic(LinearRule):
    pass


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32], ids=str)
def test_integer_constants_do_not_overflow(dtype):
    """The square of an integer tensor does not fit its type: 100^2 mod 256 = 16."""
    n = min(100_000, torch.iinfo(dtype).max)
    x, constant = Moments(torch.ones(2), 1.0), torch.tensor([n, n // 2], dtype=dtype)
    for op, expected in [
        (aten.mul.Tensor, constant.double() ** 2),
        (aten.div.Tensor, constant.double() ** -2),
    ]:
        out = setting(op).rule(x, constant)
        torch.testing.assert_close(out.variance, expected.float())


@pytest.mark.parametrize("op", [aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor], ids=str)
def test_types_are_promoted_as_by_the_operator(op):
    x, constant = Moments(torch.ones(2), 4.0), torch.full((2,), 2.0, dtype=torch.float64)
    out = setting(op).rule(x, constant)
    assert out.mean.dtype == out.variance.dtype == torch.float64


@pytest.mark.parametrize("std", [0.01, 0.05, 0.1, 0.2])
@pytest.mark.parametrize("numerator", ["random", "constant"])
def test_quotient_of_random_tensors(std, numerator):
    """By positive values: mean and variance to 3 c and 10 c, for a divisor of relative variance c."""
    y = Moments(torch.rand(20, dtype=torch.float64) + 0.5, 0.0)
    y = Moments(y.mean, (std * y.mean) ** 2)
    x = torch.randn(20, dtype=torch.float64)
    if numerator == "random":
        x = Moments(x, 0.3)
    samples = gaussian_samples(x, 100_000) if numerator == "random" else x
    values = Samples(samples / gaussian_samples(y, 100_000))
    rule = setting(aten.div.Tensor).rule
    out = rule(x, y)
    error = (out.mean - values.mean).abs() - 5 * values.mean_error
    assert (error <= 3 * std**2 * values.mean.abs()).all()
    error = (out.variance - values.variance).abs() - 5 * values.variance_error
    assert (error <= 10 * std**2 * values.variance).all()
    part = linear_part(rule, x, y)
    pulled = zip(part.pull(torch.eye(20, dtype=torch.float64)), part.inputs, strict=True)
    explained = sum((c.square() * v.variance).sum(1) for c, v in pulled)
    torch.testing.assert_close(explained + part.noise, out.variance, rtol=5 * std**2, atol=0)


def test_quotient_is_finite_where_the_sign_is_in_doubt():
    for dtype in (torch.float32, torch.float64):
        y = Moments(torch.tensor([0.0, 1e-30, -1e-3, 1.0, 1e6], dtype=dtype), 1.0)
        out = setting(aten.div.Tensor).rule(torch.ones(5, dtype=dtype), y)
        assert out.mean.isfinite().all()
        assert out.variance.isfinite().all()
        assert (out.variance >= 0).all()
