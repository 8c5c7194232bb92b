import pytest
import torch
from properties import C, LinearRule, X, reason_of, setting

aten = torch.ops.aten

SETTINGS = [
    setting(aten.linear.default, X(5, 4), C(3, 4), C(3)),
    setting(aten.linear.default, X(5, 4), C(3, 4)),
    setting(aten.linear.default, X(5, 4), C(3, 4), None),
    setting(aten.linear.default, X(4), C(3, 4), C(3)),
    setting(aten.linear.default, X(2, 3, 4), C(1, 4), C(1)),
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

PRODUCTS = [aten.matmul.default, aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
class TestLinear(LinearRule):
    pass


def test_random_weight_is_refused():
    layer = setting(aten.linear.default, X(5, 4), C(3, 4), C(3))
    assert "weight is random" in reason_of(layer, "weight")
    assert "bias, weight is random" in reason_of(layer, "input", "weight", "bias")


@pytest.mark.parametrize("op", PRODUCTS, ids=str)
def test_product_of_two_random_tensors_is_refused(op):
    names = [a.name for a in op._schema.arguments]
    assert "product of two random tensors" in reason_of(setting(op, X(2), C(2)), *names)


@pytest.mark.parametrize(
    ("op", "factors"),
    [(aten.addmm.default, ("mat1", "mat2")), (aten.baddbmm.default, ("batch1", "batch2"))],
    ids=str,
)
def test_affine_product_of_two_random_tensors_is_refused(op, factors):
    product = setting(op, C(4), X(2, 3), C(3, 4))
    assert "product of two random tensors" in reason_of(product, *factors)
    assert reason_of(product, "self", factors[0]) is None
