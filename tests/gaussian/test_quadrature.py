import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from momentprop.gaussian.quadrature import NODES, expectation, gauss_hermite

DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("n", [3, 5, 9, 13, 21])
def test_nodes_integrate_polynomials(n):
    """E[Z^k] for even k up to 2 n - 2; odd ones vanish by symmetry."""
    nodes = gauss_hermite(n)
    assert len(nodes) == n // 2
    center = 1 - 2 * sum(weight for _, weight in nodes)
    assert center > 0
    for k in range(2, 2 * n, 2):
        exact = math.prod(range(1, k, 2))
        assert math.isclose(2 * sum(weight * z**k for z, weight in nodes), exact, rel_tol=1e-11)


@pytest.mark.parametrize("n", [-1, 1, 4])
def test_number_of_nodes(n):
    with pytest.raises(ValueError, match="odd"):
        gauss_hermite(n)


def test_polynomials_are_exact():
    """x^3: E = m^3 + 3 m v, E[f'] = 3 m^2 + 3 v, and V = 9 m^4 v + 36 m^2 v^2 + 15 v^3."""
    m = torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None]
    v = torch.tensor([1e-14, 1e-6, 0.1, 1.0, 4.0], dtype=torch.float64).expand(9, 5)
    mean, variance, gain = expectation(lambda x: x**3, m.expand(9, 5), v)
    torch.testing.assert_close(mean, m**3 + 3 * m * v, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gain, 3 * m**2 + 3 * v, rtol=1e-9, atol=1e-9)
    exact = 9 * m**4 * v + 36 * m**2 * v**2 + 15 * v**3
    assert ((variance - exact).abs() <= 1e-9 * exact + 1e-9 * v).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("f", [torch.sin, torch.tanh, torch.exp, torch.square], ids=lambda f: f.__name__)
def test_small_variance(f, dtype):
    """V = 0 gives f itself; and up to rounding the gain is f', and the variance f'^2 V."""
    x = torch.linspace(-3, 3, 25, dtype=dtype)
    slope = torch.func.vmap(torch.func.grad(f))(x.double())
    mean, variance, gain = expectation(f, x, torch.zeros_like(x))
    assert torch.equal(mean, f(x))
    assert torch.equal(variance, torch.zeros_like(x))
    tolerance = 200 * torch.finfo(dtype).eps ** (2 / 3)
    assert ((gain - slope).abs() < tolerance).all()
    for v in (1e-30, 1e-20, 1e-12):
        mean, variance, _ = expectation(f, x, torch.full_like(x, v))
        assert ((variance / v - slope.square()).abs() < 10 * tolerance).all()
        torch.testing.assert_close(mean, f(x), rtol=1e-6, atol=2 * v)


@given(
    m=st.floats(-50, 50),
    v=st.one_of(st.just(0.0), st.floats(-20, 8).map(lambda x: 10**x)),
    slope=st.floats(-3, 3),
)
def test_the_gain_never_explains_more_than_the_variance(m, v, slope):
    for dtype in DTYPES:
        mean, variance = torch.tensor([m], dtype=dtype), torch.tensor([v], dtype=dtype)
        _, out, gain = expectation(lambda x: torch.tanh(x) + slope * x, mean, variance)
        explained = gain.square() * variance
        assert out >= 0
        assert explained <= out + 1e-4 * (out + variance)
        assert out.isfinite()


def test_derivatives_by_mean_and_variance():
    m = torch.linspace(-2, 2, 7, dtype=torch.float64, requires_grad=True)
    v = torch.linspace(0.1, 2, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda m, v: expectation(torch.sin, m, v), (m, v))
    mean, _, gain = expectation(torch.sin, m, v)
    (by_mean, by_variance) = torch.autograd.grad(mean.sum(), (m, v))
    torch.testing.assert_close(by_mean, gain, rtol=1e-6, atol=1e-6)
    # heat equation: dE/dV = E[f''] / 2
    torch.testing.assert_close(by_variance, -mean / 2, rtol=1e-6, atol=1e-6)


def test_more_nodes_are_more_accurate():
    m, v = torch.zeros(1, dtype=torch.float64), torch.full((1,), 4.0, dtype=torch.float64)
    reference = expectation(torch.tanh, m, v, gauss_hermite(101))[1]
    errors = [(expectation(torch.tanh, m, v, gauss_hermite(n))[1] - reference).abs() for n in (5, 13, 31)]
    assert errors[0] > 3 * errors[1] > 9 * errors[2]
    assert len(NODES) == 6
