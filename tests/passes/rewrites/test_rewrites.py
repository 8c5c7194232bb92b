"""Every rewrite is exact, whatever dropout drops; and all of them are done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import momentprop as mp
from momentprop.network import inside
from networks import BATCH, Apply, Shape, networks
from passed import (
    CONVOLUTIONS,
    NORM,
    POOLS,
    RELU,
    RESHAPES,
    Block,
    count,
    images,
    norm,
    norm_of,
    pool_of,
    rewritten,
)
from small import cnn

aten = torch.ops.aten


def test_no_rewrites_in_tier_paper() -> None:
    """Its rules are the paper's, on the network as it was written."""
    x = torch.randn(2, 3, 8, 8)
    model = cnn().eval()
    tiers = ("paper", "fast", "accurate")
    graphs = {tier: inside(mp.convert(model, x, fidelity=tier)).graph for tier in tiers}
    assert count(graphs["paper"], {NORM}) == 1
    assert count(graphs["fast"], {NORM}) == count(graphs["accurate"], {NORM}) == 0


@st.composite
def chains(draw: Callable[[st.SearchStrategy[Any]], Any]) -> tuple[nn.Sequential, Tensor]:
    """Layers that rewrites look for, in any order."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    n = draw(st.integers(1, 3))
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[n - 1]
    padding = st.sampled_from([0, 1])
    kinds: dict[str, Callable[[], nn.Module]] = {
        "convolution": lambda: convolution(3, 3, 3, padding=1, groups=draw(st.sampled_from([1, 3]))),
        "norm": lambda: norm(norm_of(n), 3, draw(st.sampled_from(["mixed", "negative"]))),
        "relu": lambda: nn.ReLU(inplace=draw(st.booleans())),
        "tanh": nn.Tanh,
        "pool": lambda: pool_of(n)(3, stride=draw(padding) + 1, padding=1, ceil_mode=draw(st.booleans())),
        "affine": lambda: Apply(lambda x: 2 - x / 3, "affine"),
        "flatten": lambda: Apply(lambda x: x.flatten(1).reshape(x.shape), "flatten"),
        "dropout": lambda: nn.Dropout(0.5),
    }
    names = draw(st.lists(st.sampled_from(sorted(kinds)), min_size=2, max_size=7))
    return Block(*[kinds[name]() for name in names]), images(n, size=6 - n)


@settings(deadline=None, max_examples=settings.default.max_examples // 2)
@given(chains())
def test_chains_of_layers_are_rewritten_throughout(chain: tuple[nn.Sequential, Tensor]) -> None:
    """The same function; and nothing is left that a rewrite is for."""
    _, after = rewritten(*chain)
    for node in after.graph.nodes:
        source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if source is None or len(source.users) > 1:
            continue
        assert not (node.target in POOLS and source.target in (RELU, NORM, aten.tanh.default))
        assert not (node.target is NORM and source.target in CONVOLUTIONS)
        assert not (node.target in RESHAPES[:2] and source.target in RESHAPES)


# torch says so once per process, for the plain network too
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@settings(deadline=None, max_examples=settings.default.max_examples, suppress_health_check=list(HealthCheck))
@given(networks())
def test_random_networks_stay_the_same_function(network: tuple[nn.Sequential, Shape]) -> None:
    """For idle dropouts, and for masks drawn at random."""
    model, shape = network
    rewritten(model, torch.randn(BATCH, *shape, dtype=torch.float64))
