"""Branches by chance: known at probability 0 and 1, an error that says what to do in between."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import momentprop as mp
from momentprop.capture.trace import trace
from small import assert_untouched, snapshot

aten = torch.ops.aten

DRAWS: dict[str, Callable[[], Any]] = {
    "torch.rand([])": lambda: torch.rand([]),
    "torch.rand(())": lambda: torch.rand(()),
    "torch.rand(1)": lambda: torch.rand(1),
    "torch.rand(1).item()": lambda: torch.rand(1).item(),
    "random.random()": lambda: random.random(),
    "random.uniform(0, 1)": lambda: random.uniform(0, 1),
    "numpy.random.uniform(0, 1)": lambda: np.random.uniform(0, 1),
    "numpy.random.random()": lambda: np.random.random(),
}


class Encoder(nn.Module):
    """Layers, each left out with probability `layerdrop` while training."""

    def __init__(self, layerdrop: float, draw: Callable[[], Any], in_config: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.dropout, self.draw = nn.Dropout(0.1), draw
        if in_config:
            self.config = SimpleNamespace(encoder_layerdrop=layerdrop)
        else:
            self.layerdrop = layerdrop

    def forward(self, x: Tensor) -> Tensor:
        rate = self.config.encoder_layerdrop if hasattr(self, "config") else self.layerdrop
        for layer in self.layers:
            drawn = self.draw()
            skip = self.training and drawn < rate
            if not skip:
                x = x + self.dropout(layer(x))
        return x


def n_layers(model: nn.Module) -> int:
    made = trace(model, torch.randn(2, 4))
    assert not [n for n in made.graph.nodes if "rand" in n.name]
    return sum(n.target is aten.linear.default for n in made.graph.nodes)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
class TestDraws:
    @pytest.mark.parametrize("in_config", [False, True], ids=["module", "config"])
    def test_zero_keeps_all_layers(self, draw: Callable[[], Any], in_config: bool) -> None:
        model = Encoder(0.0, draw, in_config)
        assert n_layers(model) == 3
        x = torch.randn(2, 4)
        torch.testing.assert_close(mp.convert(model, x, fidelity="fast")(x).mean, model.eval()(x))

    def test_more_is_an_error_that_says_what_to_do(self, draw: Callable[[], Any]) -> None:
        model, x = nn.Sequential(Encoder(0.25, draw)).train(), torch.randn(2, 4)
        before = snapshot(model)
        state, numpy_state = random.getstate(), np.random.get_state()[1].copy()
        with pytest.raises(mp.TraceError, match=r"probability 0\.25") as error:
            trace(model, x)
        assert "0.layerdrop = 0.25. Set it to 0" in str(error.value)
        assert re.search(r"(drawn < rate|self\.draw\(\)|: lambda: )", str(error.value))
        assert_untouched(model, before)
        assert random.getstate() == state
        assert (np.random.get_state()[1] == numpy_state).all()


def test_one_leaves_all_out_unlike_eval_mode_so_that_all_are_kept() -> None:
    assert n_layers(Encoder(1.0, lambda: random.random())) == 3


def test_a_chance_without_layerdrop_names_the_line() -> None:
    class Flips(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if self.training and random.uniform(-1, 3) > 2:
                x = -x
            return x

    with pytest.raises(mp.TraceError, match=r"random\.uniform\(-1, 3\) > 2"):
        trace(Flips(), torch.randn(2, 4))


def test_a_single_number_that_is_noise_stays_noise() -> None:
    """Of a model with LayerDrop, but used otherwise."""

    class Scaled(Encoder):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                x = torch.add(x, torch.rand([])) - torch.full((), 0.5)
            return super().forward(x)

    made = trace(Scaled(0.0, lambda: torch.rand([])), torch.randn(2, 4))
    assert sum(n.target is aten.rand.default for n in made.graph.nodes) == 1
