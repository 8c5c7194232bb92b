"""The network to first order, as the forward sweep records it and the backward sweep plays it back.

Every value is a linear map of earlier ones plus noise. Operators that act element by element are merged on
the way: gains multiply, noises add up, and the sweep back meets one step where the network has batch norm,
ReLU and dropout in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from momentprop.engine.plan import Step
from momentprop.rules.linearization import Diagonal, Linearization, Mapped, Noise, Pull


@dataclass(frozen=True, eq=False)
class Pending:
    """A value as gain * root + noise, not yet a step of its own; without a root it is noise alone."""

    root: str | None
    gain: Any = None
    noise: Diagonal | None = None

    def then(self, gain: Any, noise: Diagonal | None) -> Pending:
        before = None if self.noise is None else self.noise.times(gain)
        return Pending(self.root, None if self.root is None else times(self.gain, gain), _sum(before, noise))


@dataclass(frozen=True, eq=False)
class Recorded:
    """The value `out` to first order: a linear map of the values `inputs`, plus noise."""

    out: str
    inputs: tuple[str, ...]
    pull: Pull
    noise: tuple[Noise, ...]
    step: Step | None  # which of the plan; None for an input of the network
    inner: tuple[Noise, ...] = ()  # whose cotangents `pull` returns behind those of the inputs
    length: int | None = None  # of a value that is a list

    @property
    def node(self) -> str:
        """The node whose layout the value has."""
        return self.out.removesuffix("'")


class Tape:
    """Records what the forward sweep leaves for the backward sweep. Values go by the names of their nodes.

    If `masks`, it keeps dropout masks apart from other noise.
    """

    def __init__(self, masks: bool = False) -> None:
        self.masks = masks
        self.pending: dict[str, Pending] = {}
        self.recorded: list[Recorded] = []

    def source(self, name: str, variance: Tensor, step: Step | None = None) -> None:
        """A value that counts as noise of every element's own."""
        self.pending[name] = Pending(None, noise=Diagonal(variance))
        self.settle(name, step)

    def record(self, step: Step, linearization: Linearization) -> None:
        """A new value, computed from earlier ones."""
        map, (noise, others) = linearization.map, self._sorted(linearization.noise)
        if isinstance(map, Mapped) or others or len(step.inputs) != 1:
            self._record_map(step, linearization, noise, others)
        else:
            self.pending[step.name] = self.pending[step.inputs[0]].then(map.gain, noise)
        if step.shared:
            self.settle(step.name, step)

    def _record_map(
        self, step: Step, linearization: Linearization, noise: Diagonal | None, others: tuple[Noise, ...]
    ) -> None:
        for value in step.inputs:
            self.settle(value, step)
        map = linearization.map
        if isinstance(map, Mapped):
            pull = map.pull
        else:
            gain = map.gain
            pull = lambda cotangent: [times(cotangent, gain)]  # noqa: E731
        if not step.inputs and not others:
            self.pending[step.name] = Pending(None, noise=noise)
            return
        # its noise waits: noises of element-by-element operators behind it will join it
        out = step.name if noise is None else f"{step.name}'"
        inner = linearization.inner
        self.recorded.append(Recorded(out, step.inputs, pull, others, step, inner, step.length))
        self.pending[step.name] = Pending(out, noise=noise)

    def _sorted(self, noises: Sequence[Noise]) -> tuple[Diagonal | None, tuple[Noise, ...]]:
        """Noise of every element's own, added up, and all other."""
        own: Diagonal | None = None
        for noise in noises:
            if isinstance(noise, Diagonal):
                own = _sum(own, noise if self.masks else Diagonal(noise.variance))
        return own, tuple([noise for noise in noises if not isinstance(noise, Diagonal)])

    def settle(self, name: str, step: Step | None = None) -> None:
        """Make a step of a value that several operators use, or that a linear map takes."""
        value = self.pending[name]
        if value.root == name:
            return
        gain, noise = value.gain, value.noise
        if isinstance(gain, Tensor) and noise is not None and gain.shape == noise.variance.shape:
            # written out here, or compilers evaluate both once more for every output
            gain, variance = torch.stack([gain, noise.variance])
            noise = Diagonal(variance, noise.dropped)
        inputs = () if value.root is None else (value.root,)
        pull: Pull = (lambda cotangent: [times(cotangent, gain)]) if inputs else (lambda cotangent: [])
        self.recorded.append(Recorded(name, inputs, pull, () if noise is None else (noise,), step))
        self.pending[name] = Pending(name)


def times(first: Any, second: Any) -> Any:
    if first is None or second is None:
        return second if first is None else first
    return first * second


def _sum(first: Diagonal | None, second: Diagonal | None) -> Diagonal | None:
    if first is None or second is None:
        return second if first is None else first
    return first.plus(second)
