"""Collects what to validate on: batches of a loader as one set of inputs and targets, checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from momentprop.errors import InputError
from momentprop.predict.batches import Batch
from momentprop.validation.batch_first import BatchDim, moved

BATCH = 50  # inputs that go through a network at once
TASKS = ("classification", "regression", "moments")


@dataclass(frozen=True)
class Inputs:
    """Holds inputs of the model, each [n, ...], their names if it wants them, and targets [n, ...] if any."""

    tensors: tuple[Tensor, ...]
    targets: Tensor | None = None
    names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.tensors[0])

    def first(self, count: int) -> Inputs:
        targets = None if self.targets is None else self.targets[:count]
        return Inputs(tuple([t[:count] for t in self.tensors]), targets, self.names)

    def batches(self, size: int) -> Iterator[tuple[Tensor, ...]]:
        yield from zip(*(t.split(size) for t in self.tensors), strict=True)


def collect(
    loader: Iterable[Any], most: int, targets: bool, what: str = "the data", batch_dim: BatchDim = 0
) -> Inputs:
    """Collect the first `most` inputs. `Batch.of` says what a batch may be.

    The inputs have their batch in `batch_dim`; here it comes first.
    """
    if isinstance(loader, (Tensor, str, bytes, dict)) or not isinstance(loader, Iterable):
        raise InputError(
            f"{what} must give batches, such as a DataLoader or a list of (x, y), "
            f"not be a {type(loader).__name__}"
        )
    parts: list[tuple[Tensor, ...]] = []
    count, names = 0, tuple[str, ...]()
    for number, given in enumerate(loader):
        batch, where = Batch.of(given, targets), f"batch {number} of {what}"
        names = names or batch.names
        members = _members(batch.in_order(names), targets, where, batch_dim)
        if parts:
            _check_alike(parts[0], members, number, what)
        parts.append(members)
        count += len(members[0])
        if count >= most:
            break
    if count == 0:
        raise InputError(f"{what} is empty: it gave no inputs")
    tensors = [torch.cat(column)[:most] for column in zip(*parts, strict=True)]
    joined = tensors.pop() if targets else None
    for i, tensor in enumerate(tensors):
        _check_finite(tensor, f"input {i}" if len(tensors) > 1 else "the inputs", what)
    if joined is not None:
        _check_finite(joined, "the targets", what)
    return Inputs(tuple(tensors), joined, names)


def task_of(targets: Tensor | None, task: str | None) -> str:
    """Tell the task: integers are classes, other numbers a regression; without targets only moments."""
    if task is not None and task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, not {task!r}")
    if targets is None:
        return task or "moments"
    found = task or ("regression" if targets.is_floating_point() else "classification")
    if found == "classification" and targets.is_floating_point():
        raise InputError(f"targets of a classification must be integers, not {targets.dtype}")
    return found


def _members(batch: Batch, targets: bool, where: str, batch_dim: BatchDim) -> tuple[Tensor, ...]:
    """Return the tensors of a batch, the target last, checked."""
    if targets and batch.target is None:
        raise InputError(
            f"{where} has no target; give (x, y), a dictionary with `labels`, or validate(..., targets=False)"
        )
    members = (*batch.inputs, batch.target) if targets else batch.inputs
    wrong = next((m for m in members if not isinstance(m, Tensor)), None)
    if wrong is not None or len(members) == targets:
        raise InputError(f"{where} must hold tensors, not {type(wrong).__name__}")
    if any(t.dim() == 0 for t in members):
        raise InputError(f"{where} holds a tensor without a batch dimension")
    count = len(members) - targets
    members = (*moved(members[:count], batch_dim), *members[count:])
    if len({len(t) for t in members}) > 1:
        sizes = " and ".join(str(len(t)) for t in members)
        raise InputError(f"{where} holds tensors of different lengths: {sizes}")
    return members


def _check_alike(first: tuple[Tensor, ...], other: tuple[Tensor, ...], number: int, what: str) -> None:
    shapes, expected = ([(list(t.shape[1:]), t.dtype) for t in part] for part in (other, first))
    if shapes != expected:
        raise InputError(
            f"batch {number} of {what} has other shapes than the first: "
            f"{[s for s, _ in shapes]}, not {[s for s, _ in expected]}"
        )


def _check_finite(tensor: Tensor, name: str, what: str) -> None:
    if not tensor.is_floating_point():
        return
    wrong = ~tensor.isfinite()
    if wrong.any():
        rows = int(wrong.flatten(1).any(1).sum()) if tensor.dim() > 1 else int(wrong.sum())
        raise InputError(f"{name} of {what} hold NaN or infinite values, in {rows} of {len(tensor)} rows")
