"""Random networks from the supported layers, for hypothesis."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

Shape = tuple[int, ...]  # without the batch
Draw = Callable[[st.SearchStrategy[Any]], Any]
BATCH = 3

probabilities = st.sampled_from([0.05, 0.1, 0.3, 0.5, 0.9])
small = st.integers(1, 3)


class Apply(nn.Module):
    """A function as a layer, named for messages."""

    def __init__(self, function: Callable[[Tensor], Tensor], name: str) -> None:
        super().__init__()
        self.function, self.name = function, name

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def extra_repr(self) -> str:
        return self.name


class Residual(nn.Module):
    """x + f(x), or [x, f(x)] where shapes differ; f may be used twice."""

    def __init__(self, inner: nn.Module, twice: bool, join: str) -> None:
        super().__init__()
        self.inner, self.twice, self.join = inner, twice, join

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if y.shape != x.shape:
            return torch.cat([x.flatten(1), y.flatten(1)], 1)
        if self.twice:
            y = self.inner(y)  # the same module again
        return {"add": x + y, "sub": x - y, "cat": torch.cat([x, y], 1)}[self.join]


def _norm(cls: Any, channels: int) -> nn.Module:
    norm = cls(channels)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.running_mean)
    nn.init.uniform_(norm.running_var, 0.2, 2.0)
    return norm


def _conv(draw: Draw, cls: Any, shape: Shape) -> nn.Module:
    channels, *sizes = shape
    groups = draw(st.sampled_from([g for g in (1, 2, channels) if channels % g == 0]))
    dilation = draw(st.integers(1, min(2, *sizes)))  # else windows may lie in the padding, whatever x is
    kernel = draw(st.integers(1, 3))
    fits = min(sizes) >= dilation * (kernel - 1) + 1
    same = draw(st.booleans()) or not fits
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    if min(sizes) < 3:
        mode = "zeros"
    return cls(
        channels,
        groups * draw(small),
        kernel,
        stride=1 if same else draw(st.integers(1, 2)),
        padding="same" if same else draw(st.integers(0, kernel // 2)),
        dilation=dilation if same else 1,
        groups=groups,
        padding_mode=mode if fits else "zeros",
    )


def _max_pool(draw: Draw, n: int, shape: Shape) -> nn.Module:
    kernel = draw(st.integers(1, min(3, *shape[1:])))
    return [nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d][n - 1](
        kernel,
        stride=draw(st.sampled_from([None, 1, 2])),
        padding=draw(st.integers(0, kernel // 2)),
        ceil_mode=draw(st.booleans()),
    )


def _avg_pool(draw: Draw, n: int, shape: Shape) -> nn.Module:
    kernel = draw(st.integers(1, min(3, *shape[1:])))
    return [nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d][n - 1](
        kernel,
        stride=draw(st.sampled_from([None, 1, 2])),
        padding=draw(st.integers(0, kernel // 2)),
        ceil_mode=draw(st.booleans()),
        count_include_pad=draw(st.booleans()),
    )


def _affine(draw: Draw) -> nn.Module:
    a = draw(st.sampled_from([-2.0, -0.5, 0.0, 1.0, 3.0]))
    return Apply(
        draw(st.sampled_from([lambda x: x * a, lambda x: a - x, lambda x: x / 4 + a, lambda x: -x])),
        f"affine {a}",
    )


def _reshape(draw: Draw, shape: Shape) -> nn.Module:
    n = math.prod(shape)
    last = draw(st.sampled_from([d for d in range(1, min(n, 8) + 1) if n % d == 0]))
    choices: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        ("view", lambda x: x.reshape(x.shape[0], n // last, last)),
        ("flatten", lambda x: x.flatten(1)),
        ("transpose", lambda x: x.transpose(1, -1)),
        ("slice", lambda x: x[:, : max(1, shape[0] // 2)]),
        ("flip, roll", lambda x: x.flip(1).roll(1, -1)),
        ("stack", lambda x: torch.stack([x, 2 * x], 1).flatten(1, 2)),
        ("pad", lambda x: F.pad(x, (1, 2), value=0.5)),
        ("split", lambda x: torch.cat(x.split(1, dim=-1)[::-1], -1)),
        ("index", lambda x: x[:, torch.tensor([0, shape[0] - 1, 0])]),
        ("expand", lambda x: x.unsqueeze(1).expand(-1, 2, *[-1] * (x.dim() - 1)).flatten(1, 2).clone()),
        ("unfold", lambda x: x.unfold(1, 1, 1).squeeze(-1).clone()),
    ]
    name, function = draw(st.sampled_from(choices))
    return Apply(function, name)


def _reduce(draw: Draw) -> nn.Module:
    keep = draw(st.booleans())
    name, function = draw(
        st.sampled_from(
            [
                ("mean", lambda x: x.mean(-1, keepdim=keep or x.dim() == 2)),
                ("sum", lambda x: x.sum(1, keepdim=True)),
                ("cumsum", lambda x: x.cumsum(1)),
            ]
        )
    )
    return Apply(function, name)


NOISE = ("dropout", "channel_dropout")
NOT_LINEAR = (*NOISE, "relu", "max_pool", "softmax")


def layer(draw: Draw, shape: Shape, depth: int, without: tuple[str, ...] = ()) -> nn.Module:
    """One random layer that accepts [batch, *shape]."""
    n = len(shape) - 1
    kinds = ["relu", "dropout", "affine", "reshape", "linear", "reduce"]
    kinds += ["residual"] if depth > 0 else []
    kinds += ["conv", "max_pool", "avg_pool", "adaptive", "norm", "channel_dropout"] if 1 <= n <= 3 else []
    kinds += ["norm", "softmax"] if n == 0 else []
    kind = draw(st.sampled_from([k for k in kinds if k not in without]))
    match kind:
        case "relu":
            return nn.ReLU(inplace=draw(st.booleans()))
        case "dropout":
            return nn.Dropout(draw(probabilities))
        case "channel_dropout":
            return [nn.Dropout1d, nn.Dropout2d, nn.Dropout3d][n - 1](draw(probabilities))
        case "affine":
            return _affine(draw)
        case "reshape":
            return _reshape(draw, shape)
        case "linear":
            return nn.Linear(shape[-1], draw(st.integers(1, 6)), bias=draw(st.booleans()))
        case "reduce":
            return _reduce(draw)
        case "softmax":
            return draw(st.sampled_from([nn.Softmax, nn.LogSoftmax]))(-1)
        case "conv":
            return _conv(draw, [nn.Conv1d, nn.Conv2d, nn.Conv3d][n - 1], shape)
        case "max_pool":
            return _max_pool(draw, n, shape)
        case "avg_pool":
            return _avg_pool(draw, n, shape)
        case "adaptive":
            pool = [nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d][n - 1]
            return pool(draw(st.integers(1, 4)))
        case "norm":
            return _norm([nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d][n], shape[0])
        case _:
            inner = nn.Sequential(layer(draw, shape, 0, without))
            return Residual(inner, draw(st.booleans()), draw(st.sampled_from(["add", "sub", "cat"])))


def output_shape(module: nn.Module, shape: Shape) -> Shape:
    with torch.no_grad():
        return tuple(module.eval()(torch.zeros(BATCH, *shape)).shape[1:])


input_shapes = st.one_of(
    st.tuples(st.integers(1, 6)),
    st.tuples(small, st.integers(2, 8)),
    st.tuples(small, st.integers(2, 7), st.integers(2, 7)),
    st.tuples(small, *[st.integers(2, 4)] * 3),
)


@st.composite
def networks(draw: Draw) -> tuple[nn.Sequential, Shape]:
    """A network of 1 to 8 layers with at least one dropout, and the shape of its input."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    shape = draw(input_shapes)
    depth = draw(st.integers(1, 8))
    place = draw(st.integers(0, depth - 1))  # of a dropout that is always there
    layers: list[nn.Module] = []
    current: Shape = shape
    for i in range(depth):
        new = nn.Dropout(draw(probabilities)) if i == place else layer(draw, current, 1)
        after = output_shape(new, current)
        if 0 in after or math.prod(after) > 2000 or not after:
            continue
        layers.append(new)
        current = after
    return nn.Sequential(*layers).eval(), shape


@st.composite
def linear_after_dropout(draw: Draw) -> tuple[nn.Module, nn.Module, Shape]:
    """A dropout, of elements or of channels, and a linear network of 1 to 6 layers to follow it."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    shape = draw(input_shapes)
    of_channels = [nn.Dropout1d, nn.Dropout2d, nn.Dropout3d][len(shape) - 2 : len(shape) - 1]
    dropout = draw(st.sampled_from([nn.Dropout, *of_channels] if len(shape) > 1 else [nn.Dropout]))
    layers: list[nn.Module] = []
    current: Shape = shape
    for _ in range(draw(st.integers(1, 6))):
        new = layer(draw, current, 1, NOT_LINEAR)
        after = output_shape(new, current)
        if 0 in after or math.prod(after) > 500 or not after:
            continue
        layers.append(new)
        current = after
    return dropout(draw(probabilities)), nn.Sequential(*layers).eval(), shape


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    first, second = x.chunk(2, -1)
    return first, second


# Exact for independent Gaussian inputs, which outputs no longer are, but still independent of each other.
EXACT = [
    nn.ReLU(),
    nn.MaxPool2d((1, 2)),
    nn.MaxPool2d((2, 1)),
    nn.LeakyReLU(0.2),
    nn.Hardtanh(-0.5, 1.5),
    nn.Softshrink(0.3),
    Apply(torch.abs, "abs"),
    Apply(torch.sin, "sin"),
    Apply(torch.square, "square"),
    Apply(lambda x: torch.mul(*_halves(x)), "product"),
    Apply(lambda x: torch.maximum(*_halves(x)), "maximum"),
    Apply(lambda x: torch.minimum(*_halves(x)), "minimum"),
]


@st.composite
def one_nonlinearity(draw: Draw) -> tuple[nn.Sequential, Shape]:
    """Networks whose output moments the rules give exactly, for independent Gaussian inputs.

    Element-by-element layers keep the inputs independent and Gaussian up to the one nonlinearity, and
    independent up to the one layer that mixes them.
    """
    torch.manual_seed(draw(st.integers(0, 2**16)))
    shape = (draw(small), draw(st.sampled_from([2, 4, 6])), draw(st.sampled_from([2, 4])))
    channels = shape[0]

    def norm() -> nn.Module:
        """Neither shifts nor shrinks so much that a unit is hardly ever on."""
        made = _norm(nn.BatchNorm2d, channels)
        nn.init.normal_(made.running_mean, std=0.3)
        nn.init.uniform_(made.weight, 0.5, 1.5)
        return made

    def elementwise(may_drop: bool) -> list[nn.Module]:
        kinds = ["affine", "norm", "none"] + (["dropout"] if may_drop else [])
        made = {
            "affine": lambda: Apply(lambda x: x * 1.5 - 0.25, "affine"),
            "norm": norm,
            "dropout": lambda: nn.Dropout(draw(probabilities)),
            "none": nn.Identity,
        }
        return [made[draw(st.sampled_from(kinds))]() for _ in range(2)]

    nonlinear: nn.Module = draw(st.sampled_from(EXACT))
    before, after = elementwise(False), elementwise(True)
    features = math.prod(output_shape(nonlinear, shape))
    mixing = draw(
        st.sampled_from(
            [
                nn.Sequential(nn.Flatten(), nn.Linear(features, 3)),
                nn.Conv2d(channels, 2, 3, padding=1),
                nn.AvgPool2d(2, padding=1, count_include_pad=False),
                nn.AdaptiveAvgPool2d(1),
                Apply(lambda x: x.sum((1, 2)), "sum"),
            ]
        )
    )
    return nn.Sequential(*before, nonlinear, *after, mixing).eval(), shape
