"""The steps of recurrent cells: moments of the next state, and how a step acts on deviations.

A cell's gates are functions of a = W_ih x + W_hh h + b. Its states are products and sums of gates and of the
states before, whose moments are those of independent factors,

    E[X Y] = E_x E_y,    Var[X Y] = V_x (V_y + E_y^2) + E_x^2 V_y.

To first order a step is linear: the derivatives of the new states by a and by the old ones, element by
element, with the gains of the gates' functions. What the variance exceeds that is noise of the step, one
source for each unit of a state.

Tensors are [directions, batch, units], and stacked over time [time, directions, batch, units]; cotangents
have K behind directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from momentprop.gaussian.composites import relu_moments
from momentprop.gaussian.gates import tanh_in_few
from momentprop.gaussian.normal import positive_probability
from momentprop.rules.linearization import residual

Pair = tuple[Tensor, Tensor]  # mean and variance
States = tuple[Pair, ...]  # h first
Response = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Steps:
    """All steps of a cell to first order, as tensors over time."""

    gates: tuple[Tensor, ...]  # derivatives of every state by what goes into its gates, one beside the other
    noise: tuple[Tensor, ...]  # of every state
    kept: Tensor | None = None  # derivative of the last state by itself before
    shown: Tensor | None = None  # derivative of h by the new state of the cell


class Cell(Protocol):
    """A kind of recurrent cell."""

    n_units: int
    n_apart: int  # gates whose W_ih x + b_ih is no part of a
    scale: Tensor  # by which `step` wants a multiplied

    def step(self, a: Pair, apart: Pair, states: States) -> tuple[States, tuple[Tensor, ...]]:
        """The new states, and what `steps` needs of this step."""

    def steps(self, records: Sequence[Tensor]) -> Steps:
        """All steps to first order, of their records stacked over time."""

    def weights(self, by_state: Tensor, by_input: Tensor) -> list[Tensor]:
        """Which weights, those of the state beside those of the input, lead to the gates of every state."""

    def arranged(self, gates: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Cotangents of W_ih x + b_ih, and of a, from those of every state's gates."""


class Lstm:
    """c' = f c + i g, h' = o tanh(c'), with i, f, o = sigmoid and g = tanh of a."""

    n_apart = 0

    def __init__(self, like: Tensor) -> None:
        self.tanh, self.n_units = tanh_in_few(like), like.shape[-1]
        half, zero = like.new_full((self.n_units,), 0.5), like.new_zeros(self.n_units)
        self.scale = torch.cat([half, half, zero + 1, half])  # sigmoid(x) = (1 + tanh(x / 2)) / 2
        self.shift = torch.cat([half, half, zero, half])
        self.square = self.scale * self.scale

    def step(self, a: Pair, apart: Pair, states: States) -> tuple[States, tuple[Tensor, ...]]:
        c, c_var = states[1]
        mean, variance, gain = self.tanh(*a)
        mean, variance = torch.addcmul(self.shift, mean, self.scale), variance * self.square
        square = mean * mean
        i, f, g, o = mean.chunk(4, -1)
        i_var, f_var, g_var, o_var = variance.chunk(4, -1)
        i_square, f_square, g_square, o_square = square.chunk(4, -1)
        new = torch.addcmul(f * c, i, g)
        new_var = torch.addcmul(f_square * c_var, f_var, torch.addcmul(c_var, c, c))
        new_var = torch.addcmul(torch.addcmul(new_var, i_square, g_var), i_var, g_var + g_square)
        out, out_var, out_gain = self.tanh(new, new_var)
        h_var = torch.addcmul(o_square * out_var, o_var, torch.addcmul(out_var, out, out))
        record = (a[1], mean, variance, gain, c, c_var, new_var, out, out_var, out_gain)
        return ((o * out, h_var), (new, new_var)), record

    def steps(self, records: Sequence[Tensor]) -> Steps:
        spread, mean, variance, gain, c, c_var, new_var, out, out_var, out_gain = records
        left = residual(variance, gain * self.scale, spread)
        gain_c, gain_o = (gain * self.square).split([3 * self.n_units, self.n_units], -1)
        i, f, g, o = mean.chunk(4, -1)
        i_var, f_var, g_var, o_var = variance.chunk(4, -1)
        i_left, f_left, g_left, o_left = left.chunk(4, -1)
        noise_c = f_var * c_var + i_var * g_var + c * c * f_left + g * g * i_left + i * i * g_left
        noise_h = o_var * out_var + out * out * o_left + o * o * residual(out_var, out_gain, new_var)
        return Steps(
            gates=(out * gain_o, torch.cat([g, c, i], -1) * gain_c),
            noise=(noise_h, noise_c),
            kept=f,
            shown=o * out_gain,
        )

    def weights(self, by_state: Tensor, by_input: Tensor) -> list[Tensor]:
        of_c, of_h = torch.cat([by_state, by_input], -1).split([3 * self.n_units, self.n_units], 1)
        return [of_h, of_c]

    def arranged(self, gates: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        a = torch.cat([gates[1], gates[0]], -1)
        return a, a


class Gru:
    """h' = z h + (1 - z) n, n = tanh(W_in x + b_in + r (W_hn h + b_hn)), with r, z = sigmoid of a.

    The last part of a is W_hn h + b_hn alone.
    """

    n_apart = 1

    def __init__(self, like: Tensor) -> None:
        self.tanh, self.n_units = tanh_in_few(like), like.shape[-1]
        half = like.new_full((2 * self.n_units,), 0.5)
        self.scale = torch.cat([half, like.new_ones(self.n_units)])

    def step(self, a: Pair, apart: Pair, states: States) -> tuple[States, tuple[Tensor, ...]]:
        (h, h_var), n = states[0], self.n_units
        spread = a[1][..., : 2 * n]
        mean, variance, gain = self.tanh(a[0][..., : 2 * n], spread)
        mean, variance = mean * 0.5 + 0.5, variance * 0.25
        (r, z), (r_var, z_var) = mean.chunk(2, -1), variance.chunk(2, -1)
        m, m_var = a[0][..., 2 * n :], a[1][..., 2 * n :]
        u = torch.addcmul(apart[0], r, m)
        u_var = apart[1] + r_var * torch.addcmul(m_var, m, m) + r * r * m_var
        new, new_var, new_gain = self.tanh(u, u_var)
        rest = 1 - z
        out = torch.addcmul(z * h, rest, new)
        factors = torch.addcmul(h_var, h, h) + torch.addcmul(new_var, new, new)
        out_var = torch.addcmul(z_var * factors, z * z, h_var) + rest * rest * new_var
        record = (spread, mean, variance, gain, m, m_var, u_var, new, new_var, new_gain, h, h_var)
        return ((out, out_var),), record

    def steps(self, records: Sequence[Tensor]) -> Steps:
        spread, mean, variance, gain, m, m_var, u_var, new, new_var, new_gain, h, h_var = records
        left = residual(variance, gain * 0.5, spread)
        (r, z), (r_var, z_var), (r_left, z_left) = (v.chunk(2, -1) for v in (mean, variance, left))
        by_new, (r_gain, z_gain) = 1 - z, (gain * 0.25).chunk(2, -1)
        by_u = by_new * new_gain
        noise = z_var * (h_var + new_var) + (h - new).square() * z_left
        noise = noise + by_new * by_new * residual(new_var, new_gain, u_var)
        noise = noise + by_u * by_u * (r_var * m_var + m * m * r_left)
        gates = torch.cat([by_u * m * r_gain, (h - new) * z_gain, by_u * r, by_u], -1)
        return Steps((gates,), (noise,), kept=z)

    def weights(self, by_state: Tensor, by_input: Tensor) -> list[Tensor]:
        state = F.pad(by_state, (0, 0, 0, self.n_units))
        first, last = by_input.split([2 * self.n_units, self.n_units], 1)
        return [torch.cat([state, torch.cat([first, torch.zeros_like(last), last], 1)], -1)]

    def arranged(self, gates: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        r, z, by_state, by_input = gates[0].chunk(4, -1)
        return torch.cat([r, z, by_input], -1), torch.cat([r, z, by_state], -1)


class Rnn:
    """h' = f(a), f being tanh or relu."""

    n_apart = 0

    def __init__(self, response: Response, like: Tensor) -> None:
        self.response, self.n_units = response, like.shape[-1]
        self.scale = like.new_ones(self.n_units)

    def step(self, a: Pair, apart: Pair, states: States) -> tuple[States, tuple[Tensor, ...]]:
        mean, variance, gain = self.response(*a)
        return ((mean, variance),), (variance, gain, a[1])

    def steps(self, records: Sequence[Tensor]) -> Steps:
        variance, gain, spread = records
        return Steps((gain,), (residual(variance, gain, spread),))

    def weights(self, by_state: Tensor, by_input: Tensor) -> list[Tensor]:
        return [torch.cat([by_state, by_input], -1)]

    def arranged(self, gates: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return gates[0], gates[0]


def rnn_tanh(like: Tensor) -> Rnn:
    return Rnn(tanh_in_few(like), like)


def rnn_relu(like: Tensor) -> Rnn:
    def response(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return *relu_moments(mean, variance), positive_probability(mean, variance)

    return Rnn(response, like)


Maker = Callable[[Any], Cell]
