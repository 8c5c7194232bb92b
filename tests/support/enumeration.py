"""An oracle for small networks: every way to drop, with its probability. Of the library only Moments is used.

For a network that is linear between its dropouts, mean and covariance are exact to rounding, and so are
they for uncertain inputs: Cov = E[A V A^T] + Cov[A x] over the masks, with A the Jacobian.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import momentprop as mp

_PER_ELEMENT = (F.dropout,)
_PER_CHANNEL = (F.dropout1d, F.dropout2d, F.dropout3d)


class Masks(TorchFunctionMode):
    """Dropouts multiply by the masks given, in the order of calls; without any, they note their shapes."""

    def __init__(self, masks: list[Tensor] | None = None) -> None:
        super().__init__()
        self.masks = None if masks is None else iter(masks)
        self.calls: list[tuple[torch.Size, float]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (*_PER_ELEMENT, *_PER_CHANNEL):
            return func(*args, **kwargs)
        x, p = args[0], args[1] if len(args) > 1 else kwargs["p"]
        shape = x.shape if func in _PER_ELEMENT else torch.Size([*x.shape[:2], *[1] * (x.dim() - 2)])
        self.calls.append((shape, p))
        return x.clone() if self.masks is None else x * next(self.masks) / (1 - p)


def all_masks(calls: list[tuple[torch.Size, float]]) -> Iterator[tuple[list[Tensor], float]]:
    """Every combination of masks, and its probability."""
    sizes = [math.prod(shape) for shape, _ in calls]
    assert sum(sizes) <= 12, "too many masks to enumerate"
    for kept in itertools.product([0.0, 1.0], repeat=sum(sizes)):
        masks, probability, start = [], 1.0, 0
        for (shape, p), size in zip(calls, sizes, strict=True):
            part = kept[start : start + size]
            start += size
            probability *= math.prod((1 - p) if k else p for k in part)
            masks.append(torch.tensor(part, dtype=torch.float64).reshape(shape))
        yield masks, probability


def enumerate_masks(model: nn.Module, *inputs: Any) -> list[tuple[Tensor, Tensor]]:
    """(mean [batch, K], covariance [batch, K, K]) of each output, a sample's elements in row-major order.

    Each sample runs alone, in a batch of one. Inputs may be Moments.
    """
    samples = [_one(model, [_sample(x, i) for x in inputs]) for i in range(len(_mean(inputs[0])))]
    return [
        tuple(torch.stack(parts) for parts in zip(*output, strict=True))  # type: ignore[misc]
        for output in zip(*samples, strict=True)
    ]


def _mean(x: Any) -> Tensor:
    return x.mean if isinstance(x, mp.Moments) else x


def _sample(x: Any, i: int) -> Any:
    if isinstance(x, mp.Moments):
        return mp.Moments(x.mean[i : i + 1], x.variance[i : i + 1])
    return x[i : i + 1]


def _one(model: nn.Module, inputs: list[Any]) -> list[tuple[Tensor, Tensor]]:
    plain = [_mean(x) for x in inputs]
    uncertain = [i for i, x in enumerate(inputs) if isinstance(x, mp.Moments)]

    def run(*values: Tensor) -> tuple[Tensor, ...]:
        filled = list(plain)
        for i, value in zip(uncertain, values, strict=True):
            filled[i] = value
        return tuple(out.flatten() for out in pytree.tree_leaves(model(*filled)))

    with torch.no_grad(), Masks() as seen:
        sizes = [len(out) for out in run(*[plain[i] for i in uncertain])]
    first = [torch.zeros(n, dtype=torch.float64) for n in sizes]
    second = [torch.zeros(n, n, dtype=torch.float64) for n in sizes]
    for masks, probability in all_masks(seen.calls):
        with torch.no_grad(), Masks(masks):
            outputs = run(*[plain[i] for i in uncertain])
        for i, out in enumerate(outputs):
            first[i] += probability * out
            second[i] += probability * torch.outer(out, out)
        if uncertain:
            with Masks(masks):
                jacobians = torch.autograd.functional.jacobian(run, tuple(plain[i] for i in uncertain))
            for i, row in enumerate(jacobians):
                for k, jacobian in zip(uncertain, row, strict=True):
                    a = jacobian.flatten(1)
                    second[i] += probability * (a * inputs[k].variance.flatten()) @ a.T
    return [(m, s - torch.outer(m, m)) for m, s in zip(first, second, strict=True)]
