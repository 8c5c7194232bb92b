"""A function of a value and of its dropout mask: kept and dropped are two branches, each by itself.

A dropped value is 0 (or what alpha dropout puts there), a kept one x / (1-p): that has two points, or a spike
beside a Gaussian, and no Gaussian resembles it. So a function f that works element by element is taken where
the value is kept and where it is dropped, with moments (mK, vK) and (mD, vD), and with q = 1 - p

    mean = q mK + p mD,    variance = q vK + p vD + p q (mK - mD)^2.

To the mask f responds by mK - mD, to x by the expected derivative q gK + p gD, and the rest of the variance
is noise of its own. The mask is an input like any other, so several functions of one dropped value are
correlated as they should be.

Exact for an x that is not random; for a random one, as exact as the rule of f is for a Gaussian x.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from momentprop.gaussian.quadrature import expectation
from momentprop.moments import Moments, is_moments, mean_of
from momentprop.rules.dropout import Mask
from momentprop.rules.facts import Neighbours, Shared, carried, knowing, lattice, neighbours_of
from momentprop.rules.families import BY_QUADRATURE, once
from momentprop.rules.linearization import Linearization, Propagated, Scaled, gathered, mapped, scaled
from momentprop.rules.registry import EXACT, Rule

Body = Callable[..., Tensor]  # (dropped value, x, *constants)


@dataclass(frozen=True)
class Link:
    """One operator of a chain: its rule, and its arguments before and behind the value that it works on."""

    rule: Rule
    before: tuple[Any, ...] = ()
    behind: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()

    def __call__(self, value: Moments, constants: tuple[Any, ...]) -> tuple[Moments, Callable[[], Any]]:
        """Return moments and gain. Where the rule has no linear part, the gain comes by quadrature."""
        before, behind = ([_given(v, constants) for v in part] for part in (self.before, self.behind))
        kwargs = {name: _given(v, constants) for name, v in self.kwargs}
        found = self.rule.propagate(*before, value, *behind, **kwargs)

        def operator(t: Tensor) -> Tensor:
            out: Tensor = self.rule.op(*before, t, *behind, **kwargs)
            return out

        def gain() -> Any:
            if found.linearize is None:
                return expectation(operator, value.mean, value.variance)[2]
            map = found.linearize().map
            assert isinstance(map, Scaled)
            return 1.0 if map.gain is None else map.gain

        return Moments(found.moments.mean, found.moments.variance), gain


@dataclass(frozen=True)
class Constant:
    """Stands for one of the constants that a function is given."""

    index: int


def _given(value: Any, constants: tuple[Any, ...]) -> Any:
    return constants[value.index] if isinstance(value, Constant) else value


@dataclass(frozen=True, eq=False)
class Branch:
    """One of the two cases. Where x is not random, the variance is 0 and has no gain."""

    mean: Tensor
    variance: Any = 0.0
    gain: Callable[[], Any] = lambda: 0.0


@dataclass(frozen=True, eq=False)
class Branches:
    """f(dropped x, x) as a function of x and of a mask, which is 0 or 1 / (1-p)."""

    name: str
    body: Body
    kind: Mask
    drop_probability: float
    uses_x: bool  # beside the dropped value
    chain: tuple[Link, ...] | None  # the body as rules in a row, if it is that

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def exactness(self) -> str:
        """Say how good it is."""
        if self.chain is None:
            return BY_QUADRATURE
        return next((link.rule.exactness for link in self.chain if link.rule.elementwise), EXACT)

    def __call__(self, x: Tensor, mask: Tensor, *constants: Any) -> Tensor:
        """Compute f itself. A mask of 1 is that of an idle dropout, which returns x."""
        shift = self.kind.shift
        value = x * mask
        if shift:
            value = torch.where(mask == 1, x, self.kind.scaled(value + shift * (mask - 1)))
        return self.body(value, x, *constants)

    def propagate(self, x: Any, mask: Any, *constants: Any) -> Propagated:
        p = self.drop_probability
        kept, dropped = self._kept(x, constants), self._dropped(x, constants)
        jump = kept.mean - dropped.mean
        variance = p * (1 - p) * (jump * jump)
        within = (1 - p) * kept.variance + p * dropped.variance
        out = Moments(kept.mean - p * jump, variance + within)
        gain = once(lambda: (1 - p) * kept.gain() + p * dropped.gain())
        of_channels = mean_of(mask).shape != out.shape

        def linearize() -> Linearization:
            response = (1 - p) * jump
            if not is_moments(x):
                if not of_channels:
                    return scaled(response)
                return mapped(lambda c: [gathered(c * response, mask.shape)])
            g = gain()
            noise = (within - g * g * x.variance).clamp_min(0)
            return mapped(lambda c: [c * g, gathered(c * response, mask.shape)], noise)

        if not of_channels:
            return Propagated(carried(out, x, gain, linear=False, noisy=True), linearize)
        scale = (p * (1 - p)) ** 0.5
        told = self._within_channels(x, jump * scale, kept, dropped)
        return Propagated(knowing(out, told, Shared(jump * scale)), linearize)

    def _kept(self, x: Any, constants: tuple[Any, ...]) -> Branch:
        scale = 1 / (1 - self.drop_probability) * (1.0 if self.kind.gain is None else self.kind.gain)
        shift = self.drop_probability * self.kind.shift

        def value(t: Tensor) -> Tensor:
            return (t + shift if shift else t) * scale

        if not is_moments(x):
            return Branch(self.body(value(x), x, *constants))
        if self.chain is None:
            return _averaged(lambda t: self.body(value(t), t, *constants), x)
        gains: list[Callable[[], Any]] = [lambda: scale]
        at = Moments(value(x.mean), x.variance * (scale * scale))
        for link in self.chain:
            at, gain = link(at, constants)
            gains.append(gain)
        return Branch(at.mean, at.variance, lambda: _product(gains))

    def _dropped(self, x: Any, constants: tuple[Any, ...]) -> Branch:
        """Nothing of x is left, but where it is used beside the dropped value."""
        like = mean_of(x)
        sizes = [1 if d != 1 else like.shape[1] for d in range(like.dim())]
        scale = 1.0 if self.kind.gain is None else self.kind.gain
        value = like.new_full(sizes, -scale * self.kind.shift)
        if self.uses_x and is_moments(x):
            return _averaged(lambda t: self.body(value, t, *constants), x)
        return Branch(self.body(value, like, *constants))

    def _within_channels(self, x: Any, direction: Tensor, kept: Branch, dropped: Branch) -> Neighbours:
        """Cov(Y_i, Y_j) = d_i d_j + (q gK_i gK_j + p gD_i gD_j) Cov(X_i, X_j) for elements of one mask."""
        p, inner = self.drop_probability, neighbours_of(x)

        def told(start: list[int], step: list[int], count: list[Any], shift: list[int]) -> Tensor:
            there = [a + b for a, b in zip(start, shift, strict=True)]

            def pairs(value: Any) -> Any:
                if not isinstance(value, Tensor):
                    return value * value
                return lattice(value, start, step, count) * lattice(value, there, step, count)

            before = None if inner is None else inner(start, step, count, shift)
            common: Tensor = pairs(direction)
            if before is None:
                return common
            return common + before * ((1 - p) * pairs(kept.gain()) + p * pairs(dropped.gain()))

        return Neighbours(told)


def branches(
    name: str, body: Body, kind: Mask, p: float, uses_x: bool, chain: tuple[Link, ...] | None
) -> Rule:
    """Make the rule of a function of x and a mask, for one place of a graph."""
    found = Branches(name, body, kind, p, uses_x, chain)
    return Rule(
        found,  # type: ignore[arg-type]
        found.propagate,
        exactness=found.exactness,
        reference="mixture of kept and dropped",
    )


def _averaged(function: Callable[[Tensor], Tensor], x: Moments) -> Branch:
    """Average over x; points outside the function's domain count as its center."""
    center = function(x.mean)

    def inside(t: Tensor) -> Tensor:
        value = function(t)
        return torch.where(value.isfinite(), value, center)

    mean, variance, gain = expectation(inside, x.mean, x.variance)
    return Branch(mean, variance, lambda: gain)


def _product(gains: list[Callable[[], Any]]) -> Any:
    total: Any = 1.0
    for gain in gains:
        total = total * gain()
    return total
