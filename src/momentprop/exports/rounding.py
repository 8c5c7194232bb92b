"""Measures how far rounding alone moves a program's outputs: no runtime can be asked to agree closer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from momentprop.exports.program import Program
from momentprop.graph.private import OpOverload

aten = torch.ops.aten

# sums of products: what their rounding leaves is relative to the terms, not to a sum that is small
_SUMS = (
    aten.addmm, aten.baddbmm, aten.bmm, aten.conv1d, aten.conv2d, aten.conv3d, aten.convolution, aten.einsum,
    aten.linear, aten.matmul, aten.mean, aten.mm, aten.sum,
)  # fmt: skip

_BOUNDED = (aten.cos, aten.erf, aten.sigmoid, aten.sin, aten.softmax, aten._softmax, aten.tanh)


class _Rounded(fx.Interpreter):
    """Moves results at random by up to one unit in the last place: stochastic arithmetic (Vignes 1993).

    In sums the unit is that of the largest term. Nothing is computed in views, and whole numbers of whole
    numbers are exact: they stay as they are. No probability grows beyond 1.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.generator = torch.Generator().manual_seed(0)

    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        if not isinstance(n.target, OpOverload) or any(r.alias_info for r in n.target._schema.returns):
            return found
        given = [self.env[node] for node in n.all_input_nodes]
        if all(map(_is_whole, pytree.tree_leaves((given, found)))):
            return found
        is_sum, is_bounded = n.target.overloadpacket in _SUMS, n.target.overloadpacket in _BOUNDED

        def nudged(value: Tensor) -> Tensor:
            moved = self._nudged(value, is_sum)
            return moved.clamp(-1, 1) if is_bounded else moved

        return pytree.tree_map_only(Tensor, nudged, found)

    def _nudged(self, value: Tensor, is_sum: bool) -> Tensor:
        if not value.is_floating_point() or not value.numel():
            return value
        direction = torch.randint(-1, 2, value.shape, generator=self.generator).to(value)
        finite = value.nan_to_num(0.0, 0.0, 0.0)  # what overflowed is not rounded
        size = finite.abs().max() if is_sum else finite
        return torch.addcmul(value, size, direction, value=torch.finfo(value.dtype).eps)


def _is_whole(value: Any) -> bool:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return True
    return bool((value == value.round()).all())


def rounded(program: Program) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """Return the program as it might be rounded elsewhere, to see how much that matters."""
    module = program.exported.module(check_guards=False)

    @torch.no_grad()
    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(_Rounded(module).run(*tensors))

    return run
