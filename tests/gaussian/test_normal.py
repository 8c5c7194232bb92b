"""The functions of the normal distribution against 60-digit arithmetic."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp, mpf

from momentprop.gaussian import normal as gaussian
from momentprop.gaussian.normal import (
    alike_max_moments,
    log_normal_cdf,
    max_moments,
    max_response,
    positive_probability,
    relu_moments,
    safe_sqrt,
)


def first_is_larger(*arguments: torch.Tensor | None) -> torch.Tensor:
    return max_response(*arguments)[2]


mp.dps = 60  # the formulas below cancel up to 2 * 12 digits at E / std = 1e6

# (type, relative tolerance, smallest true value that is checked)
PRECISIONS = pytest.mark.parametrize(
    ("dtype", "tolerance", "smallest"),
    [(torch.float32, 1e-4, 1e-30), (torch.float64, 1e-11, 1e-290)],
    ids=["float32", "float64"],
)

TAIL = (0.0, 1e-8, 1e-3, 0.3, 1.0, 2.0, 3.0, 4.0, 5.0, 6.5, 8.0, 10.0, 12.0, 14.0, 20.0, 30.0, 40.0)
DISTANCES = [*(-a for a in TAIL), *TAIL, 59.0, 61.0, 1e2, 1e3, 1e4, 1e5, 1e6]
VARIANCES = [1e-30, 1e-20, 1e-12, 1e-6, 1e-3, 1.0, 7.0, 1e3, 1e6, 1e12]


def true_relu(mean: float, variance: float) -> tuple[mpf, mpf]:
    e, v = mpf(mean), mpf(variance)
    if v == 0:
        return max(e, mpf(0)), mpf(0)
    std = mp.sqrt(v)
    cdf, pdf = mp.ncdf(e / std), mp.npdf(e / std)
    first = e * cdf + std * pdf
    return first, (e * e + v) * cdf + e * std * pdf - first * first


def true_max(e1: float, v1: float, e2: float, v2: float, covariance: float = 0.0) -> tuple[mpf, mpf]:
    e1, v1, e2, v2, covariance = map(mpf, (e1, v1, e2, v2, covariance))
    if v1 + v2 == 2 * covariance:  # they differ by a constant
        return max(e1, e2), v1 if e1 >= e2 else v2
    theta = mp.sqrt(v1 + v2 - 2 * covariance)
    a = (e1 - e2) / theta
    cdf, other, pdf = mp.ncdf(a), mp.ncdf(-a), mp.npdf(a)
    # relative to the higher mean: else a variance in the tail would need hundreds of digits
    shift = max(e1, e2)
    e1, e2 = e1 - shift, e2 - shift
    first = e1 * cdf + e2 * other + theta * pdf
    second = (v1 + e1 * e1) * cdf + (v2 + e2 * e2) * other + (e1 + e2) * theta * pdf
    return shift + first, second - first * first


def relative_error(value: torch.Tensor, true: mpf, scale: mpf) -> float:
    return float(abs(mpf(value.item()) - true) / scale)


def check_relu(mean, variance, tolerance, smallest) -> None:
    """At every pair of elements; values below `smallest` only have to be finite and not negative."""
    out_mean, out_variance = relu_moments(mean, variance)
    assert out_mean.isfinite().all()
    assert out_variance.isfinite().all()
    assert (out_variance >= 0).all()
    for e, v, *out in zip(mean, variance, out_mean, out_variance, strict=True):
        for value, true in zip(out, true_relu(e.item(), v.item()), strict=True):
            if true > smallest:
                error = relative_error(value, true, true)
                assert error <= tolerance, f"{error:.1e} at E = {e:.9g}, V = {v:.9g}"


def max_scale(e1: float, e2: float, true: mpf) -> mpf:
    """What the error of a maximum's mean is relative to.

    The mean is the higher of the two plus something positive. Where the higher one is negative the sum
    can cross zero: terms of opposite sign cancel, and no digits of the result are left. There the error
    is relative to the inputs, at a level that makes the tolerance 2.5 units of float32's rounding.
    """
    if max(e1, e2) >= 0:
        return abs(true)
    return max(abs(true), mpf("3e-3") * (abs(mpf(e1)) + abs(mpf(e2))))


def check_max(inputs, tolerance, smallest) -> None:
    """At every set of elements: means, variances and, where it is given, the covariance.

    The floor under theta (`safe_sqrt`) counts: the mean may be off by it, and a variance is not checked
    where theta is below it.
    """
    out_mean, out_variance = max_moments(*inputs)
    floor = safe_sqrt(torch.zeros_like(out_mean[0])).item()
    assert out_mean.isfinite().all()
    assert out_variance.isfinite().all()
    assert (out_variance >= 0).all()
    for *given_, mean, variance in zip(*inputs, out_mean, out_variance, strict=True):
        numbers = [t.item() for t in given_]
        first, second = true_max(*numbers)
        if abs(first) > smallest:
            scale = max_scale(numbers[0], numbers[2], first)
            error = relative_error(mean, first, scale)
            assert error <= tolerance + floor / scale, f"mean: {error:.1e} at {numbers}"
        theta_squared = numbers[1] + numbers[3] - 2 * sum(numbers[4:])
        if second > smallest and theta_squared >= floor**2:
            error = relative_error(variance, second, second)
            assert error <= tolerance, f"variance: {error:.1e} at {numbers}"


@PRECISIONS
def test_relu_on_a_grid(dtype, tolerance, smallest):
    a, v = torch.cartesian_prod(
        torch.tensor(DISTANCES, dtype=torch.float64), torch.tensor(VARIANCES, dtype=torch.float64)
    ).T
    check_relu((a * v.sqrt()).to(dtype), v.to(dtype), tolerance, smallest)


@PRECISIONS
def test_relu_without_variance(dtype, tolerance, smallest):
    magnitudes = torch.logspace(-6, 12, 19, dtype=dtype)
    mean = torch.cat([-magnitudes, torch.zeros(1, dtype=dtype), magnitudes])
    check_relu(mean, torch.zeros_like(mean), tolerance, smallest)
    out, _ = relu_moments(mean, torch.zeros_like(mean))
    floor = safe_sqrt(torch.zeros(1, dtype=dtype))
    assert ((out - mean.relu()).abs() <= floor).all()


@PRECISIONS
@settings(max_examples=300)
@given(a=st.floats(-40, 60), log_variance=st.floats(-30, 12))
def test_relu_anywhere(dtype, tolerance, smallest, a, log_variance):
    variance = torch.tensor([10.0**log_variance], dtype=torch.float64)
    check_relu((a * variance.sqrt()).to(dtype), variance.to(dtype), tolerance, smallest)


@cache
def pairs() -> torch.Tensor:
    """Means and variances of two variables: as distance of the means, ratio of variances and offset."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for a in DISTANCES:
        for ratio in (0.0, 1e-12, 1e-3, 1.0, 1e6):
            for offset in (0.0, 1.0, -1.0, 1e3):
                log_variance = torch.rand((), generator=generator, dtype=torch.float64) * 42 - 30
                v1 = 10**log_variance
                v2 = v1 * ratio
                theta = (v1 + v2).sqrt()
                e2 = offset * theta
                rows.append(torch.stack([e2 + a * theta, v1, e2, v2]))
    return torch.stack(rows)


@PRECISIONS
@pytest.mark.parametrize("swapped", [False, True])
def test_max_on_a_grid(dtype, tolerance, smallest, swapped):
    e1, v1, e2, v2 = pairs().to(dtype).T
    check_max((e2, v2, e1, v1) if swapped else (e1, v1, e2, v2), tolerance, smallest)


@PRECISIONS
def test_max_whose_mean_crosses_zero(dtype, tolerance, smallest):
    a, v1, v2, digits = torch.rand(4, 400, dtype=torch.float64)
    theta, zero = (v1 + v2).sqrt(), torch.zeros_like(a)
    rise, _ = max_moments(zero, v1, -6 * a * theta, v2)
    e1 = -rise * (1 + torch.randn_like(a) * 10 ** (-8 * digits))
    check_max([x.to(dtype) for x in (e1, v1, e1 - 6 * a * theta, v2)], tolerance, smallest)


@PRECISIONS
def test_max_without_variance(dtype, tolerance, smallest):
    values = torch.tensor([-1e6, -1.0, -1e-6, 0.0, 1e-6, 1.0, 1e6], dtype=dtype)
    e1, e2 = torch.cartesian_prod(values, values).T
    zero = torch.zeros_like(e1)
    check_max((e1, zero, e2, zero), tolerance, smallest)
    out, variance = max_moments(e1, zero, e2, zero)
    assert ((out - torch.maximum(e1, e2)).abs() <= safe_sqrt(zero)).all()
    assert not variance.any()


means = st.floats(-1e6, 1e6, width=32)
variances = st.one_of(st.just(0.0), st.floats(-30, 12).map(lambda x: 10.0**x))


@PRECISIONS
@settings(max_examples=300)
@given(e1=means, v1=variances, e2=means, v2=variances)
def test_max_anywhere(dtype, tolerance, smallest, e1, v1, e2, v2):
    inputs = [torch.tensor([x], dtype=dtype) for x in (e1, v1, e2, v2)]
    check_max(inputs, tolerance, smallest)


@PRECISIONS
def test_max_of_small_means_without_variance(dtype, tolerance, smallest):
    """Below the floor under the standard deviation the mean is off by less than that floor."""
    values = torch.tensor([0.0, *[s * 10.0**-k for k in (10, 16, 20, 25) for s in (-1, 1)]], dtype=dtype)
    e1, e2 = torch.cartesian_prod(values, values).T
    zero = torch.zeros_like(e1)
    check_max((e1, zero, e2, zero), tolerance, smallest)


def correlated(e1, v1, e2, v2, correlation):
    """The arguments of the maximum of two variables with this correlation."""
    return e1, v1, e2, v2, correlation * v1.sqrt() * v2.sqrt()


@PRECISIONS
@pytest.mark.parametrize("correlation", [-1.0, -0.9, -0.3, 0.0, 0.5, 0.99])
def test_max_of_correlated_variables_on_a_grid(dtype, tolerance, smallest, correlation):
    e1, v1, e2, v2 = pairs().T
    check_max([x.to(dtype) for x in correlated(e1, v1, e2, v2, correlation)], tolerance, smallest)


@PRECISIONS
@settings(max_examples=200)
@given(
    distance=st.floats(-40, 40),
    log_variance=st.floats(-20, 10),
    log_ratio=st.floats(-6, 6),
    offset=st.floats(-10, 10),
    correlation=st.floats(-1, 0.99),
)
def test_max_of_correlated_variables_anywhere(
    dtype, tolerance, smallest, distance, log_variance, log_ratio, offset, correlation
):
    v1 = torch.tensor([10.0**log_variance], dtype=torch.float64)
    v2 = v1 * 10.0**log_ratio
    e2 = offset * (v1 + v2).sqrt()
    inputs = correlated(e2 + distance * (v1 + v2).sqrt(), v1, e2, v2, correlation)
    check_max([x.to(dtype) for x in inputs], tolerance, smallest)


@PRECISIONS
@settings(max_examples=200)
@given(
    distance=st.floats(-40, 40),
    log_variance=st.floats(-20, 10),
    offset=st.floats(-10, 10),
    correlation=st.floats(-1, 0.99),
)
def test_max_of_two_with_the_same_variance(
    dtype, tolerance, smallest, distance, log_variance, offset, correlation
):
    """Mean and variance by Clark's formulas, and never less than a third of the variance."""
    std = 10.0 ** (log_variance / 2)
    numbers = [(offset + distance) * std, offset * std, std * std, 2 * (1 - correlation)]
    e1, e2, v, contrast = (torch.tensor([x], dtype=dtype) for x in numbers)
    mean, variance = alike_max_moments(e1, e2, v, contrast)
    first, second = (t.item() for t in (e1, e2))
    covariance = v.item() * (1 - contrast.item() / 2)
    true_mean, true_variance = true_max(first, v.item(), second, v.item(), covariance)
    if abs(true_mean) > smallest:
        assert relative_error(mean, true_mean, max_scale(first, second, true_mean)) <= 2 * tolerance
    assert relative_error(variance, true_variance, true_variance) <= 2 * tolerance
    assert variance >= 0.36 * v


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_max_of_two_with_the_same_variance_at_extremes(dtype):
    """No variance, no contrast, and means far apart: the higher of the two."""
    e1, e2 = torch.tensor([1e30, -1e30, 3.0, -2.0, 0.0], dtype=dtype), torch.zeros(5, dtype=dtype)
    for v, contrast in ((0.0, 1.0), (1e-30, 2.0), (1.0, 0.0), (1e-30, 0.0)):
        mean, variance = alike_max_moments(e1, e2, torch.full_like(e1, v), torch.full_like(e1, contrast))
        torch.testing.assert_close(mean, torch.maximum(e1, e2), rtol=0, atol=1e-14)
        assert (variance >= 0.66 * v).all()
        assert (variance <= v).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_max_of_two_that_differ_by_a_constant(dtype):
    """Correlation one and equal variances: the higher of the two, whatever rounding leaves of theta."""
    e1, v = torch.randn(50, dtype=dtype), torch.rand(50, dtype=dtype)
    for e2 in (e1 - 1, e1 + 1, e1):
        mean, variance = max_moments(e1, v, e2, v, v)
        torch.testing.assert_close(mean, torch.maximum(e1, e2))
        torch.testing.assert_close(variance, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_covariance_of_zero_is_no_covariance(dtype):
    inputs = pairs().to(dtype).T
    rounding = 64 * torch.finfo(dtype).eps
    for function in (max_moments, first_is_larger):
        without = torch.stack(function(*inputs)) if function is max_moments else function(*inputs)
        given_zero = function(*inputs, torch.zeros_like(inputs[0]))
        given_zero = torch.stack(given_zero) if function is max_moments else given_zero
        torch.testing.assert_close(given_zero, without, rtol=rounding, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_an_impossible_covariance_does_no_harm(dtype):
    """Rounding may leave a covariance above what the variances allow: all stays finite, nothing negative."""
    e, v1, v2 = torch.randn(50, dtype=dtype), torch.rand(50, dtype=dtype), torch.rand(50, dtype=dtype)
    for factor in (1.001, 2.0, -1.001, -2.0):
        covariance = factor * (v1 * v2).sqrt()
        mean, variance = max_moments(e, v1, -e, v2, covariance)
        probability = first_is_larger(e, v1, -e, v2, covariance)
        assert mean.isfinite().all()
        assert variance.isfinite().all()
        assert (variance >= 0).all()
        assert ((probability >= 0) & (probability <= 1)).all()


@PRECISIONS
def test_positive_probability_on_a_grid(dtype, tolerance, smallest):
    a, v = torch.cartesian_prod(
        torch.tensor(DISTANCES, dtype=torch.float64), torch.tensor(VARIANCES, dtype=torch.float64)
    ).T
    check_probability((a * v.sqrt()).to(dtype), v.to(dtype), tolerance, smallest)


@PRECISIONS
@settings(max_examples=300)
@given(a=st.floats(-40, 60), log_variance=st.floats(-30, 12))
def test_positive_probability_anywhere(dtype, tolerance, smallest, a, log_variance):
    variance = torch.tensor([10.0**log_variance], dtype=torch.float64)
    check_probability((a * variance.sqrt()).to(dtype), variance.to(dtype), tolerance, smallest)


def check_probability(mean, variance, tolerance, smallest) -> None:
    """Relative to the true value, however small; values below `smallest` only have to be in [0, 1]."""
    out = positive_probability(mean, variance)
    assert ((out >= 0) & (out <= 1)).all()
    for e, v, value in zip(mean, variance, out, strict=True):
        true = mp.ncdf(mpf(e.item()) / mp.sqrt(mpf(v.item())))
        if true > smallest:
            error = relative_error(value, true, true)
            assert error <= tolerance, f"{error:.1e} at E = {e:.9g}, V = {v:.9g}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_positive_probability_without_variance(dtype):
    """The derivative of relu, with one half at zero, where it has a kink."""
    mean = torch.tensor([-1e6, -1.0, -1e-6, 0.0, 1e-6, 1.0, 1e6], dtype=dtype)
    out = positive_probability(mean, torch.zeros_like(mean))
    torch.testing.assert_close(out, torch.tensor([0, 0, 0, 0.5, 1, 1, 1], dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("correlation", [-1.0, -0.5, 0.0, 0.9])
def test_first_is_larger(dtype, correlation):
    """P(X1 > X2) = Phi((E1 - E2) / theta), to the rounding of that argument; and 1 less it the other way."""
    a, log_v1, log_v2, offset = torch.randn(4, 200, dtype=torch.float64)
    v1, v2 = log_v1.exp(), (2 * log_v2).exp()
    inputs = correlated(offset + 3 * a * (v1 + v2).sqrt(), v1, offset, v2, correlation)
    e1, v1, e2, v2, covariance = (x.to(dtype) for x in inputs)
    out = first_is_larger(e1, v1, e2, v2, covariance)
    other = first_is_larger(e2, v2, e1, v1, covariance)
    torch.testing.assert_close(out + other, torch.ones_like(out))
    for *numbers, value in zip(e1, v1, e2, v2, covariance, out, strict=True):
        m1, w1, m2, w2, c = (mpf(x.item()) for x in numbers)
        true = mp.ncdf((m1 - m2) / mp.sqrt(w1 + w2 - 2 * c))
        assert abs(mpf(value.item()) - true) <= 64 * torch.finfo(dtype).eps


@pytest.mark.parametrize("correlation", [-0.9, 0.0, 0.5])
def test_first_is_larger_is_the_gain_of_the_maximum(correlation):
    """dE[max] / dE1 = P(X1 > X2): what the sweep back multiplies by."""
    e1, e2, v1, v2 = torch.randn(4, 100, dtype=torch.float64)
    e1, v1, e2, v2, covariance = correlated(e1.requires_grad_(), v1.exp(), e2, v2.exp(), correlation)
    mean, _ = max_moments(e1, v1, e2, v2, covariance)
    (gain,) = torch.autograd.grad(mean.sum(), e1)
    torch.testing.assert_close(gain, first_is_larger(e1, v1, e2, v2, covariance), rtol=1e-11, atol=1e-14)


def test_positive_probability_is_the_gain_of_relu():
    mean, variance = torch.randn(2, 100, dtype=torch.float64)
    mean, variance = mean.requires_grad_(), variance.exp()
    (gain,) = torch.autograd.grad(relu_moments(mean, variance)[0].sum(), mean)
    torch.testing.assert_close(gain, positive_probability(mean, variance), rtol=1e-11, atol=1e-14)


def test_max_with_a_certain_zero_is_relu():
    mean, variance = torch.randn(50, dtype=torch.float64), torch.rand(50, dtype=torch.float64)
    zero = torch.zeros_like(mean)
    for out, expected in zip(
        max_moments(mean, variance, zero, zero), relu_moments(mean, variance), strict=True
    ):
        torch.testing.assert_close(out, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_max_is_symmetric(dtype):
    e1, v1, e2, v2 = pairs().to(dtype).T
    for one, other in zip(max_moments(e1, v1, e2, v2), max_moments(e2, v2, e1, v1), strict=True):
        torch.testing.assert_close(one, other, rtol=64 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=["float32", "float64"]
)
def test_log_normal_cdf(dtype, tolerance):
    x = torch.cat(
        [
            -torch.logspace(-8, 3, 150, dtype=torch.float64),
            torch.zeros(1, dtype=torch.float64),
            torch.logspace(-8, 1, 60, dtype=torch.float64),
            torch.tensor([11.0, 13.0, 15.0, 20.0, 30.0, 37.0, 40.0], dtype=torch.float64),
        ]
    ).to(dtype)
    for argument, value in zip(x, log_normal_cdf(x), strict=True):
        # log ncdf(x) = log(1 - ncdf(-x)) keeps its digits where ncdf(x) is near one
        true = mp.log(mp.ncdf(argument.item())) if argument < 0 else mp.log1p(-mp.ncdf(-argument.item()))
        if abs(true) > 1e-30:
            error = relative_error(value, true, abs(true))
            assert error <= tolerance, f"{error:.1e} at {argument:.9g}"
        else:
            assert -1e-30 <= value <= 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_log_normal_cdf_is_finite_far_out(dtype):
    x = torch.tensor([-1e30, -1e18, -1e10, 1e10, 1e30], dtype=dtype, requires_grad=True)
    out = log_normal_cdf(x)
    assert out.isfinite().all()
    assert (out <= 0).all()
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("x", [-30.0, -3.0, -1e-9, 0.0, 1e-9, 3.0])
def test_log_normal_cdf_gradient(x):
    t = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(log_normal_cdf(t), t)
    true = mp.npdf(x) / mp.ncdf(x)
    assert relative_error(gradient, true, true) <= 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gradients_are_finite_everywhere(dtype):
    a, v = torch.cartesian_prod(
        torch.tensor([-1e6, -40.0, -1.0, 0.0, 1.0, 40.0, 1e6], dtype=dtype),
        torch.tensor([0.0, *VARIANCES], dtype=dtype),
    ).T
    inputs = [t.clone().requires_grad_() for t in (a, v, a.flip(0), v.flip(0))]
    smaller = torch.minimum(inputs[1], inputs[3]).detach()  # |C| <= sqrt(V1 V2) for |C| <= min(V1, V2)
    for function, arguments in (
        (relu_moments, inputs[:2]),
        (positive_probability, inputs[:2]),
        (max_moments, inputs),
        (first_is_larger, inputs),
        *((max_moments, [*inputs, (r * smaller).requires_grad_()]) for r in (-1.0, 0.5, 1.0)),
        *((first_is_larger, [*inputs, (r * smaller).requires_grad_()]) for r in (-1.0, 0.5, 1.0)),
    ):
        out = function(*arguments)
        loss = sum(o.sum() for o in out) if isinstance(out, tuple) else out.sum()
        for gradient in torch.autograd.grad(loss, arguments):
            assert gradient.isfinite().all()


def test_quotients_of_float32_are_as_close_as_stated():
    a = torch.cat([torch.linspace(0, 5, 101), torch.linspace(5, 15, 101)]).double()
    bottom = gaussian._polynomial(gaussian._DENOMINATOR, a)
    for coefficients, bound, function in (
        (gaussian._NUMERATOR_G, 1e-7, lambda a, mills: 1 - a * mills),
        (gaussian._NUMERATOR_H, 9e-7, lambda a, mills: (1 + a * a) * mills - a),
    ):
        found = gaussian._polynomial(coefficients, a) / bottom
        for x, value in zip(a, found, strict=True):
            mills = mp.ncdf(-mpf(x.item())) / mp.npdf(mpf(x.item()))
            true = function(mpf(x.item()), mills) / mp.sqrt(2 * mp.pi)
            assert relative_error(value, true, true) <= bound
