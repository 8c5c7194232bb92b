"""Asks of a converted network whether its backward sweep can be believed, on the example inputs.

The sweep and the forward moments are two estimates of the same variances. Where their stds differ by more
than a factor of three, one of them is wrong, and a few samples tell which. That happens once, at conversion,
so a call of the network costs nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from momentprop.engine.plan import Ref
from momentprop.engine.program import Program
from momentprop.moments import Moments, is_moments
from momentprop.network import BayesianNetwork, inside
from momentprop.sample import monte_carlo

_APART = 3.0  # stds of the two estimates, as a ratio, from which on samples are asked
_SAMPLES = 32
_FURTHER = 2.0  # the sweep is in doubt if it misses the samples by so much more than forward moments do


@dataclass(frozen=True)
class Doubt:
    """Holds what was seen: stds over those of MC dropout, medians over the outputs."""

    swept: float
    forward: float

    def __str__(self) -> str:
        return (
            f"on the example inputs its std is {self.swept:.2g} times that of {_SAMPLES} samples of MC "
            f"dropout, where forward moments alone give {self.forward:.2g} times"
        )


def doubt(network: BayesianNetwork, example_inputs: Any, leaves: Sequence[Any]) -> Doubt | None:
    """Return what speaks against the sweep, if anything does; `leaves` are the example inputs, flat."""
    swept, forward = _estimates(network, leaves)
    if abs(_log_ratio(swept, forward)) < math.log(_APART):
        return None
    sampled = pytree.tree_leaves(monte_carlo(network, example_inputs, _SAMPLES), is_leaf=is_moments)
    truth = [found.variance if is_moments(found) else None for found in sampled]
    found = Doubt(math.exp(_log_ratio(swept, truth)), math.exp(_log_ratio(forward, truth)))
    miss, miss_of_forward = abs(math.log(found.swept)), abs(math.log(found.forward))
    return found if miss > math.log(_FURTHER) + miss_of_forward else None


def _estimates(network: BayesianNetwork, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the outputs' variances by the sweep, and by the forward moments; None for what is certain."""
    known = inside(network)
    program, forward = known.built.program, {}
    if not isinstance(program, Program) or program.outputs is None:
        return [], []
    names = [v.name if isinstance(v, Ref) else "" for v in program.plan.outputs]
    heads = {head.logits: (name, head) for name, head in program.plan.heads.items()}

    def observe(name: str, moments: Any) -> None:
        if name in names and name not in program.plan.heads:
            forward[name] = moments.variance
        if name in heads:  # outputs made of it are integrated, as those of the sweep are
            output, head = heads[name]
            forward[output] = head.applied(Moments(moments.mean, moments.variance)).variance

    with torch.no_grad():
        outputs = program.run([*known.state, *leaves], observe)
    swept = [out.variance if isinstance(out, Moments) else None for out in outputs]
    return swept, [forward.get(name) for name in names]


def _log_ratio(ones: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> float:
    """Return the median logarithm of std over std, of the elements where both are positive."""
    ratios = [torch.empty(0, dtype=torch.float64)]
    for one, other in zip(ones, others, strict=True):
        if one is not None and other is not None:
            a, b = one.double(), other.double()
            ratios.append(0.5 * (a.log() - b.log())[(a > 0) & (b > 0)].cpu())
    every = torch.cat(ratios)
    every = every[every.isfinite()]
    return float(every.median()) if every.numel() else 0.0
