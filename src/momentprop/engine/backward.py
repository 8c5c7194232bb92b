"""The backward sweep: from the outputs to every source of noise.

To first order (rules/linearization.py) the network is made of linear maps, gains and independent sources of
noise. With J_s = d(outputs) / d(source s),

    Cov(outputs) = sum over s of  J_s diag(noise_s) J_s^T.

The forward sweep computes moments and records, for every operator, its transposed map and its noise. The
backward sweep carries one cotangent per output from the outputs to the sources, all of them at once as
a tensor [K, *shape]. Two paths from one source add in J_s before it is squared: residual connections,
concatenation, shared weights and overlapping windows need no care.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from momentprop.engine.accumulators import Accumulator
from momentprop.engine.layouts import Layout
from momentprop.engine.tape import Recorded, Tape
from momentprop.errors import RuleError

Cotangent = Any  # a tensor [K, *shape]; for a value that is a list, {position: tensor}


@dataclass(frozen=True, eq=False)
class Samples:
    """Tells which elements of a value belong to which sample of the batch."""

    layout: Layout
    batch: Any

    @property
    def batch_first(self) -> bool:
        return self.layout.whole

    def __call__(self, rows: Tensor) -> Tensor:
        return self.layout.split(rows, self.batch)


def sweep(
    tape: Tape,
    seeds: Mapping[str, Tensor],
    layouts: Mapping[str, Layout],
    batch: Any,
    accumulators: Sequence[Accumulator],
) -> None:
    """Carry the cotangents [K, *shape] of the outputs back, and show each source to every accumulator."""
    cotangents: dict[str, Cotangent] = dict(seeds)
    for recorded in reversed(tape.recorded):
        cotangent = cotangents.pop(recorded.out, None)
        if cotangent is None:
            continue  # no output depends on it
        found = _pulled(recorded, cotangent)
        inner = found[len(recorded.inputs) :]
        noises = [*((cotangent, n) for n in recorded.noise), *zip(inner, recorded.inner, strict=True)]
        for reaching, noise in noises:
            for accumulator in accumulators:
                accumulator.add(reaching, noise, Samples(layouts[recorded.node], batch))
        for name, pulled in zip(recorded.inputs, found, strict=False):
            if pulled is not None:
                cotangents[name] = _plus(cotangents.get(name), pulled)


def _pulled(recorded: Recorded, cotangent: Cotangent) -> Sequence[Any]:
    if recorded.length is not None:
        cotangent = [cotangent.get(i) for i in range(recorded.length)]
    found = recorded.pull(cotangent)
    if len(found) != len(recorded.inputs) + len(recorded.inner):
        place = recorded.step.place if recorded.step is not None else recorded.out
        raise RuleError(
            f"the transposed map of a rule returns {len(found)} cotangents for {len(recorded.inputs)} random "
            f"inputs; return one for each, in the order of the arguments (None for one that only lends its "
            f"shape):\n  {place}"
        )
    return found


def _plus(first: Cotangent | None, second: Cotangent) -> Cotangent:
    if first is None:
        return second
    if isinstance(second, dict):
        return first | {i: _plus(first.get(i), c) for i, c in second.items()}
    return first + second
