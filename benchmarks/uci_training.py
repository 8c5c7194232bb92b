"""How much faster do the UCI networks train as a stack than one by one?

    python benchmarks/uci_training.py [--set kin8nm] [--out benchmarks/results/uci_training.json]

Both ways train networks of one set's grid (all splits, drop probabilities and tau) for the same number of
epochs in one run, taking turns. One by one is what one writes in PyTorch: nn.Sequential with nn.Dropout,
mse_loss, Adam with weight decay, a permutation per epoch; with the fastest of Adam's implementations here. It
trains a few of the networks, since all would take hours. What counts is the time per step of one network:
processor time with one thread, which other load on the machine disturbs least. Needs MOMENTPROP_DATA or
downloaded data.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from momentprop_reproduction.data import UciSet, load_uci, uci_names
from momentprop_reproduction.experiments.uci_draws import stream
from momentprop_reproduction.experiments.uci_scaling import Scaling
from momentprop_reproduction.experiments.uci_set import LENGTHSCALE
from momentprop_reproduction.experiments.uci_training import BATCH_SIZE, EPSILON, LEARNING_RATE, Task, train

ALONE = 2  # networks trained one by one, per turn
ADAMS: dict[str, dict[str, bool]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "plain": {"foreach": False},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", dest="names", action="append", choices=uci_names())
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "uci_training.json")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"threads": 1, "torch": torch.__version__, "sets": {}}
    for name in options.names or ["yacht", "kin8nm", "naval", "protein"]:
        result["sets"][name] = compare(load_uci(name), options.turns)
        print(name, json.dumps(result["sets"][name]), flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


def compare(data: UciSet, turns: int) -> dict[str, Any]:
    """Microseconds per step of one network, the best of some turns, and their ratio."""
    n = int(0.8 * len(data.splits[0][0]))
    steps = -(-n // BATCH_SIZE)
    epochs = max(1, 60 // steps)  # a second or so
    count = len(data.splits) * len(data.dropout_rates) * len(data.tau_values)
    best = dict.fromkeys(["stack", *ADAMS], float("inf"))

    def timed(name: str, start: float, networks: int) -> None:
        best[name] = min(best[name], (time.process_time() - start) / (networks * steps * epochs))

    for _ in range(turns):
        tasks = make_tasks(data)
        start = time.process_time()
        train(tasks, data.n_hidden, epochs)
        timed("stack", start, count)
        for name, adam in ADAMS.items():
            start = time.process_time()
            for task in tasks[:ALONE]:
                train_alone(task, data.n_hidden, epochs, adam)
            timed(name, start, ALONE)
    alone = min(best[name] for name in ADAMS)
    all_steps = count * steps * data.n_epochs * 10
    return {
        "networks": count,
        "microseconds_per_step": {name: round(1e6 * seconds, 2) for name, seconds in best.items()},
        "ratio": round(alone / best["stack"], 1),
        "minutes_of_the_grid": {
            "stack": round(all_steps * best["stack"] / 60, 2),
            "alone": round(all_steps * alone / 60, 1),
        },
    }


def make_tasks(data: UciSet) -> list[Task]:
    """The grid of every split, as `uci_set` has it."""
    tasks = []
    for split, (rows, _) in enumerate(data.splits):
        fitted = rows[: int(0.8 * len(rows))]
        scaling = Scaling.of(data.features[fitted], data.target[fitted])
        x: Tensor = scaling.inputs(data.features[fitted]).float()
        y: Tensor = scaling.outputs(data.target[fitted]).float()
        for rate in data.dropout_rates:
            for tau in data.tau_values:
                decay = LENGTHSCALE**2 * (1 - rate) / (2 * len(y) * tau)
                tasks.append(Task(x, y, rate, decay, stream(0, split, len(tasks))))
    return tasks


def train_alone(task: Task, n_hidden: int, epochs: int, adam: dict[str, bool]) -> None:
    """An ordinary training."""
    p, y = task.drop_probability, task.target.unsqueeze(1)
    layers = [nn.Dropout(p), nn.Linear(task.features.shape[1], n_hidden), nn.ReLU(), nn.Dropout(p)]
    model = nn.Sequential(*layers, nn.Linear(n_hidden, 1)).train()
    groups: list[dict[str, Any]] = [
        {
            "params": [v for k, v in model.named_parameters() if k.endswith("weight")],
            "weight_decay": 2 * task.decay,
        },
        {"params": [v for k, v in model.named_parameters() if k.endswith("bias")]},
    ]
    optimizer = torch.optim.Adam(groups, LEARNING_RATE, eps=EPSILON, **adam)
    for _ in range(epochs):
        for batch in torch.randperm(len(y)).split(BATCH_SIZE):
            optimizer.zero_grad()
            F.mse_loss(model(task.features[batch]), y[batch]).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
