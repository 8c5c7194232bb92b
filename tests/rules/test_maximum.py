import pytest
import torch

from linear_part import linear_part
from momentprop.moments import Moments
from momentprop.rules.registry import RULES
from properties import ApproximateRule, SampledRule, gaussian_samples
from rule_settings import C, Setting, X, setting

aten = torch.ops.aten

OF_TWO = [
    setting(op, *args)
    for op in (
        aten.maximum.default,
        aten.minimum.default,
        aten.max.other,
        aten.min.other,
        aten.fmax.default,
        aten.fmin.default,
    )
    for args in ((X(2, 3), X(2, 3)), (X(2, 3), C(3)), (C(2, 3), X(3)), (X(2, 1), X(3)))
]
OVER_DIMENSIONS = [
    Setting(op, args)
    for op in (aten.amax.default, aten.amin.default)
    for args in ((X(3, 2), [1]), (X(3, 5), [-1], True), (X(2, 3, 2), [0, 2]), (X(4, 1), [1]), (X(7, 2), [0]))
]


@pytest.mark.parametrize("setting", OF_TWO, ids=str)
class TestMaximumOfTwo(SampledRule):
    pass


@pytest.mark.parametrize("setting", OVER_DIMENSIONS, ids=str)
class TestMaximumOverDimensions(ApproximateRule):
    unexplained = 1e-9
    overexplained = 0.05  # of correlated winners
    mean_bound = 0.05
    variance_bound = 0.15


@pytest.mark.parametrize("n", [2, 3, 5, 8, 13, 64])
def test_chances_add_up_to_one(n):
    x = Moments(torch.randn(4, n, dtype=torch.float64), torch.rand(4, n, dtype=torch.float64))
    rule = RULES.find(aten.amax.default)
    (chances,) = linear_part(rule, x, [1]).pull(torch.ones(1, 4, dtype=torch.float64))
    torch.testing.assert_close(chances.sum(-1), torch.ones(1, 4, dtype=torch.float64))
    wins = torch.nn.functional.one_hot(gaussian_samples(x, 20_000).argmax(-1), n).double().mean(0)
    assert (chances[0] - wins).abs().max() < 0.1


INDICES = [
    setting(aten.argmax.default, X(2, 3), 1),
    setting(aten.argmin.default, X(2, 3), 1),
    setting(aten.max.dim, X(2, 3), 1),
    setting(aten.min.dim, X(2, 3), 1),
    setting(aten.max_pool1d_with_indices.default, X(1, 1, 4), 2),
    setting(aten.max_pool2d_with_indices.default, X(1, 1, 4, 4), 2),
    setting(aten.max_pool3d_with_indices.default, X(1, 1, 2, 2, 2), 2),
    setting(aten.adaptive_max_pool1d.default, X(1, 1, 4), 2),
    setting(aten.adaptive_max_pool2d.default, X(1, 1, 4, 4), 2),
    setting(aten.adaptive_max_pool3d.default, X(1, 1, 2, 2, 2), 1),
]


@pytest.mark.parametrize("setting", INDICES, ids=str)
def test_which_element_wins_is_taken_at_the_mean(setting):
    args = setting.arguments()
    for mine, plain in zip(setting.propagate(args), setting.apply(args), strict=True):
        assert torch.equal(mine, plain)
