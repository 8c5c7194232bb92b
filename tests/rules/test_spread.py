import pytest
import torch
from properties import AnyRule, Samples, Setting, X, setting

aten = torch.ops.aten

SETTINGS = [
    setting(aten.var.correction, X(3, 16), [1]),
    setting(aten.var.correction, X(3, 16), [-1], correction=0, keepdim=True),
    setting(aten.var.correction, X(2, 4, 8), [0, 2], correction=1),
    setting(aten.std.correction, X(3, 16), [1]),
    setting(aten.std.correction, X(16, 2), [0], correction=0, keepdim=True),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
class TestSpread(AnyRule):
    unexplained = 1e-9
    overexplained = 1e-9

    def test_agrees_with_sampling(self, setting: Setting) -> None:
        """Mean within 5 % of the standard deviation, standard deviation within 10 %."""
        args = setting.arguments()
        (values,) = self.sample(setting, args)
        out, sampled = setting.propagate(args)[0], Samples(values)
        error = (out.mean - sampled.mean).abs() - 5 * sampled.mean_error
        assert (error <= 0.05 * sampled.variance.sqrt()).all()
        error = (out.variance - sampled.variance).abs() - 5 * sampled.variance_error
        assert (error <= 0.2 * sampled.variance).all()
