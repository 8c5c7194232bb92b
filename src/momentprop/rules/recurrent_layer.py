"""One recurrent layer, in all its directions side by side: moments step by step, and back through time.

Sequences are as the user has them, [batch, time, directions * units] or [time, batch, ...]. Steps are in the
order in which they run, which for one direction is backwards: [directions, batch, units]. Cotangents have K
in front of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from momentprop.moments import is_moments, mean_of
from momentprop.rules.recurrent_cells import Cell, Maker, States, Steps

_LARGEST = 1e38  # variance of what goes into a gate: infinity times a weight of 0 is no number


@dataclass(frozen=True, eq=False)
class Uncertain:
    """A tensor that may be random."""

    mean: Tensor
    variance: Tensor | None  # None if it is not

    @staticmethod
    def stacked(parts: Sequence[Any], dtype: torch.dtype) -> Uncertain:
        """Several in one, in this type."""
        mean = torch.stack([mean_of(v) for v in parts]).to(dtype)
        if not any(map(is_moments, parts)):
            return Uncertain(mean, None)
        variances = [v.variance if is_moments(v) else torch.zeros_like(v) for v in parts]
        return Uncertain(mean, torch.stack(variances).to(dtype))

    @property
    def known_variance(self) -> Tensor:
        return torch.zeros_like(self.mean) if self.variance is None else self.variance

    def of_squares(self) -> Tensor:
        """W*W + V, by which a variance goes through a product with these."""
        square = self.mean * self.mean
        return square if self.variance is None else square + self.variance


class Weights:
    """The weights of a layer, [directions, ...]."""

    def __init__(
        self, params: Sequence[Any], n_directions: int, has_biases: bool, dtype: torch.dtype
    ) -> None:
        n = len(params) // n_directions
        found = [Uncertain.stacked(params[i::n], dtype) for i in range(n)]
        self.n_directions = n_directions
        self.input, self.state = found[:2]
        self.biases = found[2:4] if has_biases else []
        rest = found[2 + 2 * has_biases :]
        self.projection = rest[0].mean if rest else None

    def of_input(self, x: Uncertain) -> tuple[Tensor, Tensor]:
        """Mean and variance of W_ih x + b_ih, for all directions and steps."""
        w, bias = self.input, self.biases[0] if self.biases else None
        mean = _linear(x.mean, w.mean, None if bias is None else bias.mean)
        variance = torch.zeros_like(mean)
        if x.variance is not None:
            variance = variance + _linear(x.variance.clamp_max(_LARGEST), w.of_squares())
        if w.variance is not None:
            variance = variance + _linear(x.mean * x.mean, w.variance)
        if bias is not None and bias.variance is not None:
            variance = variance + bias.variance.flatten()
        return mean, variance.clamp_max(_LARGEST)

    def project(self, h: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        w = self.projection
        return (h, variance) if w is None else (torch.bmm(h, w.mT), torch.bmm(variance, (w * w).mT))


class Layer:
    """A layer that has run."""

    def __init__(
        self, make: Maker, x: Uncertain, states: Sequence[Uncertain], weights: Weights, batch_first: bool
    ) -> None:
        self.x, self.states, self.weights = x, states, weights
        self.time = -2 if batch_first else -3
        self.n_directions = weights.n_directions
        self.cell: Cell = make(states[-1].mean)
        self.before: list[tuple[Tensor, Tensor]] = []  # the state h in front of every step
        self.records: list[tuple[Tensor, ...]] = []  # of the cell
        self._run()

    def _run(self) -> None:
        n, drawn = self.n_directions, self.weights.state.variance
        scales = torch.stack([self.cell.scale, self.cell.scale.square()])
        weights = torch.stack([self.weights.state.mean, self.weights.state.of_squares()])
        weights = (weights * scales[:, None, :, None]).flatten(0, 1).mT
        states: States = tuple([(s.mean, s.known_variance) for s in self.states])
        outputs = []
        for given, apart in zip(*self._given(scales), strict=True):
            self.before.append(states[0])
            mean, variance = torch.baddbmm(given, torch.cat(states[0]), weights).chunk(2)
            if drawn is not None:
                own = torch.bmm(states[0][0].square(), drawn.mT)
                variance = variance + own * scales[1]
            new, record = self.cell.step((mean, variance), (apart[:n], apart[n:]), states)
            states = (self.weights.project(*new[0]), *new[1:])
            self.records.append(record)
            outputs.append(torch.cat(states[0]))
        mean, variance = torch.stack(outputs).chunk(2, 1)
        self.output = Uncertain(self.sequence(mean.unbind(0)), self.sequence(variance.unbind(0)))
        self.last = [Uncertain(*state) for state in states]

    def _given(self, scales: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """What the sequence adds to a in every step, and what stays apart: means, behind them variances."""
        biases, n = self.weights.biases, self.n_directions
        given, apart = [], []
        for i, value in enumerate(self.weights.of_input(self.x)):
            parts = value.unflatten(-1, (n, -1))
            n_apart = self.cell.n_apart * self.cell.n_units
            own = parts[..., : parts.shape[-1] - n_apart]
            apart.append(parts[..., parts.shape[-1] - n_apart :].flatten(-2))
            own = F.pad(own, (0, n_apart)) if n_apart else own
            bias = (biases[1].mean, biases[1].variance)[i] if biases else None
            own = own if bias is None else own + bias
            given.append((own * scales[i]).flatten(-2))
        return self.steps(*given), self.steps(*apart)

    def steps(self, *sequences: Tensor) -> list[Tensor]:
        """What sequences are in every step, one behind the other: [sequences * directions, ...]."""
        found = []
        for values in sequences:
            forward, *backward = values.unflatten(-1, (self.n_directions, -1)).unbind(-2)
            found.append(forward.unbind(self.time))
            found += [v.unbind(self.time)[::-1] for v in backward]
        return [torch.stack(parts) for parts in zip(*found, strict=True)]

    def sequence(self, steps: Sequence[Tensor]) -> Tensor:
        """The sequence of what is known of every step, of all directions; the inverse of `steps`."""
        forward, *backward = zip(*[step.unbind(0) for step in steps], strict=True)
        order = [forward, *[values[::-1] for values in backward]]
        if self.time == -2 or self.n_directions == 1:
            parts = [value for values in zip(*order, strict=True) for value in values]
            joined = torch.stack(parts, self.time)
            return joined if self.n_directions == 1 else joined.unflatten(-2, (len(steps), -1)).flatten(-2)
        return torch.cat([torch.stack(values, self.time) for values in order], -1)

    def noise_of_weights(self) -> list[Tensor]:
        """What products with random weights add beyond first order: of the input, and of the state."""
        found, w = [], self.weights
        if w.input.variance is not None and self.x.variance is not None:
            found.append(_linear(self.x.variance, w.input.variance))
        if w.state.variance is not None:
            found.append(self.sequence([torch.bmm(v, w.state.variance.mT) for _, v in self.before]))
        return found


class Back:
    """The transposed map of a layer, and the noise that it meets on its way."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.known: Steps = layer.cell.steps([torch.stack(v) for v in zip(*layer.records, strict=True)])
        own = [layer.sequence(noise.unbind(0)) for noise in self.known.noise]
        self.noise = [*own, *layer.noise_of_weights()]  # variances

    def __call__(
        self, output: Tensor | None, last: Sequence[Tensor | None], by_weights: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """From cotangents of the output and of the last states [K, directions, ...].

        To those of the input, the first states and the weights, and to those of the noise.
        """
        layer, n = self.layer, self.layer.n_directions
        steps = [None] * len(layer.records) if output is None else layer.steps(output)
        x, by_state, first = self._through_time(
            steps, [None if c is None else c.transpose(0, 1) for c in last]
        )
        of_input = layer.sequence(x)
        of_input = of_input if n == 1 else of_input.unflatten(-1, (n, -1)).sum(-2)
        inputs = [of_input, *[c.transpose(0, 1) for c in first]]
        noise = [layer.sequence(values) for values in zip(*by_state, strict=True)]
        if by_weights:
            given, a = self._gates(noise)
            inputs += self._of_weights(given, a)
            both_random = layer.weights.input.variance is not None and layer.x.variance is not None
            noise += [given.flatten(-2)] if both_random else []
            noise += [] if layer.weights.state.variance is None else [a.flatten(-2)]
        return inputs, noise

    def _through_time(
        self, outputs: Sequence[Tensor | None], last: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[list[Tensor]], list[Tensor]]:
        """Cotangents of the input and of the states in all steps, and of the first states."""
        known, w = self.known, self.layer.weights
        weights = self.layer.cell.weights(w.state.mean, w.input.mean)
        n = self.layer.cell.n_units
        gates = [_each(v if v.shape[-1] == n else v.unflatten(-1, (-1, n))) for v in known.gates]
        kept, shown = _each(known.kept), _each(known.shown)
        like = next(c for c in (*outputs, *last) if c is not None)
        h: Any = last[0]
        c: Any = last[1] if len(last) > 1 else None
        by_input, by_state = [], []
        for t in reversed(range(len(outputs))):
            h = _sum(h, outputs[t])
            if h is None:  # a last state c alone is asked for
                h = like.new_zeros(*like.shape[:-1], self.layer.states[0].mean.shape[-1])
            h = h if w.projection is None else _product([h], [w.projection])
            if shown:
                c = h * shown[t] if c is None else torch.addcmul(c, h, shown[t])
            states = [h] if c is None else [h, c]
            by_state.append(states)
            found = _product([_times(s, g[t]) for s, g in zip(states, gates, strict=True)], weights)
            h, x = found.split([w.state.mean.shape[-1], w.input.mean.shape[-1]], -1)
            by_input.append(x)
            if c is not None:
                c = c * kept[t]
            elif kept:
                h = torch.addcmul(h, states[0], kept[t])
        return by_input[::-1], by_state[::-1], [h] if c is None else [h, c]

    def _gates(self, states: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Cotangents of W_ih x + b_ih and of a: sequences [..., directions, units]."""
        layer, found = self.layer, []
        for state, gates in zip(states, self.known.gates, strict=True):
            factors = layer.sequence(gates.unbind(0)).unflatten(
                -1, (layer.n_directions, -1, layer.cell.n_units)
            )
            cotangent = state.unflatten(-1, (layer.n_directions, 1, -1))
            found.append((cotangent * factors).flatten(-2))
        return layer.cell.arranged(found)

    def _of_weights(self, given: Tensor, a: Tensor) -> list[Tensor]:
        """Cotangents of the weights, direction by direction in the order of the operator's arguments."""
        layer = self.layer
        h = layer.sequence([h for h, _ in layer.before]).unflatten(-1, (layer.n_directions, -1))
        found: list[Tensor] = []
        for by_input, by_state, before in zip(given.unbind(-2), a.unbind(-2), h.unbind(-2), strict=True):
            found.append(torch.einsum("kbtg,btf->kgf", by_input, layer.x.mean))
            found.append(torch.einsum("kbtg,btf->kgf", by_state, before))
            if layer.weights.biases:
                found += [by_input.sum((1, 2)), by_state.sum((1, 2))]
        return found


def _linear(x: Tensor, weights: Tensor, biases: Tensor | None = None) -> Tensor:
    """x [..., inputs] by the weights of all directions, to [..., directions * units]."""
    return F.linear(x, weights.flatten(0, 1), None if biases is None else biases.flatten())


def _times(cotangent: Tensor, gates: Tensor) -> Tensor:
    """The cotangent of what goes into one gate, or into several side by side."""
    if gates.dim() == cotangent.dim():
        return cotangent * gates
    return (cotangent[..., None, :] * gates).flatten(-2)


def _product(cotangents: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The sum of [directions, K, batch, units] by [directions, units, inputs]."""
    first, *others = [c.flatten(1, 2) for c in cotangents]
    found = torch.bmm(first, weights[0])
    for other, weight in zip(others, weights[1:], strict=True):
        found = torch.baddbmm(found, other, weight)
    return found.unflatten(1, cotangents[0].shape[1:3])


def _each(values: Tensor | None) -> Sequence[Tensor]:
    """In every step, [directions, 1, batch, ...]; nothing if there are none."""
    return () if values is None else values.unsqueeze(2).unbind(0)


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second
