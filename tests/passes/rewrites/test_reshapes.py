"""Of several reshapes in a row one is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from networks import Apply
from passed import RESHAPES, Block, count, operators, rewritten

aten = torch.ops.aten


class TestMergeReshapes:
    @pytest.mark.parametrize(
        "function",
        [
            lambda x: x.view(-1, 12).view(x.shape[0], 3, 4),
            lambda x: x.reshape(x.shape[0], 6, 2).reshape(x.shape[0], -1),
            lambda x: x.flatten(1).view(x.shape[0], 4, 3),
            lambda x: x.unsqueeze(1).contiguous().view(x.shape[0], 12),
            lambda x: x.unsqueeze(-1).squeeze(-1).reshape(x.shape[0], 2, 6),
            lambda x: x.unflatten(1, (3, 1)).squeeze(2).clone().view(x.shape[0], 12),
            lambda x: x.unsqueeze(1).squeeze().reshape(x.shape[0], 2, 6),
            lambda x: x.unsqueeze(1).unsqueeze(3).squeeze((1, 3)).view(x.shape[0], 12),
        ],
        ids=range(8),
    )
    def test_the_last_one_counts(self, function: Callable[[Tensor], Tensor]) -> None:
        before, after = rewritten(Block(Apply(function, "reshapes")), torch.randn(2, 3, 4).double())
        same_order = (*RESHAPES, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims)
        same_order += (aten.squeeze.default, aten.contiguous.default, aten.clone.default)
        assert count(before, same_order) > 1
        assert count(after, same_order) == 1

    def test_not_across_a_transposition(self) -> None:
        model = Block(Apply(lambda x: x.flatten(2).transpose(1, 2).reshape(x.shape[0], -1), "f"))
        before, after = rewritten(model, torch.randn(2, 3, 2, 2).double())
        assert Counter(operators(after)) == Counter(operators(before))

    def test_what_is_used_elsewhere_stays(self) -> None:
        class Model(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                y = F.dropout(x, 0.5, self.training).reshape(x.shape[0], 6, 2)
                return y.reshape(x.shape[0], 12) + y.sum((1, 2))[:, None]

        before, after = rewritten(Model(), torch.randn(2, 3, 4).double())
        assert count(after, RESHAPES) == count(before, RESHAPES) == 2

    def test_of_a_value_that_is_not_contiguous(self) -> None:
        """A view may become a reshape of something it could not view."""
        function = lambda x: x.transpose(1, 2).contiguous().view(x.shape[0], 12)  # noqa: E731
        before, after = rewritten(Block(Apply(function, "f")), torch.randn(2, 3, 4).double())
        assert count(before, {aten.contiguous.default}) == 1
        assert count(after, {aten.contiguous.default}) == 0
