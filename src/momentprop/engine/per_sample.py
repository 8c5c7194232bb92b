"""Networks whose samples share noise: each sample by itself, all of them at once.

Dropout of a tensor without a batch dimension, such as a table of positions, is the same for the whole batch.
Which noise a sample shares with others does not matter for the covariance of its own outputs: a batch of one
has the same distribution. So the two sweeps run on batches of one, where every value belongs to the one
sample, mapped over the batch by `torch.vmap`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from momentprop.capture.trace import Trace
from momentprop.engine.layouts import Layout, device_of, size_of_one
from momentprop.engine.plan import Plan
from momentprop.engine.program import Program, Wanted
from momentprop.errors import CovarianceError, ExportError
from momentprop.graph.ops import RECURRENT
from momentprop.graph.place import place_of
from momentprop.graph.reach import reach
from momentprop.moments import Moments, is_moments
from momentprop.rules.registry import RULES, Lookup, Role

aten = torch.ops.aten
_Place = tuple[int, Layout]  # the dimension of an output that holds the batch, and its layout


def per_sample(
    trace: Trace, random: set[fx.Node], rules: Lookup, wanted: Wanted, state: Sequence[Tensor]
) -> PerSample | None:
    """A program that takes samples one by one, if they share noise and that is all they share."""
    layouts = wanted.layouts
    shared = [n for n in trace.graph.nodes if n in random and n.name not in layouts]
    if not layouts or not shared or any(node in _dependent(trace) for node in shared):
        return None
    try:
        program = PerSample(trace, random, rules, wanted, shared)
        uncertain = [node in random for node in trace.input_nodes]
        tensors = trace.signature.tensors(uncertain, device_of(state), batch=2)
        program(*state, *trace.signature.joined(tensors, uncertain))
    except Exception as error:
        raise CovarianceError(
            f"samples of the batch share noise, and cannot be taken one by one ({error}):\n"
            f"  {place_of(shared[0])}"
        ) from error
    return program


def _dependent(trace: Trace) -> set[fx.Node]:
    """Find what depends on the values of the inputs, not on their number alone."""

    def by_value(node: fx.Node) -> bool:
        rule = RULES.find(node.target)
        return rule is None or rule.role is not Role.SHAPE

    return reach(trace.graph, trace.input_nodes, carries=by_value)


class PerSample(nn.Module):
    """A program for a batch of one, mapped over the batch."""

    def __init__(
        self, trace: Trace, random: set[fx.Node], rules: Lookup, wanted: Wanted, shared: Sequence[fx.Node]
    ) -> None:
        super().__init__()
        copy = dataclasses.replace(trace, graph=trace.copy_graph())
        names = {node.name for node in random}
        for node in copy.graph.nodes:
            if node.target is aten.sym_size.int:  # which vmap does not know
                node.target = _size
        own = {node.name: Layout(1, size_of_one(_first(node)), False) for node in shared}
        marked = {node for node in copy.graph.nodes if node.name in names}
        layouts = wanted.layouts
        wanted = dataclasses.replace(wanted, layouts={**layouts, **own})
        self.one = Program(copy, marked, rules, wanted)
        # vmap does not know recurrent layers, which stay PyTorch's own where no noise reaches them
        self.maps = all(node.target not in RECURRENT or node in random for node in trace.graph.nodes)
        self.n_state = len(trace.state)
        self.batch = trace.signature.batch
        outputs: Any = next(reversed(trace.graph.nodes)).args[0]
        self.places = [_batch_place(v, layouts) for v in outputs]

    @property
    def plan(self) -> Plan:
        return self.one.plan

    @property
    def n_outputs(self) -> int:
        """Count the outputs per sample that get a covariance."""
        return self.one.n_outputs

    def forward(self, *values: Any) -> list[Any]:
        state, inputs = values[: self.n_state], values[self.n_state :]
        given: list[Tensor] = []
        for value, dim in zip(inputs, self.batch.dims, strict=True):
            if dim is not None:
                tensors = [value.mean, value.variance] if is_moments(value) else [value]
                given += [t.movedim(dim, 0).unflatten(0, (-1, self.batch.rows)) for t in tensors]
        empty = given[0].shape[0] == 0  # which vmap does not take
        if empty:
            given = [v.new_zeros(1, *v.shape[1:]) for v in given]
        kept: list[Any] = []

        def run(*one: Tensor) -> tuple[Tensor, ...]:
            rest, filled = iter(one), []
            for value, dim in zip(inputs, self.batch.dims, strict=True):
                filled.append(value if dim is None else _next(value, rest, dim))
            outputs = self.one(*state, *filled)
            kept[:] = outputs
            return tuple([leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)])

        found = iter(torch.vmap(run)(*given) if self.maps else _one_by_one(run, given))
        batch = 0 if empty else given[0].shape[0]

        def joined(place: _Place | None, path: Any, one: Any) -> Any:
            return _joined(path, one, next(found), place, batch) if isinstance(one, Tensor) else one

        pairs = zip(kept, self.places, strict=True)
        return [pytree.tree_map_with_path(partial(joined, place), out) for out, place in pairs]


def _next(value: Any, rest: Any, dim: int) -> Any:
    """The next input of one sample, whose rows go back to the dimension of the batch."""
    found = [next(rest).movedim(0, dim) for _ in range(2 if is_moments(value) else 1)]
    return Moments(*found) if is_moments(value) else found[0]


def _one_by_one(run: Callable[..., tuple[Tensor, ...]], given: Sequence[Tensor]) -> list[Tensor]:
    if torch.compiler.is_exporting():
        raise ExportError(
            "samples share noise and are taken one by one, since torch.vmap does not know recurrent layers: "
            "such a network cannot be exported for any batch size"
        )
    rows = [run(*one) for one in zip(*given, strict=True)]
    return [torch.stack(values) for values in zip(*rows, strict=True)]


def _size(x: Any, dim: int) -> Any:
    return x.shape[dim]


def _first(node: fx.Node) -> Any:
    value = node.meta["val"]
    return value[0] if isinstance(value, (list, tuple)) else value


def _batch_place(output: Any, layouts: Mapping[str, Layout]) -> _Place | None:
    """Where an output holds the batch; None if it has none."""
    if not isinstance(output, fx.Node) or output.name not in layouts:
        return None
    value = output.meta["val"]
    found = [d for d, size in enumerate(value.shape) if isinstance(size, torch.SymInt)]
    return (found[0], layouts[output.name]) if found else None


def _joined(path: Any, one: Tensor, every: Tensor, place: _Place | None, batch: Any) -> Tensor:
    """A tensor of an output of the batch: `one` is that of one sample, `every` holds all samples'."""
    name = path[-1].name if path else ""
    if name in ("covariance", "indices"):
        return every[:batch].flatten(0, 1)
    if name in ("effects", "probabilities"):  # for every source one of the output's shape
        pairs = zip(one, every.unbind(1), strict=True)
        return torch.stack([_joined((), *pair, place, batch) for pair in pairs])
    if place is None:
        return every[0]
    dim, layout = place
    shape = [batch * s if d == dim else s for d, s in enumerate(one.shape)]
    rows = every[:batch].reshape(batch, layout.before, one.numel() // layout.before)
    return rows.transpose(0, 1).reshape(shape)
