"""Small networks, and a check that a model was left as it was."""

from __future__ import annotations

import torch
from torch import nn


def mlp(p: float = 0.3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(p), nn.Linear(8, 3))


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding="same"),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Dropout2d(0.2),
        nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.4),
        nn.Linear(6 * 4 * 4, 5),
    )


def snapshot(model: nn.Module) -> tuple:
    return (
        {name: module.training for name, module in model.named_modules()},
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        {name: id(p) for name, p in model.named_parameters()},
        {name: len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in model.named_modules()},
        torch.get_rng_state(),
    )


def assert_untouched(model: nn.Module, before: tuple) -> None:
    after = snapshot(model)
    assert before[0] == after[0]
    assert before[1].keys() == after[1].keys()
    for name, tensor in before[1].items():
        assert torch.equal(tensor, after[1][name]), name
    assert before[2:4] == after[2:4]
    assert torch.equal(before[4], after[4])
