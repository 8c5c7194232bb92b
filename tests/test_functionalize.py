"""In-place operators: the traced graph computes what the model computes and changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import momentprop as mp
from momentprop.trace import trace


def on_result(x: Tensor) -> Tensor:
    return F.relu_(x * 2).add_(1).mul_(3)


def read_through_the_argument(x: Tensor) -> Tensor:
    y = x * 2
    y.add_(1)
    y += x
    return y * y.neg_()


def read_through_an_older_view(x: Tensor) -> Tensor:
    y = x * 2
    row = y[0]
    y.mul_(3)
    return row + y.sum(0)


def written_through_a_slice(x: Tensor) -> Tensor:
    y = x * 1
    y[:, 1:3] += 5
    y[:, ::2].mul_(2)
    return y


def written_through_nested_views(x: Tensor) -> Tensor:
    y = x.clone()
    inner = y.view(-1, 2, 3).transpose(1, 2)[:, 1]
    inner.fill_(7)
    inner.add_(1)
    return y + inner.sum()


def written_through_select_unsqueeze_permute(x: Tensor) -> Tensor:
    y = x.clone().unsqueeze(0)
    y.permute(2, 0, 1)[3].zero_()
    y.squeeze(0).select(0, 1).mul_(-1)
    return y.flatten(1)


def written_through_split_and_unbind(x: Tensor) -> Tensor:
    y = x.clone()
    a, b = y.split([2, 4], dim=1)
    b.mul_(2)
    first, *_ = y.unbind(0)
    first.add_(a[1, 0])
    left, right = y.chunk(2, dim=1)
    right.sub_(left)
    return y


def copied_and_filled(x: Tensor) -> Tensor:
    y = torch.zeros(x.shape[0], 6)
    y[:, :3] = x[:, 3:]
    y[:, 3] = 1
    y.diagonal().copy_(torch.arange(2.0))
    return y * x


def copies_are_not_views(x: Tensor) -> Tensor:
    y = x * 1
    kept = y.t().reshape(-1)  # needs a copy: later writes to y do not reach it
    y.add_(1)
    return kept.sum() + y


def changes_its_input(x: Tensor) -> Tensor:
    x.mul_(2)
    return x + 1


FUNCTIONS = [
    on_result,
    read_through_the_argument,
    read_through_an_older_view,
    written_through_a_slice,
    written_through_nested_views,
    written_through_select_unsqueeze_permute,
    written_through_split_and_unbind,
    copied_and_filled,
    copies_are_not_views,
    changes_its_input,
]


class Wrapped(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor], p: float) -> None:
        super().__init__()
        self.function, self.p = function, p
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(F.dropout(x, self.p, self.training) if self.p else x)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_same_result_and_no_mutation(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(2, 6)
    traced = trace(Wrapped(function, 0.0), x)
    operators = [n.target for n in traced.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    assert operators
    assert not any(op._schema.is_mutable for op in operators)
    given = x.clone()
    constants = [traced.constants[name] for name in traced.state]
    (result,) = fx.GraphModule(nn.Module(), traced.graph)(*constants, given)
    assert torch.equal(given, x)
    torch.testing.assert_close(result, function(x.clone()))


# PyTorch itself cannot differentiate the others as written
DIFFERENTIABLE = [f for f in FUNCTIONS if f not in (on_result, written_through_split_and_unbind)]


@pytest.mark.parametrize("function", DIFFERENTIABLE, ids=lambda f: f.__name__)
def test_same_gradient(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(2, 6, requires_grad=True)
    traced = trace(Wrapped(function, 0.0), x)
    constants = [traced.constants[name] for name in traced.state]
    (result,) = fx.GraphModule(nn.Module(), traced.graph)(*constants, x)
    (gradient,) = torch.autograd.grad(result.square().sum(), x)
    (expected,) = torch.autograd.grad(function(x * 1).square().sum(), x)
    torch.testing.assert_close(gradient, expected)


LINEAR = [f for f in FUNCTIONS if f not in (on_result, read_through_the_argument, copied_and_filled)]


@pytest.mark.parametrize("function", LINEAR, ids=lambda f: f.__name__)
def test_moments_follow_in_place_writes(function: Callable[[Tensor], Tensor]) -> None:
    """The mean of an affine function is the function of the mean."""
    x = torch.randn(2, 6)
    out = mp.convert(Wrapped(function, 0.5), x, fidelity="paper")(x)
    torch.testing.assert_close(out.mean, function(x.clone()))
    assert (out.variance >= 0).all()
    assert out.variance.any()


def test_a_counter_in_a_buffer_is_not_advanced() -> None:
    class Counts(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return super().forward(x) + self.count

    model = Counts(on_result, 0.5)
    x = torch.randn(2, 6)
    bnn = mp.convert(model, x, fidelity="paper")
    first, second = bnn(x), bnn(x)
    assert model.count == 0
    assert bnn.count == 0
    assert torch.equal(first.mean, second.mean)


def test_a_write_that_cannot_be_followed_is_an_error() -> None:
    class Strided(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = F.dropout(x, 0.5, self.training)
            y.as_strided((2,), (1,)).add_(1)
            return y

    with pytest.raises(mp.TraceError, match="write it out of place"):
        mp.convert(Strided(), torch.randn(2, 6))
