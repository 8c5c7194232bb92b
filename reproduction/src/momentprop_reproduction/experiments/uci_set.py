"""One UCI set, from the grid search to the test: the unit of work.

Gal & Ghahramani's protocol, for every split: train one network per drop probability and tau on the first 80 %
of the training part, choose by the likelihood of MC dropout on the other 20 %, train the choice on all of the
training part, test. All networks of a set train as stacks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from momentprop_reproduction.data import UciSet, load_uci
from momentprop_reproduction.experiments.uci_draws import stream
from momentprop_reproduction.experiments.uci_evaluation import REVISION, TIERS, evaluate
from momentprop_reproduction.experiments.uci_sampling import sample_mixture
from momentprop_reproduction.experiments.uci_scaling import Scaling
from momentprop_reproduction.experiments.uci_training import BATCH_SIZE, Stack, Task, train
from momentprop_reproduction.running.units import Workspace

LENGTHSCALE = 1e-2
# seconds of one network's step and of one sample by `uci_sampling`: for the remaining time
_STEP, _EVALUATION = 20e-6, 90e-9


@dataclass(frozen=True, eq=False)
class _Part:
    """The training part of a split, or the share of it that grid points are trained on."""

    features: Tensor  # standardised, float32
    target: Tensor
    scaling: Scaling


def run_set(
    workspace: Workspace,
    *,
    name: str,
    seed: int,
    n_splits: int | None,
    epoch_factor: float,
    n_samples: int,
    validation_samples: int,
    root: Path | None = None,
) -> dict[str, Any]:
    """Everything the table says about one set; finished trainings and tests are kept in the workspace."""
    return _Run(
        workspace, load_uci(name, root), seed, n_splits, epoch_factor, n_samples, validation_samples
    ).result()


class _Run:
    def __init__(
        self,
        workspace: Workspace,
        data: UciSet,
        seed: int,
        n_splits: int | None,
        epoch_factor: float,
        n_samples: int,
        validation_samples: int,
    ) -> None:
        self.workspace, self.data, self.seed = workspace, data, seed
        self.splits = data.splits[:n_splits]
        self.epochs = max(1, round(data.n_epochs * epoch_factor))
        self.n_samples, self.validation_samples = n_samples, validation_samples
        self.grid = [(rate, tau) for rate in data.dropout_rates for tau in data.tau_values]
        fitted = [_n_fitted(train_rows) for train_rows, _ in self.splits]
        wholes = [len(train_rows) for train_rows, _ in self.splits]
        self.work = {
            "grid": sum(map(self._steps, fitted)) * len(self.grid) * _STEP,
            "validation": (sum(wholes) - sum(fitted)) * len(self.grid) * validation_samples * _EVALUATION,
            "final": sum(map(self._steps, wholes)) * _STEP,
            "test": sum(len(test) for _, test in self.splits) * n_samples * 6 * _EVALUATION,
        }

    def result(self) -> dict[str, Any]:
        choices, validation = self._choose()
        tests = self._tests(choices)
        data = self.data
        return {
            "set": data.name,
            "variant": data.variant,
            "n": len(data.target),
            "n_features": data.features.shape[1],
            "n_hidden": data.n_hidden,
            "epochs": self.epochs,
            "drop_probability": [self.grid[c][0] for c in choices],
            "tau": [self.grid[c][1] for c in choices],
            "validation_log_likelihood": validation,
            "methods": [test["methods"] for test in tests],
            "std": _beside_mc([test["std"] for test in tests]),
            "seconds": {
                "predict": tests[0]["seconds"],
                **{phase: self.workspace.load_meta(phase)["seconds"] for phase in ("grid", "final")},
                "validation": sum(
                    self.workspace.load_meta(f"validation-{i}")["seconds"] for i in range(len(self.splits))
                ),
            },
            "n_test": [len(test) for _, test in self.splits],
        }

    def _choose(self) -> tuple[list[int], list[list[float]]]:
        """The grid point of each split, and all likelihoods: mean per observation, in raw units."""
        parts = [self._part(rows[: _n_fitted(rows)]) for rows, _ in self.splits]
        points = [(i, g) for i in range(len(parts)) for g in range(len(self.grid))]
        stack = self._trained("grid", parts, points)
        likelihoods = []
        for i in range(len(parts)):
            self._report("validation", i / len(parts))
            likelihoods.append(self._validated(stack, parts[i], i))
        choices = [values.index(max(values)) for values in likelihoods]  # the first, as Gal has it
        return choices, likelihoods

    def _validated(self, stack: Stack, part: _Part, split: int) -> list[float]:
        """The likelihood of every grid point on the validation part of a split."""
        name = f"validation-{split}"
        if self.workspace.load(name) is None:
            start = time.perf_counter()
            rows, _ = self.splits[split]
            held_out = rows[_n_fitted(rows) :]
            x = part.scaling.inputs(self.data.features[held_out]).float()
            y = part.scaling.outputs(self.data.target[held_out]).float()
            std, values = part.scaling.target_std, []
            for g, (rate, tau) in enumerate(self.grid):
                first, second, bias = (view[split * len(self.grid) + g] for view in stack.views())
                mixture = sample_mixture(
                    (first, second, bias),
                    x,
                    y,
                    drop_probability=rate,
                    noise=1 / (tau * std**2),
                    n_samples=self.validation_samples,
                    rng=stream(self.seed, self.data.name, "validation", split, g),
                )
                values.append(mixture.log_likelihood.mean().item() - math.log(std))
            tensors = {"log_likelihood": torch.tensor(values, dtype=torch.float64)}
            self.workspace.save(name, tensors, seconds=time.perf_counter() - start)
        saved = self.workspace.load(name)
        assert saved is not None
        found: list[float] = saved["log_likelihood"].tolist()
        return found

    def _tests(self, choices: Sequence[int]) -> list[dict[str, Any]]:
        """Return what `evaluate` says about the chosen network of each split."""
        parts = [self._part(rows) for rows, _ in self.splits]
        stack = self._trained("final", parts, list(enumerate(choices)))
        tests = []
        for i, (_, rows) in enumerate(self.splits):
            self._report("test", i / len(parts))
            name = f"test-{i}-revision-{REVISION}"
            if self.workspace.load(name) is None:
                rate, tau = self.grid[choices[i]]
                found = evaluate(
                    stack.network(i, rate),
                    parts[i].scaling,
                    self.data.features[rows],
                    self.data.target[rows],
                    noise=1 / tau,
                    n_samples=self.n_samples,
                    seed=1000 * self.seed + i,
                    repeats=2 if i == 0 else 0,
                )
                self.workspace.save(name, found.pop("std"), **found)
            saved = self.workspace.load(name)
            tests.append(self.workspace.load_meta(name) | {"std": saved})
        self._report("test", 1.0)
        return tests

    def _trained(self, phase: str, parts: Sequence[_Part], points: Sequence[tuple[int, int]]) -> Stack:
        """Train one network for each pair of split and grid point."""
        saved = self.workspace.load(phase)
        if saved is None:
            start = time.perf_counter()
            tasks = [self._task(phase, parts[i], i, g) for i, g in points]
            stack = train(tasks, self.data.n_hidden, self.epochs, progress=self._progress(phase))
            seconds = time.perf_counter() - start
            self.workspace.save(phase, {"parameters": stack.parameters}, seconds=seconds)
            return stack
        return Stack(saved["parameters"], self.data.features.shape[1], self.data.n_hidden)

    def _task(self, phase: str, part: _Part, split: int, point: int) -> Task:
        rate, tau = self.grid[point]
        decay = LENGTHSCALE**2 * (1 - rate) / (2 * len(part.target) * tau)
        rng = stream(self.seed, self.data.name, phase, split, point)
        return Task(part.features, part.target, rate, decay, rng)

    def _part(self, rows: Tensor) -> _Part:
        features, target = self.data.features[rows], self.data.target[rows]
        scaling = Scaling.of(features, target)
        return _Part(scaling.inputs(features).float(), scaling.outputs(target).float(), scaling)

    def _steps(self, n: int) -> int:
        return self.epochs * -(-n // BATCH_SIZE)

    def _progress(self, phase: str) -> Callable[[int, int], None]:
        return lambda done, total: self._report(phase, done / total)

    def _report(self, phase: str, share: float) -> None:
        """Report that so much of a phase is done, and all phases before it."""
        names = list(self.work)
        before = sum(self.work[p] for p in names[: names.index(phase)])
        self.workspace.report(before + share * self.work[phase], sum(self.work.values()), phase)


def _n_fitted(rows: Tensor) -> int:
    """Count the training rows that a grid point is trained on; the rest validates."""
    return int(0.8 * len(rows))


def _beside_mc(stds: Sequence[dict[str, Tensor]]) -> dict[str, dict[str, float]]:
    """Compare std with that of MC dropout by tier, over the test points of all splits: ratio, correlation."""
    sampled = torch.cat([s["MC"] for s in stds])
    table = {}
    for tier in TIERS:
        ours = torch.cat([s[tier] for s in stds])
        low, median, high = (ours / sampled).quantile(torch.tensor([0.05, 0.5, 0.95]).double()).tolist()
        correlations = [torch.corrcoef(torch.stack([s[tier], s["MC"]]))[0, 1].item() for s in stds]
        table[tier] = {
            "ratio_median": median,
            "ratio_5": low,
            "ratio_95": high,
            "correlation": sum(correlations) / len(correlations),  # within a split, then averaged
        }
    return table
