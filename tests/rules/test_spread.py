import pytest
import torch

from properties import ApproximateRule
from rule_settings import X, setting

aten = torch.ops.aten

SETTINGS = [
    setting(aten.var.correction, X(3, 16), [1]),
    setting(aten.var.correction, X(3, 16), [-1], correction=0, keepdim=True),
    setting(aten.var.correction, X(2, 4, 8), [0, 2], correction=1),
    setting(aten.std.correction, X(3, 16), [1]),
    setting(aten.std.correction, X(16, 2), [0], correction=0, keepdim=True),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
class TestSpread(ApproximateRule):
    unexplained = 1e-9
    overexplained = 1e-9
    mean_bound = 0.05
    variance_bound = 0.2
