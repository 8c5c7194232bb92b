import pytest
import torch

from momentprop.moments import Moments
from properties import LinearRule
from rule_settings import X, setting

aten = torch.ops.aten

SETTINGS = [
    setting(aten.col2im.default, X(1, 8, 4), [3, 3], [2, 2], [1, 1], [0, 0], [1, 1]),
    setting(aten.sum.default, X(2, 3, 4)),
    setting(aten.sum.default, X()),
    setting(aten.sum.dim_IntList, X(2, 3, 4), [1]),
    setting(aten.sum.dim_IntList, X(2, 3, 4), [-1], True),
    setting(aten.sum.dim_IntList, X(2, 3, 4), [0, -1]),
    setting(aten.sum.dim_IntList, X(2, 3, 4), [-2, 0], True),
    setting(aten.sum.dim_IntList, X(2, 3), None),
    setting(aten.sum.dim_IntList, X(2, 3), []),
    setting(aten.sum.dim_IntList, X(2, 3), 1),
    setting(aten.mean.default, X(2, 3, 4)),
    setting(aten.mean.default, X()),
    setting(aten.mean.dim, X(2, 3, 4), [1]),
    setting(aten.mean.dim, X(2, 3, 4), [-1], True),
    setting(aten.mean.dim, X(2, 3, 4), [0, -1]),
    setting(aten.mean.dim, X(2, 3, 4), [-2, 0], True),
    setting(aten.mean.dim, X(2, 3), None),
    setting(aten.mean.dim, X(2, 3), []),
    setting(aten.mean.dim, X(2, 3), ()),
    setting(aten.mean.dim, X(2, 3), [], True),
    setting(aten.mean.dim, X(2, 3), 0),
    setting(aten.cumsum.default, X(2, 5), 1),
    setting(aten.cumsum.default, X(2, 5), -2),
    setting(aten.cumsum.default, X(5), 0),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
class TestReduction(LinearRule):
    pass


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.sum.default, ()),
        (aten.sum.dim_IntList, ([1],)),
        (aten.mean.default, ()),
        (aten.mean.dim, ([1],)),
        (aten.cumsum.default, (1,)),
    ],
    ids=str,
)
def test_dtype_is_that_of_both_moments(op, args):
    x = Moments(torch.ones(2, 3), 1.0)
    out = setting(op).rule(x, *args, dtype=torch.float64)
    assert out.mean.dtype == out.variance.dtype == torch.float64
    torch.testing.assert_close(out.mean, op(x.mean, *args, dtype=torch.float64))
