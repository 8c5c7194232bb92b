"""The outputs of a backward sweep: their shapes, those that nothing reaches, and structures of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import momentprop as mp
from enumeration import enumerate_masks
from exact import Model, accurate, assert_exact, constant, layers, values

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda m, x: m.a(m.drop(x)).sum(1), ()),
        (lambda m, x: m.a(m.drop(x)), (3,)),
        (lambda m, x: m.a(m.drop(x))[:, :, None] * m.w[:2], (3, 2)),
        (lambda m, x: m.a(m.drop(x))[:, None], (1, 3)),
        (lambda m, x: m.a(m.drop(x))[:, :1], (1,)),
    ],
    ids=["[B]", "[B,3]", "[B,3,2]", "[B,1,3]", "[B,1]"],
)
def test_shapes_of_outputs(function: Callable[..., Tensor], shape: tuple[int, ...], batch: int) -> None:
    """Covariance is over a sample's elements in row-major order."""
    model, x = Model(function, **layers()), values(batch, 3)
    (out,) = accurate(model, x)
    assert out.shape == (batch, *shape)
    assert_exact(model, x)


def test_one_that_is_deterministic() -> None:
    """No noise reaches it: variance zero, and the others are what they are alone."""
    model = Model(lambda m, x: (m.a(x), m.a(m.drop(x)), x.sum()), **layers())
    x = values(2, 3)
    first, second, third = accurate(model, x)
    assert torch.equal(first.mean, model(x)[0])
    assert not first.variance.any()
    assert third.mean == x.sum()
    _, (_, covariance), _ = enumerate_masks(model, x)
    torch.testing.assert_close(second.covariance, covariance)


def test_an_overwritten_value_is_deterministic() -> None:
    """Noise that reaches no output any more."""
    model = Model(lambda m, x: m.drop(x).copy_(2 * x))
    x = values(2, 3)
    (out,) = accurate(model, x)
    assert torch.equal(out.mean, 2 * x)
    assert not out.variance.any()


def test_no_sample_reaches_a_value() -> None:
    """Windows in the padding, left and right of the one element: nothing but the bias is left."""
    conv = nn.Conv1d(3, 2, kernel_size=2, dilation=2, padding=1)
    model = Model(lambda m, x: m.conv(m.drop(x)[..., None]), conv=conv)
    assert_exact(model, values(2, 3))


def test_shape_lent_by_a_random_value() -> None:
    """`expand_as` looks at the shape of its second argument only."""
    model = Model(lambda m, x: (lambda y: y + m.w.expand_as(y))(m.drop(x)), w=constant(3))
    assert_exact(model, values(2, 3))


def test_structures_stay() -> None:
    model = Model(lambda m, x: {"a": (m.drop(x), None), "b": [m.a(m.drop(x))]}, **layers())
    out = mp.convert(model, values(2, 3), "accurate")(values(4, 3))
    assert out["a"][1] is None
    assert out["a"][0].covariance.shape == out["b"][0].covariance.shape == (4, 3, 3)


def test_what_does_not_vary_has_a_std_of_zero() -> None:
    """Dropped zeros: noise without variance adds nothing, in float32 too."""
    model = nn.Sequential(
        nn.Dropout(0.3), nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3), nn.Softmax(1)
    ).eval()
    for part in (model[:2], model[:4], model):
        out = mp.convert(part, torch.ones(2, 4))(torch.zeros(2, 4))
        assert not out.std.any()
        assert not out.covariance.any()
