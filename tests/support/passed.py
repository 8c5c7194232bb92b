"""Traces before and after passes, and the layers that tests of passes are made of."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from momentprop.capture.trace import Trace, trace
from momentprop.graph.ops import DROPOUTS
from momentprop.passes import runner
from momentprop.passes.rewrites import REWRITES

aten = torch.ops.aten
RELU, NORM = aten.relu.default, aten.batch_norm.default
POOLS = (aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default)
CONVOLUTIONS = {
    getattr(getattr(aten, f"conv{n}d"), overload) for n in (1, 2, 3) for overload in ("default", "padding")
}
RESHAPES = (aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int)
SCALAR = {
    getattr(getattr(aten, name), overload)
    for name in ("add", "sub", "mul", "div", "rsub")
    for overload in ("Tensor", "Scalar")
} | {aten.neg.default}


def _softmax(x: Tensor, dim: int, log: bool) -> Tensor:
    return x.log_softmax(dim) if log else x.softmax(dim)


def _norm(x: Tensor, shape: list[int], center: bool, eps: float) -> Tensor:
    return torch.layer_norm(x, shape, eps=eps) if center else torch.rms_norm(x, shape, eps=eps)


JOINED: dict[Any, Any] = {  # dropout and what is behind it
    torch.ops.momentprop.dropped_max_pool.default: lambda others: POOLS[len(others[0]) - 1],
    torch.ops.momentprop.dropped_amax.default: lambda others: aten.amax.default,
    torch.ops.momentprop.dropped_softmax.default: lambda others: _softmax,
    torch.ops.momentprop.dropped_norm.default: lambda others: _norm,
}


def passed(made: Trace, passes: Sequence[runner.Pass]) -> Trace:
    """The trace with passes applied; the one given is left alone."""
    copy = dataclasses.replace(made, graph=made.copy_graph())
    runner.run(copy.graph, passes, copy.input_nodes)
    return copy


def operators(made: Trace) -> list[Any]:
    """The operators of the graph, in order."""
    return [node.target for node in made.graph.nodes if node.op == "call_function"]


def count(made: Trace, kinds: Any) -> int:
    return sum(op in kinds for op in operators(made))


def run(made: Trace, model: nn.Module, inputs: tuple[Any, ...], masked: bool) -> list[Any]:
    """The graph as a plain function: dropouts do nothing, or multiply by a mask that their number fixes."""
    graph = made.copy_graph()

    def mask(x: Tensor, p: float, seed: int, dims: int | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        shape = x.shape if dims is None else (*x.shape[:dims], *[1] * (x.dim() - dims))
        return x * torch.rand(shape, generator=generator, dtype=x.dtype).round() / (1 - p)

    for number, node in enumerate([n for n in graph.nodes if n.target in (*DROPOUTS, *JOINED)]):
        x, p, *others = node.args
        if node.target in JOINED:
            with graph.inserting_before(node):
                dropped = graph.call_function(mask, (x, p, number)) if masked else x
            node.target, node.args = JOINED[node.target](others), (dropped, *others)
        elif masked:
            dims = 2 if node.target is aten.feature_dropout.default else None
            node.target, node.args = mask, (x, p, 0 if dims else number, dims)
        else:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    state = [
        made.constants[name] if name in made.constants else functools.reduce(getattr, name.split("."), model)
        for name in made.state
    ]
    with torch.no_grad():
        return fx.GraphModule(made.root, graph)(*state, *inputs)


def rewritten(
    model: nn.Module, *inputs: Any, passes: Sequence[runner.Pass] = REWRITES
) -> tuple[Trace, Trace]:
    """The trace of a model in float64 before and after; the function is asserted to be the same."""
    model = model.double().eval()
    before = trace(model, inputs)
    text = str(before.graph)
    after = passed(before, passes)
    assert str(before.graph) == text  # the trace given is left alone
    with torch.no_grad():
        plain = model(*inputs)
    (out, *_) = run(after, model, inputs, masked=False)
    torch.testing.assert_close(out, plain, rtol=1e-12, atol=1e-12)
    for one, other in zip(
        run(before, model, inputs, masked=True), run(after, model, inputs, masked=True), strict=True
    ):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)
    return before, after


def norm(cls: Any, channels: int, signs: str = "mixed", **options: Any) -> nn.Module:
    """Batch norm with random statistics and scales: all positive, all negative, zero, or of all kinds."""
    made = cls(channels, **options)
    nn.init.normal_(made.running_mean)
    nn.init.uniform_(made.running_var, 0.2, 2.0)
    if made.weight is not None:
        nn.init.normal_(made.bias)
        nn.init.uniform_(made.weight, 0.3, 1.5)
        with torch.no_grad():
            kinds = {"positive": [1.0], "negative": [-1.0], "zero": [0.0], "mixed": [1.0, -1.0, 0.0]}[signs]
            made.weight.mul_(torch.tensor(kinds * channels)[:channels])
    return made


def images(n: int, channels: int = 3, size: int = 7) -> Tensor:
    return torch.randn(2, channels, *[size] * n, dtype=torch.float64)


def norm_of(n: int) -> Any:
    return (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[n - 1]


def pool_of(n: int) -> Any:
    return (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[n - 1]


class Block(nn.Sequential):
    """Layers that noise reaches, none of them right behind the dropout: rewrites take some of those along."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(_Flipped(), *layers)


class _Flipped(nn.Module):
    """Dropped values with their channels in reverse order."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.3, self.training).flip(1)
