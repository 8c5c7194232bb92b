"""Random networks with branches: residual, concatenated, gated, compared, divided, nested in each other."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from blocks import block, noise
from networks import NOISE, Draw, Shape, layer, output_shape, small
from small_noise import SmallNoise

MOST_ELEMENTS = 400  # per sample, of any value

input_shapes = st.one_of(
    st.tuples(st.integers(1, 12)),
    st.tuples(st.integers(1, 6), st.integers(1, 8)),
    st.tuples(small, st.integers(2, 8), st.integers(2, 8)),
    st.tuples(small, *[st.integers(2, 4)] * 3),
)


class Branches(nn.Module):
    """Two branches of one value, joined; where their shapes differ, concatenated."""

    def __init__(self, first: nn.Module, second: nn.Module, join: str) -> None:
        super().__init__()
        self.first, self.second, self.join = first, second, join

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.first(x), self.second(x)
        if a.shape != b.shape:
            if a.shape[2:] == b.shape[2:]:
                return torch.cat([a, b], 1)
            return torch.cat([a.flatten(1), b.flatten(1)], 1)
        match self.join:
            case "add":
                return a + 0.5 * b
            case "gate":
                return a * b.sigmoid()
            case "product":
                return a * b.clamp(-2, 2)
            case "maximum":
                return torch.maximum(a, b)
            case "minimum":
                return torch.minimum(a, b)
            case "divide":
                return a / (F.softplus(b) + 0.5)
            case "stack":
                return torch.stack([a, b], 1).flatten(1, 2)
            case _:
                return torch.cat([a, b], -1)

    def extra_repr(self) -> str:
        return self.join


JOINS = ["add", "gate", "product", "maximum", "minimum", "divide", "stack", "cat"]


def _source(draw: Draw, shape: Shape, calm: bool) -> nn.Module:
    return SmallNoise() if calm else noise(draw, shape)


def _part(draw: Draw, shape: Shape, depth: int, calm: bool) -> nn.Module:
    kind = draw(st.sampled_from(["layer", "block", "block", "source", "branches", "branches"]))
    if kind == "branches" and depth > 0:
        first = _chain(draw, shape, depth - 1, calm, draw(st.integers(1, 3)))[0]
        residual = draw(st.booleans())
        second = nn.Identity() if residual else _chain(draw, shape, depth - 1, calm, draw(small))[0]
        return Branches(first, second, draw(st.sampled_from(JOINS)))
    if kind == "layer":
        return layer(draw, shape, 0, NOISE if calm else ())
    return _source(draw, shape, calm) if kind == "source" else block(draw, shape, calm)


def _chain(draw: Draw, shape: Shape, depth: int, calm: bool, length: int) -> tuple[nn.Sequential, Shape]:
    """Parts one after the other, without those whose output is empty or large."""
    parts: list[nn.Module] = []
    for _ in range(length):
        new = _part(draw, shape, depth, calm)
        after = output_shape(new, shape)
        if not after or 0 in after or math.prod(after) > MOST_ELEMENTS:
            continue
        parts.append(new)
        shape = after
    return nn.Sequential(*parts), shape


@st.composite
def graphs(draw: Draw, calm: bool = False) -> tuple[nn.Sequential, Shape]:
    """A network with branches up to three deep, and the shape of its input; calm: with small noise only."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    shape = draw(input_shapes)
    before, current = _chain(draw, shape, 1, calm, draw(st.integers(0, 1)))
    source = _source(draw, current, calm)
    after, current = _chain(draw, current, 3, calm, draw(st.integers(1, 5)))
    head = [nn.Flatten(), nn.Linear(math.prod(current), 3)] if calm or draw(st.booleans()) else []
    network = nn.Sequential(*before, source, *after, *head).eval()
    # In eval mode noise returns its input, and a branch that writes to it changes the other's: then training
    # changes more than noise, of which conversion warns. And a calm network is differentiated.
    for part in network.modules():
        for module in part.modules() if calm or isinstance(part, Branches) else ():
            if hasattr(module, "inplace"):
                module.inplace = False
    return network, shape
