"""Chains of additions and multiplications by numbers are folded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from momentprop.capture.trace import trace
from momentprop.passes.rewrites import REWRITES
from momentprop.passes.rewrites.scalar_chains import FOLD_SCALAR_CHAINS
from networks import Apply
from passed import SCALAR, Block, count, operators, passed, rewritten, run

aten = torch.ops.aten


class TestFoldScalarChains:
    @pytest.mark.parametrize(
        ("function", "left"),
        [
            (lambda x: (x * 2 + 1) * 3, 2),
            (lambda x: x * 2 * 3, 1),
            (lambda x: x + 2 + 3, 1),
            (lambda x: x - 2 + 2 - 0.5, 1),
            (lambda x: torch.neg(-x), 0),
            (lambda x: -(1 - x), 1),
            (lambda x: 1 - (2 - x / 4), 2),
            (lambda x: (x / 4 - 1) / 0.5, 2),
            (lambda x: torch.add(x * 2, 3, alpha=4) - 1, 2),
            (lambda x: torch.sub(x, 3, alpha=-2) * 1.5, 2),
            (lambda x: torch.rsub(x + 1, 3, alpha=2), 2),
            (lambda x: torch.rsub(torch.rsub(x, 3, alpha=2), 1, alpha=0.5), 1),
            (lambda x: x * 0 + 3, 2),
            (lambda x: (x * 2 / 2) + 0, 0),
        ],
        ids=range(14),
    )
    def test_chains(self, function: Callable[[Tensor], Tensor], left: int) -> None:
        before, after = rewritten(Block(Apply(function, "chain")), torch.randn(2, 3).double())
        assert count(before, SCALAR) >= count(after, SCALAR) == left

    def test_a_single_operator_stays(self) -> None:
        before, after = rewritten(Block(Apply(lambda x: x * 2, "f")), torch.randn(2, 3).double())
        assert operators(after) == operators(before)

    def test_intermediate_values_that_are_used_elsewhere_stay(self) -> None:
        class Model(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                first = F.dropout(x, 0.5, self.training) * 2 + 1
                second = (first - 3) * 4 / 5
                return second.cos() * first

        before, after = rewritten(Model(), torch.randn(2, 3).double(), passes=(FOLD_SCALAR_CHAINS,))
        assert count(before, SCALAR) == 6  # with the product at the end
        assert count(after, SCALAR) == 5

    def test_chain_that_is_an_output_too(self) -> None:
        class Model(nn.Module):
            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                first = F.dropout(x, 0.5, self.training) * 2 * 3
                return first, first + 1 + 2

        model, x = Model().double().eval(), torch.randn(2, 3).double()
        before = trace(model, x)
        after = passed(before, REWRITES)
        for one, other in zip(run(before, model, (x,), True), run(after, model, (x,), True), strict=True):
            torch.testing.assert_close(other, one)

    def test_products_with_tensors_end_a_chain(self) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("scale", torch.randn(3))

            def forward(self, x: Tensor) -> Tensor:
                return ((F.dropout(x, 0.5, self.training) * 2 * 3) * self.scale) * 4 * 5

        before, after = rewritten(Model(), torch.randn(2, 3).double())
        assert (count(before, SCALAR), count(after, SCALAR)) == (5, 3)

    def test_integers_are_left_alone(self) -> None:
        """Their division truncates, their products overflow: they do not compose."""

        class Model(nn.Module):
            def forward(self, x: Tensor, n: Tensor) -> Tensor:
                index = (n * 3 + 1) * 2 - 5
                return F.dropout(x, 0.5, self.training) * (index / 4 * 0.5)

        x, n = torch.randn(2, 3).double(), torch.randint(5, (2, 3))
        before, after = rewritten(Model(), x, n)
        assert count(before, {aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor}) == 7
        integer = [
            node for node in after.graph.nodes if node.target in SCALAR and not node.meta["val"].is_complex()
        ]
        assert sum(not node.meta["val"].is_floating_point() for node in integer) == 4

    def test_casts_between_floating_types_are_kept(self) -> None:
        """Rounding to float32 in the middle is part of the function."""
        model = Block(Apply(lambda x: ((x * 3 + 1).float() * 5 + 2).double() / 3 * 7, "casts"))
        before, after = rewritten(model, torch.randn(2, 3).double())
        dtypes = [node.meta["val"].dtype for node in after.graph.nodes if node.target in SCALAR]
        assert torch.float32 in dtypes
        assert count(after, SCALAR) < count(before, SCALAR)
