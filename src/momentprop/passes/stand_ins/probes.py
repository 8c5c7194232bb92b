"""Makes fixed deviations that stand for independent noise on every element of an operator's inputs.

Elements of one sample are numbered over all inputs, column after column. The batch, whose size is open, is
not: samples get the same deviations, with a sign of their own. Signs are read off a hash of the number, so
they are the same in every call. What depends on them is unchanged when all deviations of a sample change
sign; so a sample's result does not depend on its place in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_MOST_GROUPS = 64
_PRIME = 61  # groups of more elements: neighbours in a dimension of usual size are in different ones
_MOST_COLUMNS = 4096
_ROUNDS = 5


@dataclass(frozen=True)
class Columns:
    """The columns of one input: numbered along its dimensions of fixed size."""

    start: int
    sizes: tuple[int | None, ...]  # of its dimensions; None where that is open

    @property
    def count(self) -> int:
        return math.prod([s for s in self.sizes if s is not None])

    @staticmethod
    def of(shapes: Sequence[Sequence[Any]]) -> list[Columns]:
        """Number the columns of inputs of these shapes; sizes that are not numbers are open."""
        found: list[Columns] = []
        start = 0
        for shape in shapes:
            found.append(Columns(start, tuple(s if isinstance(s, int) else None for s in shape)))
            start += found[-1].count
        return found

    def numbers(self, device: torch.device) -> Tensor:
        """The column of every element; dimensions of open size have size 1 here."""
        numbers = torch.arange(self.start, self.start + self.count, device=device)
        return numbers.reshape([1 if s is None else s for s in self.sizes])

    def sample_signs(self, like: Tensor) -> Tensor | float:
        """Return -1 or 1, as good as random, along the dimensions of open size."""
        signs: Any = 1.0
        for dim, size in enumerate(self.sizes):
            if size is None:
                along = _signs(torch.arange(like.shape[dim], device=like.device)).to(like.dtype)
                signs = signs * along.reshape([-1 if d == dim else 1 for d in range(like.dim())])
        return signs


def groups(columns: Sequence[Columns]) -> int:
    """Say into how many groups columns are put: one each, as long as there are few."""
    count = sum([c.count for c in columns])
    return count if count <= _MOST_GROUPS else _PRIME


Deviations = Callable[[int], list[Tensor]]  # the ith, of all inputs: made when asked for, they are large


def grouped(stds: Sequence[Tensor], columns: Sequence[Columns]) -> Deviations:
    """Make deviations of all inputs for every group of columns: std times a sign there, 0 elsewhere.

    The squares of what a linear map makes of them add up to the variance of its output, on average over
    signs; exactly, where an output depends on at most one column of each group.
    """
    n_groups = groups(columns)
    numbers = [c.numbers(std.device) for c, std in zip(columns, stds, strict=True)]
    signed = [
        std * _signs(n).to(std.dtype) * c.sample_signs(std)
        for std, n, c in zip(stds, numbers, columns, strict=True)
    ]
    return lambda group: [
        torch.where(n % n_groups == group, s, 0.0) for s, n in zip(signed, numbers, strict=True)
    ]


def sampled(stds: Sequence[Tensor], columns: Sequence[Columns], table: Tensor) -> Deviations:
    """Make the deviations of all inputs for every row of a table of points."""
    width = table.shape[1]
    numbers = [c.numbers(std.device) for c, std in zip(columns, stds, strict=True)]
    signed = [std * c.sample_signs(std) for std, c in zip(stds, columns, strict=True)]
    tables = [table.to(std.device, std.dtype) for std in stds]
    return lambda k: [  # columns beyond the table: its own, in another order
        s * t[(k + n // width) % table.shape[0], n % width]
        for s, t, n in zip(signed, tables, numbers, strict=True)
    ]


def points(pairs: int, columns: Sequence[Columns]) -> Tensor:
    """[pairs, columns]: together with their negatives, points of standard normal variables.

    Every column is a shuffle of the normal distribution's quantiles, scaled to mean square 1. Columns of one
    block, half as many as there are pairs, are uncorrelated to 0.05 where there are 32 pairs; others as
    chance has it (rms 0.16).
    """
    n_columns = min(sum([c.count for c in columns]), _MOST_COLUMNS)
    generator = torch.Generator("cpu").manual_seed(0)
    level = (torch.arange(pairs, dtype=torch.float64, device="cpu") + 0.5) / pairs
    quantiles = torch.erfinv(level) * 2**0.5
    quantiles = quantiles / quantiles.square().mean().sqrt()
    order = torch.rand(n_columns, pairs, generator=generator, device="cpu").argsort(1)
    signs = torch.randint(0, 2, (n_columns, pairs), generator=generator, device="cpu") * 2 - 1
    blocks = list((quantiles[order] * signs).split(max(pairs // 2, 1)))
    for i, block in enumerate(blocks):
        for _ in range(_ROUNDS):  # made orthogonal, then quantiles again, in the same order
            q, r = torch.linalg.qr(block.T)
            block = (q * r.diagonal().sign()).T
            block = quantiles[block.abs().argsort(1).argsort(1)] * block.sign()
        blocks[i] = block
    return torch.cat(blocks).T


def _signs(numbers: Tensor) -> Tensor:
    """A sign for every number, as good as random: one bit of a 32-bit hash (Wellons 2018)."""
    bits = numbers + 1
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits = ((bits ^ (bits >> shift)) * factor) & 0xFFFFFFFF
    return 1 - 2 * ((bits >> 16) & 1)
