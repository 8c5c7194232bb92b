"""Max pooling of dropped values, against the enumeration of all masks and against sampling."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import momentprop as mp
from enumeration import enumerate_masks
from momentprop.engine.dropped_pool import DroppedPool
from momentprop.moments import Moments
from momentprop.network import inside


def is_used(model: nn.Module, x: Tensor) -> bool:
    plan = inside(mp.convert(model.eval(), x, "accurate", outputs=[0])).built.program.plan
    return any(isinstance(step.operator, DroppedPool) for step in plan.steps)


@pytest.mark.parametrize("p", [0.05, 0.3, 0.8])
@pytest.mark.parametrize(
    ("pool", "shape"),
    [
        (nn.MaxPool2d(2), (2, 1, 2, 4)),
        (nn.MaxPool2d((1, 2)), (2, 2, 2, 2)),
        (nn.MaxPool1d(3), (2, 1, 6)),
        (nn.MaxPool1d(4), (2, 2, 5)),
        (nn.MaxPool3d((1, 2, 2)), (2, 1, 1, 2, 4)),
    ],
    ids=str,
)
def test_known_values_are_pooled_exactly(pool: nn.Module, shape: tuple[int, ...], p: float) -> None:
    """Every mask enumerated: mean and covariance; values of both signs, some of them equal."""
    x = torch.randn(shape, dtype=torch.float64).mul(2).round() / 2
    model = nn.Sequential(nn.Dropout(p), pool, nn.Flatten()).eval()
    assert is_used(model, x)
    ((mean, covariance),) = enumerate_masks(model.train(), x)
    out = mp.convert(model.eval(), x, "accurate")(x)
    torch.testing.assert_close(out.mean, mean, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(out.covariance, covariance, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_random_values_agree_with_sampling(p: float) -> None:
    """Windows of two: exact for Gaussian values, dropped or not."""
    torch.manual_seed(0)
    x = Moments(torch.randn(4, 3, 2, 6).double(), torch.rand(4, 3, 2, 6).double() * 2)
    out = DroppedPool(2).propagate(x, p, [1, 2], [], 0, 1, False).moments
    values = x.mean + x.std * torch.randn(200_000, *x.shape, dtype=torch.float64)
    values *= (torch.rand_like(values) >= p) / (1 - p)
    samples = torch.maximum(values[..., ::2], values[..., 1::2])
    error = samples.std(0) / len(samples) ** 0.5
    assert ((out.mean - samples.mean(0)).abs() < 5 * error + 1e-9).all()
    torch.testing.assert_close(out.variance, samples.var(0), rtol=0.03, atol=1e-3)


def test_linear_part_and_noise_make_up_the_variance() -> None:
    x = Moments(torch.randn(2, 3, 4, 4).double(), torch.rand(2, 3, 4, 4).double())
    found = DroppedPool(2).propagate(x, 0.3, 2, [], 0, 1, False)
    linearization, n = found.linearize(), found.moments.mean.numel()
    (pulled,) = linearization.map.pull(torch.eye(n, dtype=torch.float64).reshape(n, *found.moments.shape))
    explained = (pulled.flatten(1).square() * x.variance.flatten()).sum(1)
    (noise,) = linearization.noise
    torch.testing.assert_close(explained + noise.variance.flatten(), found.moments.variance.flatten())


def test_gain_is_the_derivative_of_the_mean() -> None:
    """Masks are independent of the values, so moving a value's mean moves the output's by the gain."""
    x = Moments(torch.randn(1, 2, 2, 2).double(), torch.rand(1, 2, 2, 2).double())
    operator = DroppedPool(2)
    found = operator.propagate(x, 0.3, 2, [], 0, 1, False)
    (pulled,) = found.linearize().map.pull(torch.eye(2).double().reshape(2, 1, 2, 1, 1))
    jacobian = torch.autograd.functional.jacobian(
        lambda mean: operator.propagate(
            Moments(mean, x.variance), 0.3, 2, [], 0, 1, False
        ).moments.mean.flatten(),
        x.mean,
    )
    # the expected derivative is that of Clark's first fold; later folds take the maximum as Gaussian
    torch.testing.assert_close(pulled, jacobian.reshape_as(pulled), rtol=0.1, atol=0.03)


def test_closer_to_sampling_than_pooling_of_gaussians() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Dropout(0.3)]
    model = nn.Sequential(nn.Dropout(0.3), *layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 4)).eval()
    x = torch.randn(20, 3, 8, 8)
    samples = mp.monte_carlo(model, x, 4000, seed=0)
    fused = mp.convert(model, x, "accurate")(x)
    apart = mp.convert(nn.Sequential(*list(model)[:4], Twice(), *list(model)[4:]).eval(), x, "accurate")(x)
    errors = [((out.mean - samples.mean) / samples.std).abs().median() for out in (fused, apart)]
    assert errors[0] < 0.8 * errors[1]
    errors = [(out.std / samples.std - 1).abs().median() for out in (fused, apart)]
    assert errors[0] < errors[1]


class Twice(nn.Module):
    """The identity, by a node that stands between dropout and pooling."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x], 1)[:, : x.shape[1]]


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Dropout(0.3), nn.MaxPool2d(3)],  # 512 cases
        [nn.Dropout(0.3), nn.MaxPool2d(2, 1)],  # windows share masks
        [nn.Dropout(0.3), nn.MaxPool2d(2, padding=1)],
        [nn.Dropout(0.3), nn.ReLU(), nn.MaxPool2d(3)],
        [nn.Dropout2d(0.3), nn.MaxPool2d(2)],  # the pool comes first
        [nn.Dropout(0.3), nn.AvgPool2d(2)],
    ],
    ids=str,
)
def test_not_used_where_it_does_not_hold_or_pay(layers: list[nn.Module]) -> None:
    assert not is_used(nn.Sequential(*layers), torch.randn(2, 3, 6, 6))


def test_not_used_where_the_dropped_values_have_another_user() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = nn.functional.dropout(x, 0.3, self.training)
            return nn.functional.max_pool2d(y, 2) + y.mean((2, 3), keepdim=True)

    assert not is_used(Model(), torch.randn(2, 3, 6, 6))
