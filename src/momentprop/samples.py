"""Which elements of a traced value belong to which sample of the batch.

Covariance is wanted between outputs of one sample. For that the sweep back has to know, at every source of
noise, which elements belong to which sample; and models move, merge and split their batch dimension as they
like (`[B, T, C] -> [B T, C]`, `[T, B, C]`). So it is observed: the network runs once on a small batch
whose middle sample is NaN, which passes through every operator; what is NaN then depends on that sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from momentprop.trace import DROPOUTS, Trace

_BATCH, _MIDDLE = 3, 1


@dataclass(frozen=True)
class Layout:
    """A value in row-major order is [before, batch, after]."""

    before: int
    after: int
    whole: bool = True  # the first dimension is the batch, and nothing else

    @property
    def size(self) -> int:
        """Elements per sample."""
        return self.before * self.after

    def batch_of(self, value: Tensor) -> Any:
        """The number of samples."""
        return value.shape[0] if self.whole else value.numel() // self.size

    def split(self, rows: Tensor, batch: Any) -> Tensor:
        """[K, *shape] -> [batch, K, elements], the rest of the shape being anything."""
        if self.whole:
            return rows.flatten(2).transpose(0, 1) if rows.dim() > 2 else rows.T[..., None]
        if batch == 0:
            return rows.new_zeros(0, rows.shape[0], 0)
        parts = rows.reshape(rows.shape[0], self.before, batch, -1)
        return parts.permute(2, 0, 1, 3).reshape(batch, rows.shape[0], -1)

    def samples(self, value: Tensor) -> Tensor:
        """A value as [batch, elements], a sample's elements in row-major order."""
        parts = value.reshape(self.before, self.batch_of(value), self.after)
        return parts.transpose(0, 1).reshape(-1, self.size)

    def restored(self, samples: Tensor, like: Tensor) -> Tensor:
        """The inverse of `samples`, for leading dimensions too: [..., batch, elements] -> [..., *shape]."""
        lead = samples.shape[:-2]
        parts = samples.reshape(*lead, samples.shape[-2], self.before, self.after)
        return parts.transpose(-3, -2).reshape(*lead, *like.shape)


def layouts(trace: Trace, state: list[Tensor]) -> dict[str, Layout]:
    """The layout of every value, by name, that depends on the inputs and in which samples do not mix."""
    try:
        values = _run(trace, state)
    except Exception:  # the model cannot run on a probe: nothing is known about any value
        return {}
    found = {}
    for node, value in values.items():
        parts = [v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, Tensor)]
        layout = _layout(parts[0].isnan()) if parts else None
        if layout is not None:
            found[node.name] = layout
    return found


def _layout(touched: Tensor) -> Layout | None:
    """A cut of the value into samples such that what was touched lies in the middle one.

    It may be less than that sample: padding is part of a sample, but does not depend on it.
    """
    if not touched.any():
        return None
    for d, size in enumerate(touched.shape):
        before, after = math.prod(touched.shape[:d]), math.prod(touched.shape[d + 1 :])
        for outer in range(1, size // _BATCH + 1):  # a merged dimension is [outer, batch, inner]
            inner, rest = divmod(size, _BATCH * outer)
            if rest:
                continue
            cut = touched.reshape(before * outer, _BATCH, inner * after)
            if cut[:, _MIDDLE].sum() == touched.sum():
                return Layout(before * outer, inner * after, d == 0 and size == _BATCH)
    return None


def _run(trace: Trace, state: list[Tensor]) -> dict[fx.Node, Any]:
    """All values of the graph on a batch of three, the middle one NaN; dropouts do nothing."""
    env: dict[fx.Node, Any] = {}
    placeholders = [n for n in trace.graph.nodes if n.op == "placeholder"]
    inputs = [_probe(e, b) for e, b in zip(trace.signature.examples, trace.signature.batched, strict=True)]
    device = next((t.device for t in state), torch.device("cpu"))
    for node, value in zip(placeholders, [*state, *inputs], strict=True):
        env[node] = value.to(device) if isinstance(value, Tensor) else value
    with torch.no_grad():
        for node in trace.graph.nodes:
            if node.op == "get_attr":
                env[node] = getattr(trace.root, str(node.target))
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
                env[node] = args[0] if node.target in DROPOUTS else node.target(*args, **kwargs)
                _poison(node, env)
    return {n: v for n, v in env.items() if n.op == "call_function" or n in trace.input_nodes}


def _probe(example: Any, batched: bool) -> Any:
    if not isinstance(example, Tensor):
        return example
    shape = [_BATCH, *example.shape[1:]] if batched else example.shape
    if not example.is_floating_point():
        return torch.zeros(shape, dtype=example.dtype)  # an index or a mask: valid everywhere
    value = torch.ones(shape, dtype=example.dtype)
    if batched:
        value[_MIDDLE] = math.nan
    return value


def _poison(node: fx.Node, env: dict[fx.Node, Any]) -> None:
    """What is looked up by integer inputs cannot inherit NaN from them: its own batch dimension takes it."""
    value = env[node]
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.isnan().any():
        return
    from_batch = [
        env[n] for n in node.all_input_nodes if isinstance(env.get(n), Tensor) and _integer_batch(n, env[n])
    ]
    symbolic = node.meta.get("val")
    if from_batch and isinstance(symbolic, Tensor) and symbolic.dim() and _open_batch(symbolic):
        env[node] = value.clone()
        env[node][_MIDDLE] = math.nan


def _integer_batch(node: fx.Node, value: Tensor) -> bool:
    symbolic = node.meta.get("val")
    return not value.is_floating_point() and isinstance(symbolic, Tensor) and _open_batch(symbolic)


def _open_batch(symbolic: Tensor) -> bool:
    """Whether the first dimension is the batch and nothing else."""
    return (
        symbolic.dim() > 0
        and isinstance(symbolic.shape[0], torch.SymInt)
        and symbolic.shape[0].node.expr.is_symbol
    )
