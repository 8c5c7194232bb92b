"""The network to first order, as the forward sweep records it and the backward sweep plays it back.

Every value is a linear map of earlier ones plus noise. Operators that act element by element are merged on
the way: gains multiply, noises add up, and the sweep back meets one step where the network has batch norm,
ReLU and dropout in a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from momentprop.engine.jumps import Sources
from momentprop.engine.layouts import Layout
from momentprop.gaussian.normal import safe_sqrt
from momentprop.rules.local import Drops, Elementwise, Linear, Local, Masked

Cotangent = Any  # a tensor [K, *shape]; for a value that is a list, {position: tensor}


@dataclass
class Pending:
    """A value as gain * root + noise, not yet a step of its own; without a root it is noise alone."""

    root: str | None
    gain: Any = None
    noise: Tensor | None = None
    masked: list[Masked] = field(default_factory=list)

    def then(self, local: Elementwise) -> Pending:
        noise = self.noise
        if noise is not None and local.gain is not None:
            noise = local.gain * local.gain * noise
        if local.noise is not None:
            noise = local.noise if noise is None else noise + local.noise
        gain = None if self.root is None else times(self.gain, local.gain)
        masked = [replace(m, value=times(m.value, local.gain)) for m in self.masked]
        if local.masked is not None:
            masked.append(local.masked)
        return Pending(self.root, gain, noise, masked)


@dataclass
class Step:
    """The value `out` to first order: a linear map of the values `inputs`, plus noise."""

    out: str
    inputs: list[str]
    local: Linear
    node: str  # whose layout it has
    length: int | None = None  # of a value that is a list
    masked: list[Masked] = field(default_factory=list)

    @property
    def drops(self) -> list[Drops]:
        own = [] if self.local.drops is None else [self.local.drops]
        return own + [_drops(masked) for masked in self.masked]


class Tape:
    """What the forward sweep leaves for the backward sweep. Values go by the names of their nodes.

    With `with_drops` it remembers which noise is that of masks.
    """

    def __init__(self, with_drops: bool = False) -> None:
        self.with_drops = with_drops
        self.only_masks = True  # no other noise comes in
        self.pending: dict[str, Pending] = {}
        self.steps: list[Step] = []

    def record(self, name: str, inputs: list[str], local: Local, shared: bool, length: int | None) -> None:
        """A new value, computed from these random ones."""
        if isinstance(local, Elementwise):
            if local.masked is not None and not self.with_drops:
                local = replace(local, masked=None)
            before = self.pending[inputs[0]] if inputs else Pending(None)
            self.pending[name] = before.then(local)
            if shared:
                self.settle(name)
            return
        for value in inputs:
            self.settle(value)
        # its noise waits: noises of element-by-element operators behind it will join it
        mapped = f"{name}'"
        noise = None if length is not None else local.noise
        out = name if noise is None else mapped
        # what only the forward sweep needs is not held
        drops = local.drops if self.with_drops else None
        kept = replace(local, noise=None, push=None, bend=None, drops=drops)
        self.steps.append(Step(out, inputs, kept, name, length))
        self.pending[name] = Pending(name) if noise is None else Pending(mapped, noise=noise)
        if shared:
            self.settle(name)

    def settle(self, name: str) -> None:
        """Make a step of a value that several operators use, or that a linear map takes."""
        value = self.pending[name]
        if value.root == name:
            return
        gain, noise = value.gain, value.noise
        if isinstance(gain, Tensor) and noise is not None and gain.shape == noise.shape:
            # written out here, or compilers evaluate both once more for every output
            gain, noise = torch.stack([gain, noise])
        inputs = [] if value.root is None else [value.root]
        local = Linear(lambda cotangent: [times(cotangent, gain)], noise)
        self.steps.append(Step(name, inputs, local, name, masked=value.masked))
        self.pending[name] = Pending(name)

    def covariance(
        self,
        seeds: dict[str, Tensor],
        layouts: Mapping[str, Layout],
        batch: Any,
        sources: Sources | None = None,
    ) -> Tensor:
        """[batch, K, K], from the cotangents [K, *shape] of the outputs; `sources` gets the masks met."""
        cotangents: dict[str, Cotangent] = dict(seeds)
        total: Any = 0.0
        for step in reversed(self.steps):
            cotangent = cotangents.pop(step.out, None)
            if cotangent is None:
                continue  # no output depends on it
            local = step.local
            if local.noise is not None:
                total = total + scattered(cotangent, local.noise, layouts[step.node], batch)
            if local.spread is not None:
                total = total + _outer(layouts[step.node].split(local.spread(cotangent), batch))
            if local.shared is not None:
                layout = layouts[step.node]
                rows = layout.split(cotangent, batch) @ layout.split(local.shared, batch).mT
                total = total + _outer(rows)
            if sources is not None:
                for drops in step.drops:
                    rows = layouts[step.node].split(drops.rows(cotangent), batch)
                    sources.add(rows, drops.drop_probability)
            if step.length is not None:
                cotangent = [cotangent.get(i) for i in range(step.length)]
            if step.inputs:
                for name, pulled in zip(step.inputs, local.pull(cotangent), strict=False):
                    if pulled is not None:
                        cotangents[name] = _plus(cotangents.get(name), pulled)
        if not isinstance(total, Tensor):  # no noise reaches an output
            rows = next(iter(seeds.values()))
            return rows.new_zeros(batch, rows.shape[0], rows.shape[0])
        return (total + total.mT) / 2


def scattered(cotangent: Tensor, noise: Tensor, layout: Layout, batch: Any) -> Tensor:
    """sum over elements of c_k noise c_l, per sample."""
    if noise.dim() > 3 and layout.whole:
        # images with their channels last, as convolutions leave them: the order of a sum's terms is free
        cotangent, noise = cotangent.movedim(2, -1), noise.movedim(1, -1)
    if cotangent.shape[0] == 1:
        return layout.split(cotangent * cotangent * noise, batch).sum(-1, keepdim=True)
    return _outer(layout.split(cotangent * safe_sqrt(noise), batch))


def _drops(masked: Masked) -> Drops:
    """One source per element."""
    return Drops(lambda cotangent: cotangent * (masked.value * masked.scale), masked.drop_probability)


def _outer(rows: Tensor) -> Tensor:
    return torch.bmm(rows, rows.mT)


def times(first: Any, second: Any) -> Any:
    if first is None or second is None:
        return second if first is None else first
    return first * second


def _plus(first: Cotangent | None, second: Cotangent) -> Cotangent:
    if first is None:
        return second
    if isinstance(second, dict):
        return first | {i: _plus(first.get(i), c) for i, c in second.items()}
    return first + second
