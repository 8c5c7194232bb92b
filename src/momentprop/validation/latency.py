"""Measures what each method costs on this machine, in units of one plain pass.

Nothing is compiled, and torch keeps its number of threads. Methods take turns, so that a busy machine hits
all of them alike; the ratio of medians is reported.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from momentprop.sample import monte_carlo
from momentprop.validation.inputs import Inputs

MC_SAMPLES = 50
_SECONDS = 2.0
_ROUNDS = 3
_SHORT = 0.1  # seconds


@dataclass(frozen=True)
class LatencyRow:
    """Holds the times of one batch size."""

    batch: int
    plain_seconds: float
    ratios: dict[str, float]


def measure(
    model: nn.Module, networks: dict[str, nn.Module], inputs: Inputs, batches: tuple[int, ...] = (1, 32)
) -> list[LatencyRow]:
    rows = []
    first = next(iter(networks.values()))
    sizes = sorted({min(size, len(inputs)) for size in batches})
    for size in sizes:
        given = inputs.first(size).tensors
        methods: dict[str, Callable[[], object]] = {"plain": lambda g=given: model(*g)}  # type: ignore[misc]
        for name, network in networks.items():
            methods[name] = lambda g=given, n=network: n(*g)  # type: ignore[misc]
        methods[f"MC, {MC_SAMPLES} samples"] = lambda g=given: monte_carlo(  # type: ignore[misc]
            first, g, n_samples=MC_SAMPLES, keep_samples=False
        )
        with torch.no_grad():
            times = _take_turns(methods)
        plain = times.pop("plain")
        rows.append(LatencyRow(size, plain, {name: t / plain for name, t in times.items()}))
    return rows


def _take_turns(methods: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds per call; a short call finds the caches of others first, which does not count."""
    times: dict[str, list[float]] = {name: [] for name in methods}
    end = time.perf_counter() + _SECONDS
    while time.perf_counter() < end or len(times["plain"]) < _ROUNDS:
        for name, function in methods.items():
            if not times[name] or times[name][-1] < _SHORT:
                function()
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}
