"""Activations like ReLU move in front of dropout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import momentprop as mp
from momentprop.capture.trace import trace
from momentprop.graph.ops import DROPOUTS
from momentprop.passes.rewrites import REWRITES
from momentprop.passes.rewrites.activate_before_dropout import ACTIVATE_BEFORE_DROPOUT
from passed import operators, passed, run


class TestActivateBeforeDropout:
    @pytest.mark.parametrize("activation", [nn.ReLU(), nn.LeakyReLU(0.1), nn.PReLU(3)], ids=str)
    @pytest.mark.parametrize("dropout", [nn.Dropout, nn.Dropout1d])
    def test_dropout_waits(self, activation: nn.Module, dropout: Any) -> None:
        model = nn.Sequential(dropout(0.4), activation).double()
        x = torch.randn(4, 3, 5, dtype=torch.float64)
        made = trace(model, x)
        rewritten = passed(made, REWRITES)
        assert operators(rewritten)[-1] in DROPOUTS
        for masked in (False, True):
            before, after = (run(m, model, (x,), masked)[0] for m in (made, rewritten))
            torch.testing.assert_close(after, before)
        out = mp.convert(model, x, fidelity="fast")(x)
        with torch.no_grad():
            torch.testing.assert_close(out.mean, activation(x))
            torch.testing.assert_close(out.variance, activation(x) ** 2 * 0.4 / 0.6)

    def test_only_where_it_may(self) -> None:
        class Both(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                y = F.dropout(x, 0.4, True)
                return y.relu() + y

        for model in (
            Both(),
            nn.Sequential(nn.Dropout(0.4), nn.ELU()),
            nn.Sequential(nn.AlphaDropout(0.4), nn.ReLU()),
        ):
            made = trace(model, torch.randn(2, 3))
            assert operators(passed(made, (ACTIVATE_BEFORE_DROPOUT,))) == operators(made)
