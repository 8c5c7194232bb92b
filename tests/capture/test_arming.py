"""Which modules of the replica that is traced are in training mode."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from momentprop.capture.arming import armed, is_armed
from small import assert_untouched, cnn, snapshot


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = cnn(), nn.BatchNorm1d(3)


class OwnStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(3))


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Dropout(0.1), True),
        (nn.Dropout2d(0.1), True),
        (nn.AlphaDropout(0.1), True),
        (nn.MultiheadAttention(4, 2), True),
        (nn.LSTM(3, 3), True),
        (nn.TransformerEncoderLayer(4, 2, 4), True),
        (Own(), True),
        (nn.BatchNorm1d(3), False),
        (nn.InstanceNorm1d(3, track_running_stats=True), False),
        (nn.RReLU(), False),
        (nn.Linear(2, 2), False),
        (OwnStatistics(), False),
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_may_drop_is_armed(module: nn.Module, expected: bool) -> None:
    assert is_armed(module) is expected


@pytest.mark.parametrize("training", [False, True])
def test_modes_of_the_replica_alone_change(training: bool) -> None:
    model = Own().train(training)
    model.net[3].train(not training)
    before = snapshot(model)
    twin = armed(model, frozenset({"net.8"}))
    assert twin.training
    assert twin.net[3].training
    assert not twin.net[8].training
    assert not twin.norm.training
    assert_untouched(model, before)


def test_modes_of_scripted_modules() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Dropout(0.5)))).eval()
    assert armed(model)[0].training
    assert not any(module.training for module in model.modules())
