"""The covariance of the outputs: against all masks, against a full covariance, and as part of `convert`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree

import momentprop as mp
from enumeration import enumerate_masks
from momentprop.rules.local import Elementwise
from momentprop.rules.registry import RULES
from small import mlp

aten = torch.ops.aten


class Model(nn.Module):
    """A function of (self, *inputs), with layers and a dropout to use."""

    def __init__(self, function: Callable[..., Any], **layers: Any) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.double()

    def drop(self, x: Tensor, p: float = 0.4) -> Tensor:
        return F.dropout(x, p, self.training)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def values(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def constant(*shape: int) -> nn.Parameter:
    return nn.Parameter(values(*shape))


def accurate(model: nn.Module, *inputs: Any) -> list[mp.Moments]:
    out = mp.convert(model, inputs, "accurate")(*inputs)
    return pytree.tree_leaves(out, is_leaf=lambda v: isinstance(v, mp.Moments))


def assert_is_a_covariance(out: mp.Moments, tolerance: float = 1e-10) -> None:
    """Symmetric, its diagonal the variance, positive semidefinite to rounding."""
    covariance, batch = out.covariance, len(out.covariance)
    assert torch.equal(covariance, covariance.mT)
    size = covariance.shape[-1]
    scale = covariance.diagonal(dim1=1, dim2=2).amax(1, keepdim=True) if size else 1.0
    if out.indices is None and out.mean.shape[:1] == (batch,):
        assert torch.equal(out.variance.reshape(batch, -1), covariance.diagonal(dim1=1, dim2=2))
    if batch and size:
        assert (torch.linalg.eigvalsh(covariance) >= -tolerance * size * scale).all()


def assert_exact(model: nn.Module, *inputs: Any) -> None:
    """Mean and covariance of every output are those of all masks."""
    for out, (mean, covariance) in zip(
        accurate(model, *inputs), enumerate_masks(model, *inputs), strict=True
    ):
        assert out.covariance.shape == covariance.shape
        torch.testing.assert_close(out.covariance, covariance, rtol=1e-10, atol=1e-10)
        if out.mean.shape[:1] == mean.shape[:1]:
            torch.testing.assert_close(out.mean.reshape(mean.shape), mean, rtol=1e-10, atol=1e-10)
        assert_is_a_covariance(out)


LINEAR = {
    "one layer": lambda m, x: m.a(m.drop(x)),
    "dropout last": lambda m, x: m.drop(m.a(x)),
    "scaled and shifted": lambda m, x: 3 - m.a(m.drop(x) * m.w / 2) * 4,
    "dropouts in a row": lambda m, x: m.a(m.drop(m.drop(x) * 2, 0.2)),
    "dropouts with a layer between": lambda m, x: m.a(m.drop(m.a(m.drop(x)), 0.2)),
    "residual": lambda m, x: (lambda y: y + m.a(y))(m.drop(x)),
    "residual of residuals": lambda m, x: (lambda y: (lambda z: z - m.a(z))(y + m.a(y) * 2))(m.drop(x)),
    "with its own input": lambda m, x: m.drop(x) + m.a(x),
    "two branches with dropouts of their own": lambda m, x: m.a(m.drop(x)) - m.drop(m.a(x), 0.1),
    "one layer used twice": lambda m, x: m.a(m.a(m.drop(x))),
    "one layer on two branches": lambda m, x: m.a(m.drop(x)) + m.a(m.drop(2 * x, 0.1)),
    "one value three times": lambda m, x: (lambda y: y * m.w + y / 3 - y.flip(1))(m.drop(x)),
    "added to itself": lambda m, x: (lambda y: y + y)(m.drop(x)),
    "taken from itself": lambda m, x: (lambda y: y - y + m.drop(x, 0.1))(m.drop(x)),
    "concatenation": lambda m, x: (lambda y: torch.cat([y, x, m.a(y), y], 1))(m.drop(x)),
    "stack": lambda m, x: (lambda y: torch.stack([m.a(y), y, x], 2))(m.drop(x)),
    "broadcast": lambda m, x: m.drop(x)[:, :, None] * m.w - m.drop(x, 0.2).sum(1)[:, None, None],
    "broadcast sum": lambda m, x: m.drop(x[:, :1]) + m.drop(x),
    "outer sum": lambda m, x: m.drop(x)[:, :, None] + m.drop(x * 2)[:, None, :],
    "scalar per sample": lambda m, x: m.drop(x).mean(1),
    "scaled by the input": lambda m, x: m.drop(x) * x.sigmoid() / (1 + x * x),
    "slices": lambda m, x: (lambda y: y[:, 1:] + 2 * y[:, :2] - y[:, ::2])(m.drop(x)),
    "select and index": lambda m, x: (lambda y: y[:, 2:3] + y[:, [1, 0, 1]])(m.drop(x)),
    "chunks": lambda m, x: (lambda a, b: a.sum(1) + 2 * b[:, 0])(*m.drop(x).chunk(2, 1)),
    "one part of a split": lambda m, x: m.drop(x).split([1, 2], 1)[1],
    "padding split off": lambda m, x: (lambda a, b, c, d: torch.cat([d + a, b - c], 1))(
        *F.pad(m.drop(x), (1, 0)).split(1, 1)
    ),
    "padding cut out": lambda m, x: (lambda y: y[:, :1] + y[:, 2:])(F.pad(m.drop(x), (1, 0), value=2.0)),
    "unbind": lambda m, x: (lambda a, b, c: torch.stack([a + b, b - c], 1))(*m.drop(x).unbind(1)),
    "roll, repeat, pad": lambda m, x: F.pad(m.drop(x).roll(1, 1).repeat(1, 2), (1, 0), value=3.0),
    "masked": lambda m, x: m.drop(x).masked_fill(x > 0, 2.0) + torch.where(x > 1, m.drop(x), x),
    "cumulative sum": lambda m, x: m.drop(x).cumsum(1),
    "matrix on the right": lambda m, x: m.drop(x) @ m.matrix,
    "matrix on the left": lambda m, x: m.matrix @ m.drop(x)[:, :, None],
    "batched matrices": lambda m, x: torch.bmm(m.drop(x)[:, None], m.matrix.expand(x.shape[0], 3, 3)),
    "batch norm": lambda m, x: m.norm(m.a(m.drop(x))),
    "batch norm by itself": lambda m, x: m.norm(m.drop(x)).flip(1),
    "average pooling": lambda m, x: F.avg_pool1d(m.drop(x)[:, None], 2, 1, 1),
    "shape and type alone": lambda m, x: (lambda y: y * torch.zeros_like(y).add(2) + 1)(m.drop(x)),
    "in place": lambda m, x: m.drop(x).mul_(2).add_(m.w)[:, :2],
    "written into": lambda m, x: torch.zeros_like(x).slice_scatter(m.drop(x)[:, 1:], 1, 0, 2) + m.drop(x),
    "one that is deterministic": lambda m, x: torch.cat([m.drop(x), x], 1),
    "tuple": lambda m, x: (lambda y: (m.a(y), y.sum(1), y))(m.drop(x)),
    "dict": lambda m, x: (lambda y: {"hidden": y, "out": m.a(m.drop(y))})(m.drop(x)),
    "the same output twice": lambda m, x: (lambda y: (y, m.a(y), y))(m.drop(x)),
}


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    """On tensors this small threads only wait for each other."""
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)


@pytest.fixture
def layers() -> dict[str, Any]:
    norm = nn.BatchNorm1d(3)
    for tensor in (norm.weight, norm.bias, norm.running_mean):
        nn.init.normal_(tensor)
    nn.init.uniform_(norm.running_var, 0.5, 2.0)
    return {"a": nn.Linear(3, 3), "norm": norm.eval(), "w": constant(3), "matrix": constant(3, 3)}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_networks_are_exact(name: str, layers: dict[str, Any]) -> None:
    assert_exact(Model(LINEAR[name], **layers).eval(), values(2, 3))


@pytest.mark.parametrize("batch", [1, 2, 5])
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
def test_shapes_of_outputs(
    function: Callable[..., Tensor], shape: tuple[int, ...], batch: int, layers: dict[str, Any]
) -> None:
    """Covariance is over a sample's elements in row-major order."""
    model, x = Model(function, **layers).eval(), values(batch, 3)
    (out,) = accurate(model, x)
    assert out.shape == (batch, *shape)
    assert_exact(model, x)


MOVED = {
    "[T, B, C]": lambda m, x: m.drop(x).transpose(0, 1),
    "[T, B, C], dropout inside": lambda m, x: m.b(m.drop(x.transpose(0, 1))),
    "[C, T, B]": lambda m, x: m.drop(x.permute(2, 1, 0)) * 2,
    "[B T, C] inside": lambda m, x: m.b(m.drop(x.reshape(-1, 2))).reshape(x.shape[0], -1),
    "[B T, C]": lambda m, x: m.b(m.drop(x.reshape(-1, 2))),
    "[T B, C] inside": lambda m, x: m.b(m.drop(x.transpose(0, 1).reshape(-1, 2))).reshape(2, -1, 2).sum(0),
    "[T, B, C, 1]": lambda m, x: m.drop(x.transpose(0, 1)[..., None]).sum(0),
    "[T, B, C, 1, 1]": lambda m, x: m.drop(x.transpose(0, 1)[..., None, None]).sum(0),
    "[C, T, B, 1]": lambda m, x: m.drop(x.permute(2, 1, 0)[..., None]).sum((0, 3)),
    "[1, B, T, C]": lambda m, x: m.drop(x[None]).sum(0),
    "every sample twice": lambda m, x: (lambda y: y[: x.shape[0]] - 2 * y[x.shape[0] :])(
        m.drop(torch.cat([x, -x])[:, 0])
    ),
}


@pytest.mark.parametrize("name", MOVED)
def test_batches_anywhere_are_exact(name: str) -> None:
    """Three samples of [2, 2]; the one that covariance is computed for is found wherever it is."""
    model = Model(MOVED[name], b=nn.Linear(2, 2)).eval()
    x = values(3, 2, 2)
    assert_exact(model, x)
    assert accurate(model, x[:1])[0].covariance.shape[0] == 1


class TestChannelDropout:
    """One mask for all elements of a channel; exact where what it drops is deterministic."""

    @pytest.mark.parametrize("n", [1, 2, 3])
    @pytest.mark.parametrize("then", ["nothing", "convolution", "linear", "pool"])
    def test_of_an_image(self, n: int, then: str) -> None:
        drop = (F.dropout1d, F.dropout2d, F.dropout3d)[n - 1]
        convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[n - 1](4, 2, 2)
        layer = {
            "nothing": nn.Identity(),
            "convolution": nn.Sequential(convolution, nn.Flatten(), nn.Linear(2, 2)),
            "linear": nn.Sequential(nn.Flatten(), nn.Linear(4 * 2**n, 3)),
            "pool": (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[n - 1](1),
        }[then]
        model = Model(lambda m, x: m.layer(drop(x, 0.3, m.training)), layer=layer).eval()
        assert_exact(model, values(2, 4, *[2] * n))

    def test_of_frames_merged_with_the_batch(self) -> None:
        model = Model(
            lambda m, x: F.dropout1d(x.flatten(0, 1), 0.3, m.training).reshape(x.shape[0], -1) @ m.w,
            w=constant(8, 3),
        ).eval()
        assert_exact(model, values(3, 2, 2, 2))

    def test_where_the_batch_stands_second(self) -> None:
        """To the operator time is the batch and samples are channels: one mask per step and sample."""
        model = Model(
            lambda m, x: F.dropout1d(x.transpose(0, 1), 0.3, m.training).sum(0) @ m.w, w=constant(2, 3)
        ).eval()
        assert_exact(model, values(3, 4, 2))

    def test_used_twice(self) -> None:
        model = Model(
            lambda m, x: (lambda y: y.flatten(1) + y.sum(2).repeat(1, 2))(F.dropout1d(x, 0.3, m.training))
        ).eval()
        assert_exact(model, values(2, 3, 2))


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3},
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": 1, "stride": 3},
        {"kernel_size": 3, "dilation": 2, "padding": "same"},
        {"kernel_size": 2, "groups": 2, "padding": 1, "bias": False},
        {"kernel_size": 3, "padding": 2, "padding_mode": "circular"},
        {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    ],
    ids=str,
)
def test_convolutions_are_exact(options: dict[str, Any]) -> None:
    """Overlapping windows share their inputs."""
    model = Model(lambda m, x: m.conv(m.drop(x)), conv=nn.Conv1d(2, 2, **options)).eval()
    assert_exact(model, values(2, 2, 4))


class TestUncertainInputs:
    def uncertain(self, *shape: int) -> mp.Moments:
        return mp.Moments(values(*shape), values(*shape).exp())

    @pytest.mark.parametrize(
        "name", ["one layer", "residual", "concatenation", "slices", "tuple", "batch norm"]
    )
    def test_with_dropout(self, name: str, layers: dict[str, Any]) -> None:
        assert_exact(Model(LINEAR[name], **layers).eval(), self.uncertain(2, 3))

    @pytest.mark.parametrize(
        "function",
        [
            lambda m, x: m.a(x),
            lambda m, x: x,
            lambda m, x: x + m.a(m.a(x)),
            lambda m, x: (x[:, 1:], x.sum(1), m.a(x)),
        ],
        ids=["layer", "nothing", "residual", "several outputs"],
    )
    def test_without_dropout(self, function: Callable[..., Any], layers: dict[str, Any]) -> None:
        assert_exact(Model(function, **layers).eval(), self.uncertain(2, 3))

    def test_channel_dropout_of_one_element_per_channel(self) -> None:
        model = Model(lambda m, x: F.dropout1d(x, 0.3, m.training).flatten(1) @ m.w, w=constant(3, 2)).eval()
        assert_exact(model, self.uncertain(2, 3, 1))

    def two_inputs(self) -> Model:
        return Model(
            lambda m, x, y: m.a(m.drop(x)) - m.b(m.drop(y, 0.2)) * 2 + y[:, :1],
            a=nn.Linear(3, 2),
            b=nn.Linear(2, 2),
        )

    @pytest.mark.parametrize("which", [(True, False), (False, True), (True, True), (False, False)], ids=str)
    def test_of_two_inputs_some(self, which: tuple[bool, bool]) -> None:
        inputs = [self.uncertain(2, 3), self.uncertain(2, 2)]
        given = [x if u else x.mean for x, u in zip(inputs, which, strict=True)]
        assert_exact(self.two_inputs().eval(), *given)

    def test_at_call_time_though_converted_with_certain_ones(self) -> None:
        """And in any order of calls: every pattern gives what a network converted for it gives."""
        model = self.two_inputs().eval()
        x, y = self.uncertain(2, 3), self.uncertain(2, 2)
        bnn = mp.convert(model, (x.mean, y.mean), "accurate")
        patterns = list(itertools.product([False, True], repeat=2))
        for first, second in [*patterns, *reversed(patterns)]:
            given = (x if first else x.mean, y if second else y.mean)
            ((_, covariance),) = enumerate_masks(model, *given)
            torch.testing.assert_close(bnn(*given).covariance, covariance)

    def test_certain_at_call_time_though_converted_with_uncertain_ones(self) -> None:
        model = self.two_inputs().eval()
        x, y = self.uncertain(2, 3), self.uncertain(2, 2)
        bnn = mp.convert(model, (x, y), "accurate")
        ((_, covariance),) = enumerate_masks(model, x.mean, y.mean)
        torch.testing.assert_close(bnn(x.mean, y.mean).covariance, covariance)

    def test_nothing_is_uncertain_after_all(self) -> None:
        bnn = mp.convert(nn.Linear(3, 2).double(), self.uncertain(2, 3), "accurate")
        out = bnn(values(2, 3))
        assert not out.variance.any()


class TestOutputs:
    def test_one_that_is_deterministic(self, layers: dict[str, Any]) -> None:
        """No noise reaches it: variance zero, and the others are what they are alone."""
        model = Model(lambda m, x: (m.a(x), m.a(m.drop(x)), x.sum()), **layers).eval()
        x = values(2, 3)
        first, second, third = accurate(model, x)
        assert torch.equal(first.mean, model(x)[0])
        assert not first.variance.any()
        assert third.mean == x.sum()
        _, (_, covariance), _ = enumerate_masks(model, x)
        torch.testing.assert_close(second.covariance, covariance)

    def test_an_overwritten_value_is_deterministic(self) -> None:
        """Noise that reaches no output any more."""
        model = Model(lambda m, x: m.drop(x).copy_(2 * x)).eval()
        x = values(2, 3)
        (out,) = accurate(model, x)
        assert torch.equal(out.mean, 2 * x)
        assert not out.variance.any()

    def test_no_sample_reaches_a_value(self) -> None:
        """Windows in the padding, left and right of the one element: nothing but the bias is left."""
        conv = nn.Conv1d(3, 2, kernel_size=2, dilation=2, padding=1)
        model = Model(lambda m, x: m.conv(m.drop(x)[..., None]), conv=conv).eval()
        assert_exact(model, values(2, 3))

    def test_shape_lent_by_a_random_value(self) -> None:
        """`expand_as` looks at the shape of its second argument only."""
        model = Model(lambda m, x: (lambda y: y + m.w.expand_as(y))(m.drop(x)), w=constant(3)).eval()
        assert_exact(model, values(2, 3))

    def test_structures_stay(self, layers: dict[str, Any]) -> None:
        model = Model(lambda m, x: {"a": (m.drop(x), None), "b": [m.a(m.drop(x))]}, **layers).eval()
        out = mp.convert(model, values(2, 3), "accurate")(values(4, 3))
        assert out["a"][1] is None
        assert out["a"][0].covariance.shape == out["b"][0].covariance.shape == (4, 3, 3)


# ---- a full covariance, for dense networks with ReLU


def full_covariance(model: nn.Sequential, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and whole covariance matrix from layer to layer, O(n^2), by the formulas as they are printed."""
    mean, covariance = x, torch.zeros(*x.shape, x.shape[1], dtype=x.dtype)
    for layer in model:
        variance = covariance.diagonal(dim1=1, dim2=2)
        if isinstance(layer, nn.Linear):
            mean, covariance = layer(mean), layer.weight @ covariance @ layer.weight.T
        elif isinstance(layer, nn.Dropout):
            odds = layer.p / (1 - layer.p)
            covariance = covariance + torch.diag_embed(odds * (mean**2 + variance))
        elif isinstance(layer, nn.ReLU) and not variance.any():
            mean = mean.relu()
        else:
            std = variance.sqrt()
            a = mean / std
            cdf, pdf = torch.special.ndtr(a), torch.exp(-a * a / 2) / (2 * torch.pi) ** 0.5
            out = mean * cdf + std * pdf
            new = (mean**2 + variance) * cdf + mean * std * pdf - out**2
            covariance = cdf[:, :, None] * covariance * cdf[:, None, :]
            covariance = (
                covariance - torch.diag_embed(covariance.diagonal(dim1=1, dim2=2)) + torch.diag_embed(new)
            )
            mean = out
    return mean, covariance


def dense(widths: list[int], p: float, first_dropout: bool = True) -> nn.Sequential:
    """Dropout before every layer, ReLU between; p n is large, so that jumps are small."""
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        layers += [nn.Dropout(p)] if i or first_dropout else []
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).double().eval()


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("outputs", [1, 2, 10])
@pytest.mark.parametrize("first_dropout", [True, False])
def test_one_nonlinearity_is_the_full_covariance(p: float, outputs: int, first_dropout: bool) -> None:
    """Marginals agree up to it, so everything does: to machine precision."""
    model = dense([64, 130, outputs], p, first_dropout)
    x = values(4, 64)
    with torch.no_grad():
        mean, covariance = full_covariance(model, x)
        (out,) = accurate(model, x)
    torch.testing.assert_close(out.mean, mean, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(out.covariance, covariance, rtol=1e-9, atol=1e-12)


def test_one_nonlinearity_without_dropout_behind_it() -> None:
    model = nn.Sequential(nn.Linear(20, 60), nn.Dropout(0.5), nn.Linear(60, 40), nn.ReLU(), nn.Linear(40, 3))
    x = values(4, 20)
    with torch.no_grad():
        mean, covariance = full_covariance(model.double().eval(), x)
        (out,) = accurate(model, x)
    torch.testing.assert_close(out.mean, mean, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(out.covariance, covariance, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("widths", "p"),
    [
        ([64, 100, 100, 3], 0.3),
        ([64, 100, 100, 3], 0.1),
        ([50, 256, 256, 256, 10], 0.3),
        ([100, 128, 128, 128, 5], 0.1),
        ([100, 64, 64, 64, 64, 1], 0.5),
    ],
    ids=str,
)
def test_dense_networks_agree_with_the_full_covariance(widths: list[int], p: float) -> None:
    """Standard deviations to 2 %, though variances inside are diagonal; the diagonal itself is far off."""
    model = dense(widths, p)
    x = values(8, widths[0])
    with torch.no_grad():
        mean, covariance = full_covariance(model, x)
        (out,) = accurate(model, x)
        fast = mp.convert(model, x, "fast")(x)
    std = covariance.diagonal(dim1=1, dim2=2).sqrt()
    assert ((out.std / std - 1).abs() <= 0.02).all()
    assert ((out.mean - mean).abs() <= 0.1 * std).all()
    scale = std[:, :, None] * std[:, None, :]
    assert ((out.covariance - covariance).abs() <= 0.04 * scale).all()
    assert ((fast.std / std - 1).abs() >= 0.02).any()
    assert_is_a_covariance(out)


def test_small_drop_probabilities_agree_with_all_masks() -> None:
    """Rare jumps, which a local gain misjudges: standard deviations within 6 % of the exact ones."""
    model = nn.Sequential(nn.Dropout(0.05), nn.Linear(9, 20), nn.ReLU(), nn.Linear(20, 3)).double().eval()
    x = values(4, 9)
    ((mean, covariance),) = enumerate_masks(model, x)
    with torch.no_grad():
        (out,) = accurate(model, x)
    std = covariance.diagonal(dim1=1, dim2=2).sqrt()
    assert ((out.std / std - 1).abs() <= 0.06).all()
    assert ((out.mean - mean).abs() <= 0.05 * std).all()


# ---- as part of convert


def one_output() -> nn.Sequential:
    layers = [nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 10), nn.ReLU(), nn.Dropout(0.3)]
    return nn.Sequential(*layers, nn.Linear(10, 1))


def jumps() -> nn.Sequential:
    """A small drop probability in front of a small layer, whose response is used instead of a gain."""
    return nn.Sequential(nn.Dropout(0.1), nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))


def images() -> nn.Sequential:
    layers = [nn.Dropout2d(0.2), nn.Conv2d(2, 3, 3, padding="same"), nn.BatchNorm2d(3)]
    layers += [nn.ReLU(), nn.MaxPool2d((1, 2)), nn.Flatten(), nn.Dropout(0.4), nn.Linear(24, 5)]
    return nn.Sequential(*layers)


def sequences() -> nn.Module:
    """Time first inside."""
    return Model(
        lambda m, x: m.b(m.drop(m.a(x).transpose(0, 1).relu())).sum(0), a=nn.Linear(2, 3), b=nn.Linear(3, 2)
    ).float()


NETWORKS = {
    "K = 3": (mlp, (4,)),
    "K = 1": (one_output, (4,)),
    "jumps": (jumps, (2,)),
    "images": (images, (2, 4, 4)),
    "sequences": (sequences, (5, 2)),
}


@pytest.mark.parametrize("name", NETWORKS)
class TestNetworks:
    def network(self, name: str, batch: int = 3) -> tuple[nn.Module, Tensor, mp.BayesianNetwork]:
        make, shape = NETWORKS[name]
        model, x = make().eval(), torch.randn(batch, *shape)
        return model, x, mp.convert(model, x[:2], "accurate")

    def test_is_a_covariance(self, name: str) -> None:
        _, x, bnn = self.network(name)
        assert_is_a_covariance(bnn(x), tolerance=1e-5)

    def test_samples_do_not_influence_each_other(self, name: str) -> None:
        """And any batch size runs, none included."""
        _, x, bnn = self.network(name, 4)
        whole = bnn(x).covariance
        for i in range(4):
            torch.testing.assert_close(bnn(x[i : i + 1]).covariance, whole[i : i + 1])
        assert bnn(x[:0]).covariance.shape == (0, *whole.shape[1:])

    def test_gradients_reach_every_parameter(self, name: str) -> None:
        """Through the covariance alone, and finite; biases of the last layer have no part in it."""
        model, x, bnn = self.network(name)
        x.requires_grad_()
        bnn(x).covariance.square().sum().backward()
        reached = {n: p.grad for n, p in [*model.named_parameters(), ("x", x)] if p.grad is not None}
        assert all(g.isfinite().all() for g in reached.values())
        without = {n for n, g in reached.items() if not g.any()} | {
            n for n, _ in model.named_parameters() if n not in reached
        }
        assert all(n.endswith("bias") for n in without)
        assert len(without) <= 1

    def test_gradients_are_right(self, name: str) -> None:
        _, x, bnn = self.network(name, 2)
        bnn.double()
        point = x.double().requires_grad_()
        assert torch.autograd.gradcheck(lambda v: bnn(v).covariance, (point,), fast_mode=True)

    def test_double_is_near_single(self, name: str) -> None:
        _, x, bnn = self.network(name)
        single = bnn(x).covariance
        double = bnn.double()(x.double()).covariance
        torch.testing.assert_close(single.double(), double, rtol=1e-3, atol=1e-4 * double.abs().max().item())

    def test_compiles_in_one_piece(self, name: str) -> None:
        """The same numbers, for several batch sizes (none that other dimensions have too)."""
        _, x, bnn = self.network(name, 11)
        with torch.no_grad():
            compiled = torch.compile(bnn, fullgraph=True, backend="eager", dynamic=True)
            for batch in (7, 11):
                out, expected = compiled(x[:batch]), bnn(x[:batch])
                torch.testing.assert_close(out.mean, expected.mean)
                torch.testing.assert_close(out.covariance, expected.covariance)
                torch.testing.assert_close(out.variance, expected.variance)

    def test_exports_as_plain_operators(self, name: str) -> None:
        """With a dynamic batch, and nothing of autograd or vmap in the graph."""
        _, x, bnn = self.network(name, 3)
        with torch.no_grad():
            program = torch.export.export(bnn, (x,), dynamic_shapes={"args": ({0: torch.export.Dim.AUTO},)})
            for module in program.graph_module.modules():
                for node in getattr(module, "graph", program.graph).nodes:
                    assert not isinstance(node.target, HigherOrderOperator), node
                    assert not any(word in str(node.target) for word in ("autograd", "vmap", "grad_")), node
            y = torch.randn(7, *x.shape[1:])
            out, expected = program.module()(y), bnn(y)
        torch.testing.assert_close(out.covariance, expected.covariance)
        torch.testing.assert_close(out.mean, expected.mean)


# raised inside torch's own compiler
@pytest.mark.filterwarnings("ignore:.*torch._prims_common.check.*:FutureWarning")
def test_compiled_code_gives_the_same_numbers() -> None:
    """By torch's own compiler, not only in its graphs."""
    bnn = mp.convert(mlp().eval(), torch.zeros(2, 4), "accurate")
    x = torch.randn(5, 4)
    with torch.no_grad():
        compiled = torch.compile(bnn, fullgraph=True, dynamic=True)
        torch.testing.assert_close(compiled(x).covariance, bnn(x).covariance)


class TestAuto:
    def head(self, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Dropout(0.5), nn.Linear(4, outputs))

    def test_accurate_up_to_64_outputs(self) -> None:
        x = torch.randn(2, 4)
        bnn = mp.convert(self.head(64), x)
        assert bnn.fidelity == "accurate"
        assert bnn(x).covariance.shape == (2, 64, 64)

    def test_says_so_beyond(self) -> None:
        x = torch.randn(2, 4)
        model = self.head(65)
        with pytest.warns(mp.FidelityNote, match="65 outputs per sample; choose some with outputs=") as notes:
            bnn = mp.convert(model, x)
        assert notes[0].filename == __file__  # the user's line
        assert len(notes) == 1
        assert bnn.fidelity == "fast"
        assert bnn(x).covariance is None
        torch.testing.assert_close(bnn(x).variance, mp.convert(model, x, "fast")(x).variance)
        assert mp.convert(model, x, "accurate")(x).covariance.shape == (2, 65, 65)  # asked for, it is done

    def test_counts_all_outputs_together(self) -> None:
        model = Model(lambda m, x: (m.a(m.drop(x)), m.a(m.drop(x))), a=nn.Linear(4, 40)).eval()
        with pytest.warns(mp.FidelityNote, match="80 outputs per sample"):
            mp.convert(model, values(2, 4))

    def test_says_so_where_samples_mix(self) -> None:
        model = nn.Sequential(nn.Dropout(0.5), nn.Softmax(0))
        with pytest.warns(mp.FidelityNote, match="samples of the batch share noise or influence each other"):
            bnn = mp.convert(model, torch.randn(3, 4))
        assert bnn.fidelity == "fast"
        assert bnn(torch.randn(3, 4)).covariance is None

    def test_a_later_uncertain_input_stays_in_the_tier(self) -> None:
        x = torch.randn(2, 4)
        bnn = mp.convert(self.head(3), x)
        assert bnn(mp.Moments(x, 0.5)).covariance.shape == (2, 3, 3)
        with pytest.warns(mp.FidelityNote):
            bnn = mp.convert(self.head(100), x)
        assert bnn(mp.Moments(x, 0.5)).covariance is None


class TestErrors:
    @pytest.mark.parametrize(
        ("function", "operator"),
        [
            (lambda x: x - x.mean(0), "aten.mean.dim"),
            (lambda x: x.softmax(0), "aten.softmax.int"),
            (lambda x: x.flip(0), "aten.flip.default"),
            (lambda x: x + x.flip(0), "aten.flip.default"),
            (lambda x: x + x[:1], "aten.slice.Tensor"),
            (lambda x: x.roll(1, 0), "aten.roll.default"),
        ],
        ids=["mean", "softmax", "flip", "flip and add", "first", "roll"],
    )
    def test_mixing_samples_is_reported_with_its_place(
        self, function: Callable[[Tensor], Tensor], operator: str
    ) -> None:
        class Mixes(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return function(x)  # here

        model = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Linear(4, 4), Mixes()))
        with pytest.raises(mp.CovarianceError, match="samples of the batch share noise") as error:
            mp.convert(model, torch.randn(5, 4), "accurate")
        assert f"{operator}  in 1.1" in str(error.value)
        assert "test_adjoint.py" in str(error.value)

    def test_a_fixed_batch(self) -> None:
        model = Model(lambda m, x: m.drop(x).view(4, 6)).eval()
        with pytest.raises(mp.CovarianceError, match="batch size is fixed"):
            mp.convert(model, values(4, 2, 3), "accurate")

    def test_batches_that_are_moved_before_an_embedding(self) -> None:
        """Time first, as recurrent networks have it: no samples mix."""
        model = Model(
            lambda m, t: m.a(m.drop(m.e(t.t()))).sum(0), e=nn.Embedding(9, 2), a=nn.Linear(2, 2)
        ).eval()
        assert_exact(model, torch.tensor([[1, 2], [3, 4], [5, 6]]))


# ---- rules of the user's


@pytest.fixture
def restored() -> Iterator[None]:
    """Whatever a test registers is gone after it."""
    before = dict(RULES._rules)
    yield
    RULES._rules.clear()
    RULES._rules.update(before)


def sine(x: mp.Moments) -> mp.Moments:
    """Exact for Gaussian x."""
    shrink = (-x.variance / 2).exp()
    mean = torch.sin(x.mean) * shrink
    return mp.Moments(mean, (1 - torch.cos(2 * x.mean) * shrink**4) / 2 - mean * mean)


def sine_network() -> tuple[nn.Module, Tensor]:
    class Sine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(x)

    layers = [nn.Linear(4, 40), nn.Dropout(0.5), nn.Linear(40, 20), Sine(), nn.Linear(20, 2)]
    return nn.Sequential(*layers).double(), values(3, 4)


@pytest.mark.usefixtures("restored")
class TestUserRules:
    def test_without_a_linear_part(self) -> None:
        """Accurate says what to do, and where; auto falls back, and says so; fast does not need it."""
        mp.rule(aten.sin.default, override=True)(sine)
        model, x = sine_network()
        with pytest.raises(mp.MissingRuleError, match="give it elementwise=True or local=") as error:
            mp.convert(model, x, "accurate")
        assert error.value.places[0].module == "3"
        assert error.value.places[0].operator == "aten.sin.default"
        fast = mp.convert(model, x, "fast")(x)
        with pytest.warns(mp.FidelityNote, match="give it elementwise=True or local="):
            bnn = mp.convert(model, x)
        torch.testing.assert_close(bnn(x).variance, fast.variance)

    def test_elementwise_finds_the_gain(self) -> None:
        """The same covariance as with the gain given."""
        model, x = sine_network()
        mp.rule(aten.sin.default, elementwise=True, override=True)(sine)
        (derived,) = accurate(model, x)

        def local(out: mp.Moments, x: mp.Moments) -> Elementwise:
            gain = torch.cos(x.mean) * (-x.variance / 2).exp()
            return Elementwise(gain, out.variance - gain**2 * x.variance)

        mp.rule(aten.sin.default, local=local, override=True)(sine)
        (given,) = accurate(model, x)
        torch.testing.assert_close(derived.mean, given.mean)
        torch.testing.assert_close(derived.covariance, given.covariance)

    def test_elementwise_agrees_with_sampling(self) -> None:
        """Standard deviations within 5 %, covariance within 5 % of the product of two."""
        model, x = sine_network()
        mp.rule(aten.sin.default, elementwise=True, override=True)(sine)
        (out,) = accurate(model, x)
        samples = mp.monte_carlo(model, x, n_samples=20_000).samples
        for i in range(3):
            true = torch.cov(samples[:, i].T)
            std = true.diagonal().sqrt()
            assert ((out.std[i] / std - 1).abs() <= 0.05).all()
            assert ((out.covariance[i] - true).abs() <= 0.05 * torch.outer(std, std)).all()

    def test_linear_part_of_several_inputs(self) -> None:
        """`local` of an operator with two random inputs: here their mean, under the name of maximum."""
        from momentprop.rules.local import Linear

        def local(out: mp.Moments, x: mp.Moments, y: mp.Moments) -> Linear:
            return Linear(lambda cotangent: [cotangent / 2, cotangent / 2])

        @mp.rule(aten.maximum.default, local=local, override=True)
        def middle(x: mp.Moments, y: mp.Moments) -> mp.Moments:
            return mp.Moments((x.mean + y.mean) / 2, (x.variance + y.variance) / 4)

        x = values(2, 3)
        a, b = nn.Linear(3, 3), nn.Linear(3, 2)
        model = Model(lambda m, x: (lambda y: m.b(torch.maximum(y, m.a(y))))(m.drop(x)), a=a, b=b).eval()
        same = Model(lambda m, x: (lambda y: m.b((y + m.a(y)) / 2))(m.drop(x)), a=a, b=b).eval()
        torch.testing.assert_close(accurate(model, x)[0].covariance, accurate(same, x)[0].covariance)
