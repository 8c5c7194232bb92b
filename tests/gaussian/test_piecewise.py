import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from momentprop.gaussian.piecewise import piecewise_linear

Z = torch.linspace(-10, 10, 400_001, dtype=torch.float64)
WEIGHT = torch.exp(-Z * Z / 2) / math.sqrt(2 * math.pi)


def evaluated(x, knots, lines):
    value = lines[0][0] + lines[0][1] * x
    for knot, (intercept, slope) in zip(knots, lines[1:], strict=True):
        value = torch.where(x >= knot, intercept + slope * x, value)
    return value


def joined(knots, slopes, jumps, start):
    """The lines of these slopes that jump by so much at the knots."""
    lines = [(start, slopes[0])]
    for knot, jump, slope in zip(knots, jumps, slopes[1:], strict=True):
        intercept, before = lines[-1]
        lines.append((intercept + (before - slope) * knot + jump, slope))
    return lines


numbers = st.floats(-3, 3)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 4), numbers, st.floats(-3, 1.5), st.booleans())
def test_any_function_agrees_with_integration(data, n, mean, log_std, jumping):
    knots = sorted(data.draw(st.lists(numbers, min_size=n, max_size=n)))
    slopes = data.draw(st.lists(numbers, min_size=n + 1, max_size=n + 1))
    jumps = data.draw(st.lists(numbers, min_size=n, max_size=n)) if jumping else [0.0] * n
    lines, std = joined(knots, slopes, jumps, 0.5), 10**log_std
    m = torch.tensor([mean], dtype=torch.float64)
    out, variance, gain = piecewise_linear(m, torch.full_like(m, std**2), knots, lines, jumps)
    plain = piecewise_linear(m, torch.full_like(m, std**2), knots, lines)
    values = evaluated(m + std * Z, knots, lines)
    exact = torch.trapezoid(values * WEIGHT, Z)
    square = torch.trapezoid((values - exact) ** 2 * WEIGHT, Z)
    slope = torch.trapezoid((values - exact) * Z * WEIGHT, Z) / std
    size = 3 * std + max(map(abs, jumps))  # of what the trapezoidal rule gets wrong by a step
    assert abs(out - exact) < 1e-3 * size
    assert abs(variance - square) < 1e-3 * size**2
    assert abs(gain - slope) < 1e-3 * size / std
    if not jumping:
        for a, b in zip((out, variance, gain), plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_bounds_far_away_do_not_show():
    """clamp with the limits of the type, as transformers use it."""
    x = torch.linspace(-5, 5, 11)
    limit = torch.finfo(x.dtype).max
    lines = [(-limit, 0.0), (0.0, 1.0), (limit, 0.0)]
    mean, variance, gain = piecewise_linear(x, torch.full_like(x, 0.3), [-limit, limit], lines)
    assert torch.equal(mean, x)
    torch.testing.assert_close(variance, torch.full_like(x, 0.3))
    assert torch.equal(gain, torch.ones_like(x))


@pytest.mark.parametrize("width", [1.0, 1e-3])
def test_narrow_functions_become_steps(width):
    """A ramp that std makes look like a step: V -> height^2 P (1 - P)."""
    x = torch.tensor([-1.0, 0.0, 0.5], dtype=torch.float64)
    lines = [(0.0, 0.0), (0.5, 1 / width), (1.0, 0.0)]
    out, variance, _ = piecewise_linear(x, torch.full_like(x, 1e4), [-width / 2, width / 2], lines)
    p = torch.special.ndtr(x / 100)
    torch.testing.assert_close(out, p, rtol=1e-4, atol=0)
    rounding = 100 * torch.finfo(x.dtype).eps * (100 / width) ** 2
    torch.testing.assert_close(variance, p * (1 - p), rtol=2e-2 * width + rounding, atol=0)
