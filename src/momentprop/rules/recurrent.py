"""Recurrent layers and cells, each as one operator.

What goes into the gates from the sequence, W_ih x, comes from one product for all steps; what goes into them
from the state, W_hh h, step by step (recurrent_layer.py). The linear part of a layer is the linear parts of
its steps (recurrent_cells.py), one after the other: its transposed map goes back through time, and on its way
meets the noise of every step.

Dropout between layers is an operator of its own: passes/canonical/recurrent.py takes layers apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from momentprop.moments import Moments, is_moments, mean_of
from momentprop.rules.linearization import Diagonal, Linearization, Propagated, Pull, mapped
from momentprop.rules.recurrent_cells import Gru, Lstm, Maker, rnn_relu, rnn_tanh
from momentprop.rules.recurrent_layer import Back, Layer, Uncertain, Weights
from momentprop.rules.registry import EXACT_IF_UNCORRELATED, rule

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class _Result:
    """Output and last states of a layer; the transposed map, and variances of the noise in it."""

    moments: list[Moments]
    linearize: Callable[[], tuple[Pull, list[Tensor]]]


def _run(
    make: Maker, x: Any, states: Sequence[Any], params: Sequence[Any], has_biases: bool, batch_first: bool
) -> _Result:
    dtype = mean_of(x).dtype
    inner = torch.promote_types(dtype, torch.float32)  # 16 bits are too short for differences of variances
    weights = Weights(params, mean_of(states[0]).shape[0], has_biases, inner)
    given = [_cast(v, inner) for v in (x, *states)]
    layer = Layer(make, given[0], given[1:], weights, batch_first)
    random = [is_moments(v) for v in (x, *states, *params)]

    def linearize() -> tuple[Pull, list[Tensor]]:
        back = Back(layer)

        def pull(cotangents: Sequence[Any]) -> list[Tensor]:
            output, *last = [None if c is None else c.to(inner) for c in cotangents]
            inputs, noise = back(output, last, any(random[len(given) :]))
            asked = [c.to(dtype) for c, wanted in zip(inputs, random, strict=False) if wanted]
            return [*asked, *noise]

        return pull, back.noise

    found = [Moments(v.mean.to(dtype), v.known_variance.to(dtype)) for v in (layer.output, *layer.last)]
    return _Result(found, linearize)


def _cast(value: Any, dtype: torch.dtype) -> Uncertain:
    variance = value.variance.to(dtype) if is_moments(value) else None
    return Uncertain(mean_of(value).to(dtype), variance)


def _layer(op: Any, make: Maker, n_states: int) -> None:
    """One layer, its dropout off."""

    @rule(op, exactness=EXACT_IF_UNCORRELATED, reference="product; activations", refuses=_refuses)
    def propagate(
        input: Any,
        hx: Any,
        params: Sequence[Any],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Propagated:
        states = hx if n_states > 1 else [hx]
        found = _run(make, input, states, params, has_biases, batch_first)

        def linearize() -> Linearization:
            pull, variances = found.linearize()
            return mapped(pull, inner=[Diagonal(variance) for variance in variances])

        return Propagated(found.moments, linearize)


def _refuses(arguments: Mapping[str, Any], random: frozenset[str]) -> str | None:
    n_weights = (1 + arguments["bidirectional"]) * (2 + 2 * arguments["has_biases"])
    if "params" in random and len(arguments["params"]) > n_weights:
        return "its weights are random and it projects its states (proj_size), which has no rule"
    steps = arguments["input"].meta["val"].shape[1 if arguments["batch_first"] else 0]
    if isinstance(steps, int) or not steps.node.expr.free_symbols:  # the tracer may have worked it out
        return None
    return (
        "noise reaches a recurrent layer whose number of steps is the batch dimension, which varies; "
        "if the inputs are [time, batch, ...], say batch_dim=1"
    )


def _cell(op: Any, make: Maker, n_states: int) -> None:
    """A cell: a layer of one step and one direction."""

    @rule(op, exactness=EXACT_IF_UNCORRELATED, reference="product; activations")
    def propagate(
        input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
    ) -> Propagated:
        biases = [] if b_ih is None else [b_ih, b_hh]
        given = [_unsqueezed(v) for v in (input, *(hx if n_states > 1 else [hx]))]
        whole = _run(make, given[0], given[1:], [w_ih, w_hh, *biases], bool(biases), False)
        states = [Moments(v.mean[0], v.variance[0]) for v in whole.moments[1:]]
        n_random = sum(map(is_moments, given))

        def linearize() -> Linearization:
            pulled, variances = whole.linearize()

            def pull(cotangent: Any) -> list[Tensor]:
                of_states = cotangent if n_states > 1 else [cotangent]
                found = pulled([None, *[None if c is None else c[:, None] for c in of_states]])
                n_inputs = len(found) - len(variances)  # of which weights have no time
                return [c if n_random <= i < n_inputs else c[:, 0] for i, c in enumerate(found)]

            return mapped(pull, inner=[Diagonal(variance[0]) for variance in variances])

        return Propagated(states if n_states > 1 else states[0], linearize)


def _unsqueezed(value: Any) -> Any:
    return Moments(value.mean[None], value.variance[None]) if is_moments(value) else value[None]


for _make, _n_states, _whole, _step in (
    (Lstm, 2, aten.lstm.input, aten.lstm_cell.default),
    (Gru, 1, aten.gru.input, aten.gru_cell.default),
    (rnn_tanh, 1, aten.rnn_tanh.input, aten.rnn_tanh_cell.default),
    (rnn_relu, 1, aten.rnn_relu.input, aten.rnn_relu_cell.default),
):
    _layer(_whole, _make, _n_states)
    _cell(_step, _make, _n_states)
