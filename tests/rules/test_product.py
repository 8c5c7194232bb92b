import pytest
import torch

from linear_part import linear_part
from momentprop.moments import Moments
from momentprop.rules.registry import RULES
from properties import LinearRule, SampledRule, Samples, gaussian_samples
from rule_settings import C, X, setting

aten = torch.ops.aten

WITH_A_CONSTANT = [
    setting(aten.mul.Tensor, X(2, 3), C(2, 3)),
    setting(aten.mul.Tensor, C(2, 3), X(2, 3)),
    setting(aten.mul.Tensor, X(2, 3), C(3)),
    setting(aten.mul.Tensor, C(2, 3), X(3)),
    setting(aten.mul.Tensor, X(2, 1), C(2, 3)),
    setting(aten.mul.Tensor, X(2, 3), -2.0),
    setting(aten.mul.Scalar, X(2, 3), -2.0),
    setting(aten.matmul.default, X(2, 3), C(3, 4)),
    setting(aten.matmul.default, C(2, 3), X(3, 4)),
    setting(aten.matmul.default, X(3), C(3)),
    setting(aten.matmul.default, X(2, 3), C(3)),
    setting(aten.matmul.default, C(3), X(3, 2)),
    setting(aten.matmul.default, X(2, 2, 3), C(3, 2)),
    setting(aten.matmul.default, C(2, 1, 2, 3), X(3, 3, 2)),
    setting(aten.mm.default, X(2, 3), C(3, 4)),
    setting(aten.mm.default, C(2, 3), X(3, 4)),
    setting(aten.bmm.default, X(2, 2, 3), C(2, 3, 4)),
    setting(aten.bmm.default, C(2, 2, 3), X(2, 3, 4)),
    setting(aten.mv.default, X(2, 3), C(3)),
    setting(aten.mv.default, C(2, 3), X(3)),
    setting(aten.dot.default, X(3), C(3)),
    setting(aten.dot.default, C(3), X(3)),
    # the bias constant, the bias alone random, and bias and a factor random
    setting(aten.addmm.default, C(4), X(2, 3), C(3, 4)),
    setting(aten.addmm.default, C(2, 4), C(2, 3), X(3, 4), beta=0.5, alpha=-2),
    setting(aten.addmm.default, X(4), C(2, 3), C(3, 4), beta=3),
    setting(aten.addmm.default, X(2, 4), X(2, 3), C(3, 4), beta=-2, alpha=0.5),
    setting(aten.baddbmm.default, C(2, 2, 4), X(2, 2, 3), C(2, 3, 4)),
    setting(aten.baddbmm.default, X(2, 1, 4), C(2, 2, 3), X(2, 3, 4), beta=-2, alpha=0.5),
]
OF_TWO = [
    setting(aten.mul.Tensor, X(2, 3), X(2, 3)),
    setting(aten.mul.Tensor, X(2, 3), X(3)),
    setting(aten.mul.Tensor, X(2, 1), X(2, 3)),
    setting(aten.matmul.default, X(2, 3), X(3, 4)),
    setting(aten.matmul.default, X(2, 2, 3), X(3)),
    setting(aten.matmul.default, X(3), X(2, 3, 2)),
    setting(aten.mm.default, X(2, 3), X(3, 4)),
    setting(aten.bmm.default, X(2, 2, 3), X(2, 3, 4)),
    setting(aten.mv.default, X(2, 3), X(3)),
    setting(aten.dot.default, X(3), X(3)),
    setting(aten.addmm.default, X(4), X(2, 3), X(3, 4), beta=3, alpha=0.5),
    setting(aten.baddbmm.default, C(2, 1, 4), X(2, 2, 3), X(2, 3, 4), alpha=-2),
]


@pytest.mark.parametrize("setting", WITH_A_CONSTANT, ids=str)
class TestProductWithAConstant(LinearRule):
    pass


@pytest.mark.parametrize("setting", OF_TWO, ids=str)
class TestProductOfTwo(SampledRule):
    pass


def test_a_tensor_times_itself():
    """The factors are one: E^2 + V, and 2 V^2 + 4 E^2 V."""
    x = Moments(torch.randn(5, dtype=torch.float64), torch.rand(5, dtype=torch.float64))
    rule = RULES.find(aten.mul.Tensor)
    out = rule(x, x)
    Samples(gaussian_samples(x, 200_000).square()).assert_agrees(out)
    part = linear_part(rule, x, x)
    gain = sum(part.pull(torch.ones(1, 5, dtype=torch.float64)))[0]
    torch.testing.assert_close(gain, 2 * x.mean)
    torch.testing.assert_close(gain**2 * x.variance + part.noise, out.variance)
