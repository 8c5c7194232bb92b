"""Samples of MC dropout, kept on disk chunk by chunk, so that a run goes on where the last one stopped."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from fidelity_networks import Case
from images import CACHE
from torch import Tensor, nn

import momentprop as mp
from momentprop_reproduction.benchmarking.work import multiply_adds

CHUNK = 500  # samples
BATCH = 100  # inputs sampled at a time: larger batches of images fall out of the caches
# seeds of a chunk's batches count on from here: the samples that are judged must not be among the truth's
SEEDS = {"reference": 0, "independent": 1_000_000}
Advance = Callable[[float], None]


def load_samples(case: Case, role: str, advance: Advance = lambda work: None) -> Tensor:
    """Outputs [samples, inputs, outputs]; members' inputs one after the other. What is missing is drawn."""
    return torch.cat([_member(case, i, role, advance) for i in range(len(case.members))], 1)


def missing_work(case: Case) -> float:
    """Multiply-adds of the chunks that are not on disk yet."""
    work = 0.0
    for index, (model, x) in enumerate(case.members):
        one = multiply_adds(partial(model, x[:1]))
        for role in SEEDS:
            paths = _chunks(case, index, role)
            work += one * len(x) * _count(case, role) / len(paths) * sum(not p.exists() for p in paths)
    return work


def _member(case: Case, index: int, role: str, advance: Advance) -> Tensor:
    model, x = case.members[index]
    paths = _chunks(case, index, role)
    size = _count(case, role) // len(paths)
    bnn = None
    for i, path in enumerate(paths):
        if path.exists():
            continue
        bnn = bnn or mp.convert(model, x[:2], "paper")
        batches = x.split(BATCH)
        one = multiply_adds(partial(model, x[:1]))
        parts = []
        for j, batch in enumerate(batches):
            # compiling takes longer than sampling where there is little to sample
            compiled = one * len(x) * _count(case, role) > 1e12
            seed = SEEDS[role] + i * len(batches) + j
            parts.append(mp.monte_carlo(bnn, batch, size, seed, keep_samples=True, compile=compiled).samples)
            advance(one * len(batch) * size)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp.npy")
        np.save(temporary, torch.cat(parts, 1).numpy())
        temporary.rename(path)
    return torch.from_numpy(np.concatenate([np.load(path) for path in paths]))


def _chunks(case: Case, index: int, role: str) -> list[Path]:
    model, x = case.members[index]
    total = _count(case, role)
    size = min(CHUNK, total)
    folder = CACHE / "fidelity" / f"{case.name}-{index}-{_digest(model, x)}"
    return [folder / f"{role}-seed{SEEDS[role]}-{size}-{i:03}.npy" for i in range(total // size)]


def _count(case: Case, role: str) -> int:
    return case.n_reference if role == "reference" else case.n_independent


def _digest(model: nn.Module, x: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in (*model.state_dict().values(), x):
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()[:12]
