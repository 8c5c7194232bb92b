"""Stacked training is the training of each network alone; masks have the probability they should have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from momentprop_reproduction.experiments import uci_training
from momentprop_reproduction.experiments.uci_draws import dropped, glorot, shuffles, stream
from momentprop_reproduction.experiments.uci_training import EPSILON, LEARNING_RATE, Task, train

N_HIDDEN, BATCH = 7, 16


def make_tasks(sizes: list[int], dtype: torch.dtype = torch.float64) -> list[Task]:
    """One network per size, with other drop probabilities and decays, and data shared by equal sizes."""
    data = {}
    for n in sizes:
        generator = torch.Generator().manual_seed(n)
        x = torch.randn(n, 5, generator=generator, dtype=torch.float64)
        data[n] = (x.to(dtype), (torch.sin(x[:, 0]) + 0.3 * x[:, 1]).to(dtype))
    rates = [0.005, 0.1, 0.05, 0.3]
    return [Task(*data[n], rates[i % 4], 1e-3 * i, stream(1, "test", i)) for i, n in enumerate(sizes)]


class Given(nn.Module):
    """Dropout with a given mask."""

    def __init__(self, drop_probability: float) -> None:
        super().__init__()
        self.p = drop_probability
        self.mask = torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask / (1 - self.p)


def train_alone(task: Task, epochs: int, dtype: torch.dtype) -> nn.Sequential:
    """An ordinary loop over an ordinary network with torch's Adam, fed with the same random numbers."""
    n, n_features = task.features.shape
    p, rng = task.drop_probability, task.rng
    model = nn.Sequential(
        Given(p), nn.Linear(n_features, N_HIDDEN), nn.ReLU(), Given(p), nn.Linear(N_HIDDEN, 1)
    ).to(dtype)
    with torch.no_grad():
        model[1].weight.copy_(torch.from_numpy(glorot(rng, n_features, N_HIDDEN).T))
        model[4].weight.copy_(torch.from_numpy(glorot(rng, N_HIDDEN, 1).T))
        model[1].bias.zero_()
        model[4].bias.zero_()
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE, eps=EPSILON)
    at_once = max(1, uci_training._BLOCK // n)
    for first in range(0, epochs, at_once):
        block = min(at_once, epochs - first)
        order = torch.from_numpy(shuffles(rng, block, n))
        inputs = mask(dropped(rng, block * n * n_features, p), block * n * n_features, dtype)
        hidden = mask(dropped(rng, block * n * N_HIDDEN, p), block * n * N_HIDDEN, dtype)
        for epoch in range(block):
            for start in range(0, n, BATCH):
                a, b = epoch * n + start, epoch * n + min(start + BATCH, n)
                model[0].mask = inputs[a * n_features : b * n_features].view(b - a, n_features)
                model[3].mask = hidden[a * N_HIDDEN : b * N_HIDDEN].view(N_HIDDEN, b - a).T
                rows = order[a:b]
                optimizer.zero_grad()
                loss = F.mse_loss(
                    model(task.features[rows].to(dtype)).squeeze(1), task.target[rows].to(dtype)
                )
                (loss + task.decay * sum(model[i].weight.square().sum() for i in (1, 4))).backward()
                optimizer.step()
    return model


def mask(positions: Any, n: int, dtype: torch.dtype) -> Tensor:
    kept = torch.ones(n, dtype=dtype)
    kept[torch.from_numpy(positions)] = 0
    return kept


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-4)])
def test_a_stack_trains_like_each_network_alone(
    dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uci_training, "_BLOCK", 150)  # blocks of several epochs, the last one shorter
    sizes = [50, 50, 51, 50, 16, 51]
    stack = train(make_tasks(sizes), N_HIDDEN, 10, batch_size=BATCH, dtype=dtype)
    for i, task in enumerate(make_tasks(sizes)):
        alone = train_alone(task, 10, dtype).state_dict()
        for name, value in stack.network(i, task.drop_probability).state_dict().items():
            torch.testing.assert_close(value, alone[name], rtol=tolerance, atol=tolerance)


def test_a_network_does_not_depend_on_its_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [40] * 6
    together = train(make_tasks(sizes), N_HIDDEN, 5, batch_size=BATCH, dtype=torch.float64)
    monkeypatch.setattr(uci_training, "_WORKING_SET", 2 * N_HIDDEN * BATCH)  # two at a time
    reports: list[tuple[int, int]] = []
    apart = train(
        make_tasks(sizes),
        N_HIDDEN,
        5,
        batch_size=BATCH,
        dtype=torch.float64,
        progress=lambda done, total: reports.append((done, total)),
    )
    torch.testing.assert_close(together.parameters, apart.parameters, rtol=1e-12, atol=1e-12)
    assert reports[-1] == (6 * 5 * 3, 6 * 5 * 3)
    assert reports == sorted(reports)


def test_training_lowers_the_error() -> None:
    (task,) = make_tasks([200])
    stack = train([task], N_HIDDEN, 400, batch_size=BATCH)
    fitted = stack.network(0, task.drop_probability)(task.features.float()).squeeze(1)
    assert F.mse_loss(fitted, task.target.float()) < 0.1 * task.target.var()


@pytest.mark.parametrize("p", [0.005, 0.1, 0.5, 0.97])
def test_elements_are_dropped_with_probability_p_and_independently(p: float) -> None:
    n, repeats = 50, 20_000
    rng = stream(3, "drops")
    masks = np.zeros((repeats, n))
    for row in masks:
        row[dropped(rng, n, p)] = 1
    error = np.sqrt(p * (1 - p) / repeats)
    assert np.abs(masks.mean(0) - p).max() < 5 * error  # every position, the first and the last too
    # pairs at every distance, and the count's variance, which correlation would change
    for distance in (1, 2, 10, 49):
        both = (masks[:, distance:] * masks[:, : n - distance]).mean()
        size = repeats * (n - distance)
        assert abs(both - p**2) < 6 * np.sqrt((p**2 + 2 * p**3) / size) + 5 / size
    count = masks.sum(1)
    assert abs(count.var() / (n * p * (1 - p)) - 1) < 6 * np.sqrt(
        2 / repeats + 1 / (repeats * n * p * (1 - p))
    )


def test_long_runs_without_a_drop_are_drawn_to_the_end() -> None:
    """The first guess of how many are dropped is sometimes too small; the rest must then be drawn."""
    rng = stream(0)
    counts = [len(dropped(rng, 3, 0.9)) for _ in range(4000)]
    assert abs(np.mean(counts) - 2.7) < 5 * np.sqrt(3 * 0.09 / 4000)
    with pytest.raises(ValueError, match="between 0 and 1"):
        dropped(rng, 3, 0.0)


def test_streams_differ_by_every_part_of_the_key() -> None:
    keys = [(0, "a", 1), (1, "a", 1), (0, "b", 1), (0, "a", 2)]
    first = [stream(*key).random() for key in keys]
    assert len(set(first)) == len(keys)
