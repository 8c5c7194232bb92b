import pytest
import torch

from properties import LinearRule
from rule_settings import C, X, reason_of, setting

aten = torch.ops.aten

SETTINGS = [
    setting(aten.linear.default, X(5, 4), C(3, 4), C(3)),
    setting(aten.linear.default, X(5, 4), C(3, 4)),
    setting(aten.linear.default, X(5, 4), C(3, 4), None),
    setting(aten.linear.default, X(4), C(3, 4), C(3)),
    setting(aten.linear.default, X(2, 3, 4), C(1, 4), C(1)),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
class TestLinear(LinearRule):
    pass


def test_random_weight_is_refused():
    layer = setting(aten.linear.default, X(5, 4), C(3, 4), C(3))
    assert "weight is random" in reason_of(layer, "weight")
    assert "bias, weight is random" in reason_of(layer, "input", "weight", "bias")
