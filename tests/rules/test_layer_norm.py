"""Against sampling, and the bounds that the module states."""

import pytest
import torch

from momentprop.moments import Moments
from momentprop.rules.registry import RULES
from properties import AnyRule, gaussian_samples
from rule_settings import C, Setting, X, setting

aten = torch.ops.aten

SETTINGS = [
    setting(aten.layer_norm.default, X(3, 8), [8]),
    setting(aten.layer_norm.default, X(2, 3, 8), [8], C(8), C(8), 1e-3),
    setting(aten.layer_norm.default, X(2, 3, 4), [3, 4], C(3, 4), C(3, 4)),
    setting(aten.rms_norm.default, X(2, 8), [8], None, 1e-6),
    setting(aten.rms_norm.default, X(2, 8), [8], C(8)),
    setting(aten.group_norm.default, X(2, 6, 4), 3, C(6), C(6)),
    setting(aten.group_norm.default, X(2, 4, 3, 2), 2),
    setting(aten.group_norm.default, X(3, 8), 2, C(8), C(8)),
    setting(aten.instance_norm.default, X(2, 3, 4, 3), C(3), C(3), None, None, True, 0.1, 1e-5, False),
    setting(aten.instance_norm.default, X(2, 3, 8), None, None, None, None, True, 0.1, 1e-5, False),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
class TestNorms(AnyRule):
    unexplained = 1e-9
    overexplained = 1e-9

    def test_linear_part_is_the_jacobian_where_variance_is_small(self, setting: Setting) -> None:
        args = setting.arguments()
        args = (Moments(args[0].mean, 1e-12), *args[1:])
        mean = args[0].mean.clone().requires_grad_()
        out = setting.op(mean, *args[1:], **setting.kwargs)
        rows = torch.randn(3, *out.shape, dtype=out.dtype)
        (pulled,) = setting.linear_part(args).pull(rows)
        for row, mine in zip(rows, pulled, strict=True):
            (expected,) = torch.autograd.grad(out, mean, row, retain_graph=True)
            torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("eps", [1e-5, 0.1, 3.0])
def test_small_variances_make_no_noise_of_second_order(op, eps):
    """However large eps is, which lets the length of the output vary."""
    x = Moments(torch.randn(3, 5, dtype=torch.float64), 1e-8)
    norm = getattr(aten, op).default
    given = ([5], None, None, eps) if op == "layer_norm" else ([5], None, eps)
    out = RULES.find(norm)(x, *given)
    jacobians = torch.func.vmap(torch.func.jacrev(lambda row: norm(row, *given)))(x.mean)
    torch.testing.assert_close(out.variance, (jacobians**2).sum(-1) * 1e-8, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("width", [8, 32, 128, 1024])
@pytest.mark.parametrize("noise", [0.01, 0.1, 0.3, 1.0, 3.0])
def test_closer_to_sampling_than_frozen_statistics(width, noise):
    """Mean within 0.02 std; std within 2 % (width 8: 3 %) at the median,
    and within 6 % (25 %) for 90 % of elements.
    """
    mean = torch.randn(4, width, dtype=torch.float64)
    x = Moments(mean, noise**2 * 2 * torch.rand(4, width, dtype=torch.float64))
    given = {aten.layer_norm.default: ([width],), aten.rms_norm.default: ([width], None, 1e-5)}
    n = 8000 if width < 1000 else 3000
    center = {op: op(mean, *given[op]) for op in given}
    total = {op: torch.zeros_like(mean) for op in given}
    square = {op: torch.zeros_like(mean) for op in given}
    for _ in range(n // 500):
        drawn = gaussian_samples(x.to(torch.float32), 500)
        for op in given:
            values = op(drawn, *given[op]) - center[op].float()
            total[op] += values.sum(0)
            square[op] += values.square().sum(0)
    for op in given:
        shift = total[op] / n
        std = (square[op] / n - shift**2).sqrt()
        out = setting(op).rule(x, *given[op])
        off = ((out.mean - center[op] - shift) / std).abs().mean()
        assert off < 0.02 + 0.8 / n**0.5, op
        if noise >= 0.3:
            assert off < 0.4 * (shift / std).abs().mean(), op
        ratio = out.std / std
        assert abs(ratio.median() - 1) < (0.03 if width == 8 else 0.02) + 0.1 / n**0.5, op
        allowed = (0.25 if width == 8 else 0.06) + 2 / n**0.5
        assert ratio.quantile(0.05) > 1 - allowed, op
        assert ratio.quantile(0.95) < 1 + allowed, op


def test_running_statistics_of_instance_norm_are_refused():
    refuses = setting(aten.instance_norm.default).rule.refuses
    assert "running statistics" in refuses({"use_input_stats": False}, frozenset({"input"}))
