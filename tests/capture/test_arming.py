"""Which modules are in training mode while traced, and that nothing of it is left."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from momentprop.capture.arming import armed, borrowed, is_armed
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
def test_modes_are_put_back(training: bool) -> None:
    model = Own().train(training)
    model.net[3].train(not training)
    before = snapshot(model)
    with armed(model, frozenset({"net.8"})):
        assert model.training
        assert model.net[3].training
        assert not model.net[8].training
        assert not model.norm.training
    assert_untouched(model, before)


def test_modes_are_put_back_after_an_error() -> None:
    model = Own().eval()
    before = snapshot(model)
    with pytest.raises(RuntimeError), armed(model):
        raise RuntimeError
    assert_untouched(model, before)


def test_what_a_borrowed_model_does_is_forgotten() -> None:
    model = Own()
    model.plain, model.items, model.table = torch.zeros(2), [torch.zeros(2)], {"a": 1}
    before, weight = snapshot(model), model.net[0].weight
    states = random.random(), np.random.random()
    random.seed(0)
    np.random.seed(0)
    with borrowed(model, copy_tensors=True):
        assert model.net[0].weight is weight  # parameters are large: they are not copied
        model.norm.running_mean.add_(1)
        model.plain.add_(1)
        model.items[0].add_(1)
        model.items.append(model.plain)
        model.table["b"] = model.plain
        model.extra = 1
        model.register_buffer("new", torch.zeros(1))
        model.net.add_module("more", nn.ReLU())
        model.net[0].register_forward_hook(lambda *_: None)
        torch.rand(3), random.random(), np.random.random()
    assert_untouched(model, before)
    assert not model.plain.any()
    assert [tensor.tolist() for tensor in model.items] == [[0, 0]]
    assert model.table == {"a": 1}
    assert not hasattr(model, "extra")
    drawn = random.random(), np.random.random()
    random.seed(0)
    np.random.seed(0)
    assert drawn == (random.random(), np.random.random()) != states


def test_modes_of_scripted_modules() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Dropout(0.5)))).eval()
    with armed(model):
        assert model[0].training
    assert not any(module.training for module in model.modules())


def test_shared_buffers_stay_shared_while_borrowed() -> None:
    model = nn.Module()
    model.register_buffer("a", torch.zeros(2))
    model.register_buffer("b", model.a)
    with borrowed(model, copy_tensors=True):
        model.a.add_(1)
        assert isinstance(model.b, Tensor)
        assert model.b.all()
    assert not model.a.any()
