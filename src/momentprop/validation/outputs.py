"""Turns outputs of any shape into rows, one layout in which samples, moments and targets compare.

Classes are [n, positions, K], other outputs [n, elements]. Of very many positions or elements evenly spaced
ones are taken, the same for all methods: so memory does not grow with maps, sequences or vocabularies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from momentprop.errors import InputError
from momentprop.predict.outputs import leaves

_MOST_POSITIONS = 64
_MOST_PROBABILITIES = 2**15  # of one input: fewer positions where there are many classes
_MOST_ELEMENTS = 1024
_LEAST = 2.0**-149  # the smallest number of float32: a probability of 0 is one that underflowed

Head = tuple[str, int | None] | None  # what made an output of logits, and the dimension of classes
LOGITS = "logits"  # of a head: nothing did


def one_output(outputs: Any, index: int) -> Any:
    """Return one of the tensors (or Moments) that a model returns, by its position."""
    return list(leaves(outputs).values())[index]


def evenly(count: int, most: int) -> Tensor:
    """Indices of at most so many of `count` elements.

    >>> evenly(10, 4).tolist()
    [0, 3, 6, 9]
    """
    if count <= most:
        return torch.arange(count)
    return torch.linspace(0, count - 1, most, dtype=torch.float64).round().long()


@dataclass(frozen=True)
class Layout:
    """Says how outputs become rows."""

    task: str
    kind: str  # multiclass, binary or multilabel
    head: Head
    shape: tuple[int, ...]  # of one input's outputs

    @staticmethod
    def of(output: Tensor, task: str, head: Head, targets: Tensor | None = None) -> Layout:
        """Return the layout of outputs [n, ...]. Classes are in dimension 1, or last if targets say so."""
        if not output.is_floating_point():
            raise InputError(f"the output must be floating-point numbers, not {output.dtype}")
        single = output.dim() == 1 or output.shape[1] == 1
        kind = "binary" if single else "multiclass"
        if head is not None and head[0] == "sigmoid" and not single:
            kind = "multilabel"
        if head is None and targets is not None and output.dim() > 2:
            given, shape = tuple(targets.shape[1:]), tuple(output.shape[1:])
            if given == shape[:-1] and given != shape[1:]:
                kind, head = "multiclass", (LOGITS, output.dim() - 1)
        return Layout(task, kind, head, tuple(output.shape[1:]))

    def check(self, targets: Tensor) -> None:
        """Raise unless these targets [n, ...] fit."""
        n = len(targets)
        if self.task == "regression" and targets[0].numel() != math.prod(self.shape):
            raise InputError(
                f"targets have shape {list(targets.shape)}, and the outputs {[n, *self.shape]}; "
                "a regression needs one target per output (classes must be integers)"
            )
        if not self.is_classes:
            return
        expected = list(self.shape)
        if self.kind == "multiclass":
            del expected[self.class_dim - 1]
        if targets[0].numel() != math.prod(expected):
            raise InputError(
                f"targets have shape {list(targets.shape)}; outputs {[n, *self.shape]} need class indices "
                f"{[n, *expected]}"
            )
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= self.n_classes:
            raise InputError(
                f"labels must be within 0..{self.n_classes - 1}, as the network has {self.n_classes} "
                f"classes; they reach from {low} to {high}"
            )

    @property
    def class_dim(self) -> int:
        """Return the dimension of the classes in a tensor [n, ...]."""
        dim = self.head[1] if self.head is not None else None
        return 1 if dim is None else dim % (len(self.shape) + 1)

    @property
    def is_classes(self) -> bool:
        return self.task == "classification"

    @property
    def n_classes(self) -> int:
        return self.shape[self.class_dim - 1] if self.kind == "multiclass" else 2

    @property
    def size(self) -> int:
        """Numbers in the rows of one input."""
        elements = math.prod(self.shape)
        if not self.is_classes:
            return min(elements, _MOST_ELEMENTS)
        positions = elements // self.n_classes if self.kind == "multiclass" else elements
        return len(self._positions(positions)) * self.n_classes

    def _positions(self, count: int) -> Tensor:
        return evenly(count, max(1, min(_MOST_POSITIONS, _MOST_PROBABILITIES // self.n_classes)))

    def values(self, output: Tensor) -> Tensor:
        """[..., n, *shape] -> [..., n, elements]: the outputs as they are, for their moments."""
        flat = output.flatten(-len(self.shape)) if self.shape else output.unsqueeze(-1)
        return flat[..., evenly(flat.shape[-1], _MOST_ELEMENTS)]

    def probabilities(self, output: Tensor) -> Tensor:
        """[..., n, *shape] of samples or of a plain network -> probabilities [..., n, positions, K]."""
        name = None if self.head is None else self.head[0]
        if self.kind == "multiclass":
            lead = output.dim() - len(self.shape) - 1
            moved = output.movedim(lead + self.class_dim, -1)
            moved = moved.flatten(lead + 1, -2) if len(self.shape) > 1 else moved.unsqueeze(-2)
            moved = moved[..., self._positions(moved.shape[-2]), :].double()
            own = moved.exp() if name == "log_softmax" else moved
            return own.clamp_min(_LEAST) if name in ("softmax", "log_softmax") else moved.softmax(-1)
        flat = output.flatten(-len(self.shape)) if self.shape else output.unsqueeze(-1)
        flat = flat[..., self._positions(flat.shape[-1])].double()
        one = flat if name == "sigmoid" else flat.sigmoid()
        return torch.stack([1 - one, one], -1).clamp_min(_LEAST)

    def of_predictive(self, values: Tensor) -> Tensor:
        """[n, K, ...] of a ClassPredictive -> [n, positions, K]."""
        flat = values.flatten(2).mT if values.dim() > 2 else values.unsqueeze(1)
        return flat[:, self._positions(flat.shape[1])].double()

    def target_rows(self, targets: Tensor) -> Tensor:
        """Classes [n, positions]; values [n, elements]."""
        flat = targets.reshape(len(targets), -1)
        count = flat.shape[1]
        return flat[:, self._positions(count) if self.is_classes else evenly(count, _MOST_ELEMENTS)]
