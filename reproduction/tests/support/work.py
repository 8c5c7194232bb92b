"""Units of work for the tests of executors, in a module that another process can import."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from momentprop_reproduction.running.units import Workspace


@dataclass(frozen=True)
class Settings:
    size: int = 40
    rates: tuple[float, ...] = (0.1, 0.2)


def train(settings: Settings, seed: int, where: Path | None, workspace: Workspace) -> dict[str, Any]:
    """Sums whose last digits depend on the number of threads and on the global random state."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(settings.size, 100_000, generator=generator)
    noise = torch.randn(3)
    workspace.save("weights", {"noise": noise}, seed=seed)
    for i in range(3):
        workspace.report(i + 1, 3, "epochs")
    return {"sum": x.sum().item(), "global": noise.tolist(), "threads": torch.get_num_threads()}


def evaluate(workspace: Workspace, names: list[str]) -> dict[str, Any]:
    found = {name: workspace.of(name).load("weights") for name in names}
    return {name: tensors["noise"].tolist() for name, tensors in found.items() if tensors is not None}


def die_first(workspace: Workspace, times: int) -> dict[str, Any]:
    """Kill the own process this many times, as the system does when memory runs out."""
    attempts = workspace.folder / "attempts"
    n = len(attempts.read_text()) if attempts.exists() else 0
    attempts.write_text("x" * (n + 1))
    if n < times:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"deaths": n}


def fail(workspace: Workspace, message: str) -> dict[str, Any]:
    raise RuntimeError(message)


def sleep(workspace: Workspace, seconds: float) -> dict[str, Any]:
    (workspace.folder / "pid").write_text(str(os.getpid()))
    workspace.report(1, 4, "asleep")
    time.sleep(seconds)
    return {"slept": seconds}


def no_json(workspace: Workspace) -> dict[str, Any]:
    return {"value": float("nan")}
