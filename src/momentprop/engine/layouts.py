"""Finds out which elements of a traced value belong to which sample of the batch.

Covariance is wanted between outputs of one sample. For that the sweep back has to know, at every source of
noise, which elements belong to which sample; and models move, merge and split their batch dimension as they
like (`[B, T, C] -> [B T, C]`, `[T, B, C]`). So it is observed: the network runs on a small random batch, and
once more with one sample of it changed. What is different then depends on that sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from momentprop.capture.idle import run
from momentprop.capture.trace import Trace

_CHANGED = 1  # not the middle one: a flipped batch must not look like one that is not
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TRIES = 2  # an activation may hide a change, not every time


@dataclass(frozen=True)
class Layout:
    """A value in row-major order is [before, batch, after]."""

    before: int
    after: int
    whole: bool = True  # the first dimension is the batch, and nothing else
    alone: bool = False  # the value belongs to one sample, whatever its size

    @property
    def size(self) -> int:
        """Elements per sample, in the trace."""
        return self.before * self.after

    def size_in(self, value: Tensor) -> int:
        """Elements per sample."""
        return value.numel() if self.alone else self.size

    def batch_of(self, value: Tensor) -> Any:
        """The number of samples."""
        if self.alone:
            return 1
        return value.shape[0] if self.whole else value.numel() // self.size

    def split(self, rows: Tensor, batch: Any) -> Tensor:
        """[K, *shape] -> [batch, K, elements], the rest of the shape being anything."""
        if self.whole:
            return rows.flatten(2).transpose(0, 1) if rows.dim() > 2 else rows.T[..., None]
        if batch == 0:
            return rows.new_zeros(0, rows.shape[0], 0)
        parts = rows.reshape(rows.shape[0], 1 if self.alone else self.before, batch, -1)
        return parts.permute(2, 0, 1, 3).reshape(batch, rows.shape[0], -1)

    def samples(self, value: Tensor) -> Tensor:
        """A value as [batch, elements], a sample's elements in row-major order."""
        if self.alone:
            return value.reshape(1, -1)
        parts = value.reshape(self.before, self.batch_of(value), self.after)
        return parts.transpose(0, 1).reshape(-1, self.size)

    def restored(self, samples: Tensor, like: Tensor) -> Tensor:
        """The inverse of `samples`, for leading dimensions too: [..., batch, elements] -> [..., *shape]."""
        lead = samples.shape[:-2]
        if self.alone:
            return samples.reshape(*lead, *like.shape)
        parts = samples.reshape(*lead, samples.shape[-2], self.before, self.after)
        return parts.transpose(-3, -2).reshape(*lead, *like.shape)


def layouts(trace: Trace, state: list[Tensor]) -> dict[str, Layout]:
    """The layout of every value, by name, that depends on the inputs and in which samples do not mix."""
    if trace.signature.batch.whole:
        return {node.name: _alone(node) for node in trace.graph.nodes}
    for own_integers in (False, True):  # models may refuse tokens of which none ends the sentence
        try:
            return _observed(trace, state, own_integers)
        except Exception:
            continue
    return {}  # the model cannot run on such a batch: nothing is known about any value


def _alone(node: fx.Node) -> Layout:
    value = node.meta.get("val")
    return Layout(1, size_in_trace(value) if isinstance(value, Tensor) else 1, whole=False, alone=True)


def size_in_trace(value: Tensor) -> int:
    """Elements of a traced value for the inputs it was traced with; sizes that values decide count once."""
    sizes: list[Any] = [s.node.hint if isinstance(s, torch.SymInt) else s for s in value.shape]
    return math.prod([1 if size is None else size for size in sizes])


def _observed(trace: Trace, state: list[Tensor], own_integers: bool) -> dict[str, Layout]:
    batch = _batch_size(trace)
    found: dict[str, Layout] = {}
    inputs = [_inputs(trace, state, batch, seed, own_integers) for seed in range(_TRIES + 1)]
    own = {*trace.input_nodes}
    for node, values in run(trace.graph, trace.root, inputs, centred=False):
        first, *tries = [v[0] if isinstance(v, (list, tuple)) and len(v) else v for v in values]
        inner = node.op == "call_function" or node in own
        if not inner or not isinstance(first, Tensor):
            continue
        touched = torch.zeros_like(first, dtype=torch.bool)
        for after in tries:
            touched |= _bits(after) != _bits(first)
        layout = _lent(node, found) if not touched.any() else None
        layout = layout or _layout(touched, batch)
        if layout is not None:
            found[node.name] = layout
    return found


def _lent(node: fx.Node, known: dict[str, Layout]) -> Layout | None:
    """The layout of a value that its first argument lends its shape, as it does to ones and to noise."""
    like, shape = node.args[0] if node.args else None, _shape(node)
    if not isinstance(like, fx.Node) or not shape or _shape(like) != shape:
        return None
    return known.get(like.name)


def _shape(node: fx.Node) -> list[str]:
    """Return the shape in a form that compares without asking anything of symbolic sizes."""
    return [str(size) for size in getattr(node.meta.get("val"), "shape", ())]


def shape_of_one(value: Tensor) -> tuple[int, ...]:
    """The shape of a traced value in a batch of one."""
    sizes: list[Any] = list(value.shape)
    for i, size in enumerate(sizes):
        if isinstance(size, torch.SymInt):
            expression = size.node.expr
            sizes[i] = int(expression.subs(dict.fromkeys(expression.free_symbols, 1)))
    return tuple(sizes)


def size_of_one(value: Tensor) -> int:
    """Elements of a traced value in a batch of one."""
    return math.prod(shape_of_one(value))


def _layout(touched: Tensor, batch: int) -> Layout | None:
    """A cut of the value into samples such that what was touched lies in one of them.

    It may be less than that sample: padding is part of a sample, but does not depend on it.
    """
    total = int(touched.count_nonzero())
    if not total:
        return _layout_by_size(touched, batch)
    for d, size in enumerate(touched.shape):
        before, after = math.prod(touched.shape[:d]), math.prod(touched.shape[d + 1 :])
        for outer in range(1, size // batch + 1):  # a merged dimension is [outer, batch, inner]
            inner, rest = divmod(size, batch * outer)
            if rest:
                continue
            cut = touched.reshape(before * outer, batch, inner * after)
            if int(cut[:, _CHANGED].count_nonzero()) == total:
                return Layout(before * outer, inner * after, d == 0 and size == batch)
    return None


def _bits(value: Tensor) -> Tensor:
    """Return the bit pattern of the value, so that NaN compares equal to itself."""
    return value.view(_INTEGERS[value.element_size()]) if value.is_floating_point() else value


def _layout_by_size(value: Tensor, batch: int) -> Layout | None:
    """Find the layout of a value that no sample changes (padding, idle units) by the batch's size."""
    for d, size in enumerate(value.shape):
        if size == batch:
            return Layout(math.prod(value.shape[:d]), math.prod(value.shape[d + 1 :]), d == 0)
    return None


def _batch_size(trace: Trace) -> int:
    """A small number that is no factor of any other size in the graph."""
    values = [node.meta.get("val") for node in trace.graph.nodes]
    sizes = {s for v in values if isinstance(v, Tensor) for s in v.shape if isinstance(s, int)}
    primes = (5, 7, 11, 13, 17, 19, 23)
    return next((p for p in primes if all(s % p for s in sizes)), primes[-1])


def _inputs(trace: Trace, state: list[Tensor], batch: int, seed: int, own_integers: bool) -> list[Any]:
    """State and a small batch; a seed other than 0 changes one sample of it.

    Integers are 0, and 1 where changed; or those that the model was traced with, and moved on by one.
    """
    signature = trace.signature
    generator = torch.Generator().manual_seed(0)
    known = signature.integers if own_integers else [None] * len(signature.examples)
    inputs = []
    rows = signature.batch.rows
    for example, given, dim in zip(signature.examples, known, signature.batch.dims, strict=True):
        if given is None:
            inputs.append(_probe(example, generator, None if dim is None else (dim, batch * rows)))
        else:
            inputs.append(given if dim is None else _repeated(given.narrow(dim, 0, rows), dim, batch))
    if seed:
        generator.manual_seed(seed)
        for value, given, dim in zip(inputs, known, signature.batch.dims, strict=True):
            if dim is None:
                continue
            sample = value.narrow(dim, _CHANGED * rows, rows)
            if given is None:
                sample.copy_(_probe(sample, generator, change=True))
            else:
                other = given.narrow(dim, seed % (given.shape[dim] // rows) * rows, rows)
                sample.copy_(other.roll(seed, -1) if given.dim() > 1 else other)
    device = device_of(state)
    return [v.to(device) if isinstance(v, Tensor) else v for v in [*state, *inputs]]


def _repeated(value: Tensor, dim: int, times: int) -> Tensor:
    return value.repeat([times if d == dim else 1 for d in range(value.dim())])


def device_of(state: Sequence[Tensor]) -> torch.device:
    """Where the weights are, and examples have to be: not always on the default device."""
    return next((t.device for t in state), torch.device("cpu"))


def _probe(
    example: Any, generator: torch.Generator, batch: tuple[int, int] | None = None, change: bool = False
) -> Any:
    """Draw uniform numbers in [-1, 1]; integer inputs are 0, or 1 in the changed sample."""
    if not isinstance(example, Tensor):
        return example
    shape = list(example.shape)
    if batch is not None:
        shape[batch[0]] = batch[1]
    if not example.is_floating_point():
        return torch.full(shape, int(change), dtype=example.dtype, device="cpu")
    return torch.rand(shape, dtype=example.dtype, generator=generator, device="cpu") * 2 - 1
