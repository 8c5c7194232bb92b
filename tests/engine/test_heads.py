"""A final softmax, log-softmax or sigmoid of Gaussian logits, against large samples and at the limits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import momentprop as mp
from momentprop.engine.heads import Head
from momentprop.engine.layouts import Layout

FUNCTIONS = {"softmax": torch.softmax, "log_softmax": torch.log_softmax, "sigmoid": lambda z, _: z.sigmoid()}
SAMPLES = 200_000


def logits(
    shape: tuple[int, ...], spread: float, std: float, dtype: torch.dtype = torch.float64
) -> mp.Moments:
    """Correlated logits [2, *shape] of a batch of two."""
    generator = torch.Generator().manual_seed(0)
    size = math.prod(shape)
    mean = torch.randn(2, *shape, generator=generator, dtype=torch.float64) * spread
    root = torch.randn(2, size, size, generator=generator, dtype=torch.float64) * (std / size**0.5)
    covariance = root @ root.mT
    variance = covariance.diagonal(dim1=1, dim2=2).reshape(mean.shape)
    return mp.Moments(mean, variance, covariance).to(dtype)


def head(operator: str, shape: tuple[int, ...], dim: int | None) -> Head:
    return Head(operator, "logits", None if operator == "sigmoid" else dim, (1, *shape))


def layout(shape: tuple[int, ...]) -> Layout:
    return Layout(1, math.prod(shape))


def sampled(z: mp.Moments, operator: str, dim: int) -> tuple[Tensor, Tensor]:
    """Mean [2, elements] and covariance of the head over normal logits."""
    assert z.covariance is not None
    means, covariances = [], []
    generator = torch.Generator().manual_seed(1)
    for mean, covariance in zip(z.mean, z.covariance, strict=True):
        values, vectors = torch.linalg.eigh(covariance)
        noise = torch.randn(SAMPLES, len(values), generator=generator, dtype=torch.float64)
        draws = mean + (noise @ (vectors * values.clamp_min(0).sqrt()).T).reshape(-1, *mean.shape)
        flat = FUNCTIONS[operator](draws, dim).flatten(1)
        means.append(flat.mean(0))
        covariances.append(flat.T.cov())
    return torch.stack(means), torch.stack(covariances)


@pytest.mark.parametrize(("spread", "std"), [(1.0, 0.1), (1.0, 1.0), (4.0, 2.0)])
@pytest.mark.parametrize("shape", [(2,), (5,)])
@pytest.mark.parametrize("operator", FUNCTIONS)
def test_moments_are_those_of_samples(
    operator: str, shape: tuple[int, ...], spread: float, std: float
) -> None:
    """Std to 6 % of the largest, by so few points; covariances to 5 % of the largest."""
    z = logits(shape, spread, std)
    out = head(operator, shape, 1).applied(z, layout(shape))
    assert out.covariance is not None
    mean, covariance = sampled(z, operator, 1)
    true = covariance.diagonal(dim1=1, dim2=2)
    assert ((out.mean - mean).abs() <= 0.03 * true.sqrt()).all()
    assert ((out.std - true.sqrt()).abs() <= 0.06 * true.sqrt().amax(1, keepdim=True)).all()
    off = (out.covariance - covariance).abs().amax((1, 2)) / covariance.abs().amax((1, 2))
    assert (off < 0.05).all()


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("operator", FUNCTIONS)
def test_several_positions_in_a_sample(operator: str, dim: int) -> None:
    z = logits((3, 4), 1.0, 1.0)
    out = head(operator, (3, 4), dim).applied(z, layout((3, 4)))
    assert out.covariance is not None
    mean, covariance = sampled(z, operator, dim)
    torch.testing.assert_close(out.mean.flatten(1), mean, rtol=0, atol=0.02)
    off = (out.covariance - covariance).abs().amax((1, 2)) / covariance.abs().amax((1, 2))
    # classes correlate to first order, which sharp logarithms do not
    assert (off < (0.3 if operator == "log_softmax" else 0.12)).all()
    torch.testing.assert_close(out.covariance.diagonal(dim1=1, dim2=2), out.variance.flatten(1))


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
@pytest.mark.parametrize("operator", FUNCTIONS)
def test_chosen_outputs(operator: str, shape: tuple[int, ...]) -> None:
    z = logits(shape, 1.0, 0.5)
    assert z.covariance is not None
    indices = torch.tensor([[4, 1], [0, 5]])
    part = torch.stack([c[i][:, i] for c, i in zip(z.covariance, indices, strict=True)])
    rest = mp.Moments(z.mean, z.variance, part, indices)
    out = head(operator, shape, len(shape)).applied(rest, layout(shape))
    assert out.covariance is not None
    assert out.indices is indices
    chosen = out.variance.flatten(1).gather(1, indices)
    torch.testing.assert_close(out.covariance.diagonal(dim1=1, dim2=2), chosen, rtol=1e-3, atol=0)


@pytest.mark.parametrize("shape", [(2,), (5,), (2, 3), (1,)])
@pytest.mark.parametrize("operator", FUNCTIONS)
def test_without_variance_it_is_the_operator(operator: str, shape: tuple[int, ...]) -> None:
    z = logits(shape, 5.0, 0.0, torch.float32)
    for covariance in (None, z.covariance):
        given = mp.Moments(z.mean, z.variance, covariance)
        out = head(operator, shape, 1).applied(given, layout(shape))
        expected = FUNCTIONS[operator](z.mean.double(), 1).float()
        torch.testing.assert_close(out.mean, expected, rtol=1e-5, atol=0)
        assert not out.std.any()


@pytest.mark.parametrize("std", [1e-6, 1e-3, 1.0, 5.0])
@pytest.mark.parametrize("operator", FUNCTIONS)
def test_float32_agrees_with_float64_in_the_tails(operator: str, std: float) -> None:
    mean = torch.tensor([[-30.0, -12.0, 0.0, 12.0, 14.0]])
    single = head(operator, (5,), 1).applied(mp.Moments(mean, std**2))
    double = head(operator, (5,), 1).applied(mp.Moments(mean.double(), std**2))
    torch.testing.assert_close(single.mean.double(), double.mean, rtol=1e-4, atol=1e-30)
    torch.testing.assert_close(single.std.double(), double.std, rtol=2e-2, atol=1e-19)


def test_a_sure_class_varies_as_all_others_together() -> None:
    """In float32 its probability is 1, to the last digit."""
    out = head("softmax", (3,), 1).applied(mp.Moments(torch.tensor([[20.0, 0.0, -1.0]]), 0.25))
    rest = out.std[0, 1:].square().sum().sqrt()
    assert out.std[0, 0] == pytest.approx(rest.item(), rel=0.2)


@pytest.mark.parametrize("operator", FUNCTIONS)
def test_two_that_are_the_same_correlate_fully(operator: str) -> None:
    z = mp.Moments(torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2, 2))
    out = head(operator, (2,), 1).applied(z, layout((2,)))
    assert out.covariance is not None
    expected = 0.0 if operator != "sigmoid" else out.variance[0, 0].item()
    assert out.covariance[0, 0, 1].item() == pytest.approx(expected, rel=1e-4, abs=1e-12)


def test_classes_that_are_masked_take_no_part() -> None:
    z = mp.Moments(torch.tensor([[0.0, 1.0, -torch.inf, 2.0]]), torch.tensor([[1.0, 1.0, 0.0, 1.0]]))
    for operator in ("softmax", "log_softmax"):
        out = head(operator, (4,), 1).applied(z)
        assert not out.variance.isnan().any()
        assert out.variance[0, [0, 1, 3]].all()
    assert not head("softmax", (4,), 1).applied(z).std[0, 2]


@pytest.mark.parametrize("batch", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_empty_batches(dtype: torch.dtype, batch: int) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3), nn.Softmax(-1)).to(dtype).eval()
    for tier in ("paper", "fast", "accurate"):
        out = mp.convert(model, torch.ones(2, 4, dtype=dtype), tier)(torch.ones(batch, 4, dtype=dtype))
        assert out.mean.dtype == out.variance.dtype == dtype
        assert out.mean.isfinite().all()


def sharp(*last: nn.Module) -> nn.Sequential:
    """A network whose logits are far apart, as those of a trained one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 5), *last).eval()
    with torch.no_grad():
        model[3].weight.mul_(8)
    return model


@pytest.mark.parametrize("last", [nn.Softmax(-1), nn.LogSoftmax(-1), nn.Sigmoid()], ids=FUNCTIONS)
def test_sharp_logits(last: nn.Module) -> None:
    """The spread is MC's, not that of the plain network's neighbourhood."""
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(2))
    model = sharp(last)
    out = mp.convert(model, x)(x)
    mc = mp.monte_carlo(model, x, 4000, seed=0)
    matters = mc.std > 0.05
    ratio = (out.std / mc.std)[matters]
    assert 0.95 < ratio.median() < 1.05
    assert ((out.mean - mc.mean).abs() / mc.std)[matters].median() < 0.1


@pytest.mark.parametrize("tier", ["paper", "fast", "accurate"])
def test_a_sigmoid_that_is_reshaped_is_a_head_all_the_same(tier: str) -> None:
    torch.manual_seed(0)
    body = [nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1)]
    x = torch.randn(5, 6)
    expected = mp.convert(nn.Sequential(*body, nn.Sigmoid()).eval(), x, tier)(x)
    flat = nn.Sequential(*body, nn.Sigmoid(), nn.Unflatten(1, (1, 1)), nn.Flatten(0)).eval()
    out = mp.convert(flat, x, tier)(x)
    torch.testing.assert_close(out.mean, expected.mean[:, 0])
    torch.testing.assert_close(out.std, expected.std[:, 0])
    torch.testing.assert_close(mp.classify(out).probs, mp.classify(expected).probs)
    sampled = mp.monte_carlo(flat, x, 200, seed=0)
    torch.testing.assert_close(mp.classify(sampled).probs[:, 1], sampled.mean, rtol=1e-3, atol=1e-4)


def test_exports_compiles_and_differentiates() -> None:
    x = torch.randn(3, 6)
    bnn = mp.convert(sharp(nn.Softmax(-1)), x)
    frozen = bnn.freeze()
    torch.testing.assert_close(frozen(x).covariance, bnn(x).covariance, rtol=1e-3, atol=1e-6)
    inputs = x.clone().requires_grad_()
    out = bnn(inputs)
    (out.mean[:, 0].sum() + out.std.sum()).backward()
    assert inputs.grad is not None
    assert inputs.grad.isfinite().all()


@pytest.mark.parametrize("operator", FUNCTIONS)
@pytest.mark.parametrize("shape", [(3, 4), (6, 1), (1,)])
def test_covariances_over_several_positions_are_never_indefinite(
    operator: str, shape: tuple[int, ...]
) -> None:
    """Also of a softmax over one class, which is certain."""
    dim = len(shape) if operator != "sigmoid" else 1
    z = logits(shape, 3.0, 2.0)
    out = head(operator, shape, dim).applied(z, layout(shape))
    assert out.covariance is not None
    assert torch.equal(out.covariance, out.covariance.mT)
    torch.testing.assert_close(out.covariance.diagonal(dim1=1, dim2=2), out.variance.flatten(1))
    assert torch.linalg.eigvalsh(out.covariance).min() > -1e-12
