"""In-place operators: the traced graph computes what the model computes and changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import momentprop as mp
from momentprop.capture.trace import trace


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


def window_mask(x: Tensor) -> Tensor:
    """The attention mask of shifted windows: regions numbered by slices, then compared."""
    regions, count = x.new_zeros(4, 4), 0
    for rows in (slice(0, -2), slice(-2, -1), slice(-1, None)):
        for columns in (slice(0, -2), slice(-2, -1), slice(-1, None)):
            regions[rows, columns] = count
            count += 1
    flat = regions.view(2, 2, 2, 2).permute(0, 2, 1, 3).reshape(4, 4)
    mask = flat.unsqueeze(1) - flat.unsqueeze(2)
    mask = mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)
    return x + mask.sum(0).flatten()[:6]


def token_shift(x: Tensor) -> Tensor:
    """Decoder inputs: labels moved by one, and what is not to be predicted replaced by padding."""
    labels = (x * 3).long()
    shifted = labels.new_zeros(labels.shape)
    shifted[:, 1:] = labels[:, :-1].clone()
    shifted[:, 0] = 2
    shifted.masked_fill_(shifted == -1, 1)
    return x + shifted


def positions(x: Tensor) -> Tensor:
    table = torch.zeros(2, 6)
    table[:, 0::2] = torch.sin(x[:, :3])
    table[:, 1::2] = torch.cos(x[:, :3])
    return table * x


def written_by_index(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, torch.tensor([0, 2])] = 5.0
    y[torch.arange(2), torch.tensor([1, 3])] += x[:2, 0]
    y.index_fill_(1, torch.tensor([1]), 3.0)
    y.index_add_(1, torch.tensor([0, 2]), x[:, :2])
    y.index_copy_(1, torch.tensor([5]), x[:, :1])
    return y


def written_by_mask(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, torch.tensor([True, False, True, False, False, True])] = 1.0
    y[:1].masked_fill_(torch.tensor([True, False] * 3), 9.0)
    return y


def written_by_scatter(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y.scatter_(1, torch.tensor([[0], [2]]), 1.0)
    y.scatter_add_(1, torch.tensor([[1], [3]]), x[:, :1])
    return y + x


def zeroed(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1].zero_()
    y.view(-1)[3:5].mul_(4)
    y.T[0].sub_(y[0, 1])
    y.mT[2].add_(1)
    return y


def copied_with_broadcasting(x: Tensor) -> Tensor:
    y = torch.zeros(3, 6)
    y.copy_(torch.arange(6))  # another type, and fewer dimensions
    flat = y.view(-1)
    flat[3] = 7
    y[0] = y[1] + flat[:6]
    z = torch.zeros(x.shape[0], 3, 6)
    z.copy_(x[:, None])
    return z.sum(1) + y.sum(0) + flat.sum()


def shaped_in_place(x: Tensor) -> Tensor:
    y = x.clone()
    left = y[:, :2]
    y.unsqueeze_(1)
    y.add_(1)
    left.mul_(2)  # still the shape it had
    y.transpose_(1, 2)
    y.squeeze_(2).t_()
    y.swapaxes_(0, 1)
    return y * 2 + left.sum()


def written_through_any_view(x: Tensor) -> Tensor:
    y = x.clone()
    for i, piece in enumerate(y.tensor_split(3, 1)):
        piece.add_(i)
    y.view(-1, 2, 3).movedim(1, 2)[:, 0] += 1
    return y


def given_as_out(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    view = y[0]
    torch.mul(x, 2, out=y)
    return y + view


def types_stay(x: Tensor) -> Tensor:
    y = x.half()
    y.mul_(torch.full((6,), 2.0))  # float32, but y stays half
    return y.float() + x


def other_names(x: Tensor) -> Tensor:
    return (x * 1).clamp_(min=0.1).sqrt_().pow_(2).div_(2).neg_().abs_().exp_()


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
    window_mask,
    token_shift,
    positions,
    written_by_index,
    written_by_mask,
    written_by_scatter,
    zeroed,
    copied_with_broadcasting,
    shaped_in_place,
    written_through_any_view,
    given_as_out,
    types_stay,
    other_names,
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


# PyTorch itself cannot differentiate the others as written; one has integers
NOT_DIFFERENTIABLE = (
    on_result,
    other_names,
    written_through_split_and_unbind,
    written_through_any_view,
    given_as_out,
)
DIFFERENTIABLE = [f for f in FUNCTIONS if f not in (*NOT_DIFFERENTIABLE, token_shift)]


@pytest.mark.parametrize("function", DIFFERENTIABLE, ids=lambda f: f.__name__)
def test_same_gradient(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(2, 6, requires_grad=True)
    traced = trace(Wrapped(function, 0.0), x)
    constants = [traced.constants[name] for name in traced.state]
    (result,) = fx.GraphModule(nn.Module(), traced.graph)(*constants, x)
    (gradient,) = torch.autograd.grad(result.square().sum(), x)
    (expected,) = torch.autograd.grad(function(x * 1).square().sum(), x)
    torch.testing.assert_close(gradient, expected)


# affine, by operators with rules
LINEAR = [
    read_through_an_older_view,
    written_through_a_slice,
    written_through_nested_views,
    written_through_select_unsqueeze_permute,
    written_through_split_and_unbind,
    copies_are_not_views,
    changes_its_input,
    window_mask,
    zeroed,
    copied_with_broadcasting,
    shaped_in_place,
    given_as_out,
]


@pytest.mark.parametrize("function", LINEAR, ids=lambda f: f.__name__)
def test_moments_follow_in_place_writes(function: Callable[[Tensor], Tensor]) -> None:
    """The mean of an affine function is the function of the mean."""
    x = torch.randn(2, 6)
    out = mp.convert(Wrapped(function, 0.5), x, fidelity="paper")(x)
    torch.testing.assert_close(out.mean, function(x.clone()))
    assert (out.variance >= 0).all()
    assert out.variance.any()


@pytest.mark.parametrize(
    ("draw", "operator"),
    [
        (lambda y: y.bernoulli_(0.25), torch.ops.aten.bernoulli.p),
        (lambda y: y.uniform_(-1, 2), torch.ops.aten.uniform.default),
        (lambda y: y.normal_(1, 2), torch.ops.aten.normal_functional.default),
        (lambda y: y.random_(5), torch.ops.aten.random.to),
        (lambda y: y.exponential_(2), torch.ops.aten.exponential.default),
    ],
    ids=["bernoulli", "uniform", "normal", "random", "exponential"],
)
def test_numbers_drawn_in_place(draw: Callable[[Tensor], Tensor], operator: object) -> None:
    """The tensor filled with them holds them, and so does every view of it; the same numbers as eagerly."""

    def function(x: Tensor) -> Tensor:
        mask = x.new_empty(2, 1)
        first = mask[0]
        draw(mask)
        return x * mask + first

    x = torch.randn(2, 6)
    traced = trace(Wrapped(function, 0.0), x)
    (drawn,) = [
        n for n in traced.graph.nodes if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())
    ]
    assert drawn.target is operator
    torch.manual_seed(0)
    (result,) = fx.GraphModule(nn.Module(), traced.graph)(x)
    torch.manual_seed(0)
    assert torch.equal(result, function(x))


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


def test_slices_are_written_with_bounds_that_vmap_understands() -> None:
    def cut(x: Tensor) -> Tensor:
        y = x * 1
        y[:, :-4] = 1
        y[:, -2:] += 2
        return y

    x = torch.randn(2, 6)
    traced = trace(Wrapped(cut, 0.5), x)
    for node in traced.graph.nodes:
        if node.target is torch.ops.aten.slice_scatter.default:
            assert all(bound is None or bound >= 0 for bound in node.args[3:5])
    assert mp.monte_carlo(Wrapped(cut, 0.5), x, n_samples=20).mean.shape == (2, 6)
