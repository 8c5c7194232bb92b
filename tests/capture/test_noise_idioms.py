"""Every way to write random numbers gives the same graph of noise, and the same distribution."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import momentprop as mp
from momentprop.capture.noise import constant
from momentprop.capture.trace import Trace, trace

aten = torch.ops.aten
KEEP = 0.75


def floor(x: Tensor) -> Tensor:
    return x.div(KEEP) * torch.floor(KEEP + torch.rand(x.shape))


def floor_in_place(x: Tensor) -> Tensor:
    mask = KEEP + torch.rand(x.shape, dtype=x.dtype, device=x.device)
    mask.floor_()
    return x / KEEP * mask


def empty_bernoulli(x: Tensor) -> Tensor:
    mask = x.new_empty(x.shape).bernoulli_(KEEP)
    mask.div_(KEEP)
    return x * mask


def bernoulli_of_full(x: Tensor) -> Tensor:
    return x * torch.bernoulli(torch.full_like(x, KEEP)) / KEEP


def bernoulli_of_ones(x: Tensor) -> Tensor:
    return x * torch.bernoulli(torch.ones(x.shape) * (1 - (1 - KEEP))) / KEEP


def bernoulli_of_tensor(x: Tensor) -> Tensor:
    return x * torch.empty_like(x).bernoulli_(torch.full((4,), KEEP)) / KEEP


def booleans(x: Tensor) -> Tensor:
    return x * torch.empty(x.shape, dtype=torch.bool).bernoulli_(KEEP) / KEEP


def less(x: Tensor) -> Tensor:
    return x * (torch.rand(x.shape) < KEEP) / KEEP


def greater_cast(x: Tensor) -> Tensor:
    return x * (torch.rand_like(x) >= 1 - KEEP).float() / KEEP


def tensor_first(x: Tensor) -> Tensor:
    return torch.full((), KEEP).ge(torch.rand_like(x)).type_as(x) * x / KEEP


def uniform_compared(x: Tensor) -> Tensor:
    return x * torch.empty_like(x).uniform_().le(KEEP).to(x.dtype).div(KEEP)


def integers(x: Tensor) -> Tensor:
    return x * (torch.rand_like(x) < KEEP).long() / KEEP


def compared_with_tensor(x: Tensor) -> Tensor:
    return x * (torch.rand(x.shape) < torch.full(x.shape, KEEP)) / KEEP


def compared_with_number(x: Tensor) -> Tensor:
    return x * (torch.rand(x.shape) >= torch.tensor(1 - KEEP)).float() / KEEP


def bernoulli_as_mask(x: Tensor) -> Tensor:
    """As keras.ops.random.dropout and SpatialDropout write it."""
    keep = torch.full((x.shape[0], 1), KEEP).expand(x.shape)
    return torch.where(torch.bernoulli(keep).bool(), x / KEEP, torch.zeros_like(x))


def bernoulli_moved_to_mask(x: Tensor) -> Tensor:
    drop = torch.bernoulli(torch.full((x.shape[1], x.shape[0]), 1 - KEEP)).t().to(torch.bool)
    return x.masked_fill(drop, 0.0) / KEEP


def divided(x: Tensor) -> Tensor:
    return x * ((torch.rand_like(x) < KEEP) / KEEP)


def where_zero(x: Tensor) -> Tensor:
    return torch.where(torch.rand_like(x) < KEEP, x / KEEP, torch.zeros_like(x))


def where_number(x: Tensor) -> Tensor:
    return torch.where(torch.rand_like(x) >= KEEP, 0.0, x / KEEP)


def where_tensor(x: Tensor) -> Tensor:
    return torch.where(torch.rand_like(x) < KEEP, x, torch.tensor(0.0)) / KEEP


def filled(x: Tensor) -> Tensor:
    return x.masked_fill(torch.rand_like(x) < 1 - KEEP, 0.0) / KEEP


def assigned(x: Tensor) -> Tensor:
    y = x.clone()
    y[torch.rand_like(x) < 1 - KEEP] = 0
    return y / KEEP


def negated(x: Tensor) -> Tensor:
    return x * ~(torch.rand_like(x) < 1 - KEEP) / KEEP


def moved(x: Tensor) -> Tensor:
    mask = torch.rand(x.shape[1], x.shape[0]) < KEEP
    return x * mask.transpose(0, 1)[:, None].expand(-1, 1, -1).squeeze(1) / KEEP


IDIOMS = [
    floor,
    floor_in_place,
    empty_bernoulli,
    bernoulli_of_full,
    bernoulli_of_ones,
    bernoulli_of_tensor,
    booleans,
    less,
    greater_cast,
    tensor_first,
    uniform_compared,
    integers,
    compared_with_tensor,
    compared_with_number,
    bernoulli_as_mask,
    bernoulli_moved_to_mask,
    divided,
    where_zero,
    where_number,
    where_tensor,
    filled,
    assigned,
    negated,
    moved,
]


class Noisy(nn.Module):
    """The function in training mode, nothing in eval mode."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) if self.training else x


def noise_of(made: Trace) -> list[object]:
    return [
        n.target
        for n in made.graph.nodes
        if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())
    ]


@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda f: f.__name__)
class TestDropoutInOtherWords:
    def test_is_one_bernoulli_variable(self, idiom: Callable[[Tensor], Tensor]) -> None:
        made = trace(Noisy(idiom), torch.randn(3, 4))
        assert noise_of(made) == [aten.bernoulli.p]
        assert not any(getattr(n.meta.get("val"), "dtype", None) == torch.bool for n in made.graph.nodes)
        (drawn,) = [n for n in made.graph.nodes if n.target is aten.bernoulli.p]
        assert constant(drawn.args[0]) is not None  # its shape does not depend on anything random

    def test_has_the_moments_of_dropout(self, idiom: Callable[[Tensor], Tensor]) -> None:
        x = torch.randn(3, 4)
        for fidelity in ("paper", "accurate"):
            out = mp.convert(Noisy(idiom), x, fidelity=fidelity)(x)
            torch.testing.assert_close(out.mean, x)
            torch.testing.assert_close(out.variance, x**2 * (1 - KEEP) / KEEP)

    def test_is_sampled_as_the_model_says(self, idiom: Callable[[Tensor], Tensor]) -> None:
        x = torch.randn(3, 4)
        mc = mp.monte_carlo(Noisy(idiom), x, n_samples=1000)
        samples = torch.stack([idiom(x) for _ in range(1000)])
        errors = (mc.variance_error**2 * 2).sqrt()
        assert ((mc.mean - x).abs() <= 5 * mc.mean_error).all()
        assert ((mc.variance - samples.var(0)).abs() <= 5 * errors).all()


@pytest.mark.parametrize("given", [(), (0.5,)], ids=["left out", "given"])
def test_the_default_probability(given: tuple[float, ...]) -> None:
    """The tracer leaves it out in either case."""
    x = torch.randn(3, 4)
    model = Noisy(lambda x: x * x.new_empty(x.shape).bernoulli_(*given) * 2)
    torch.testing.assert_close(mp.convert(model, x)(x).variance, x**2)


class TestOtherMixtures:
    """Where a mask chooses between two values, both count."""

    @pytest.mark.parametrize(
        "function",
        [
            lambda x: torch.where(torch.rand(x.shape[0], 1) < KEEP, x, -2 * x),
            lambda x: x.masked_fill(torch.rand(x.shape[0], 1) < KEEP, 3.0),
            lambda x: torch.where(torch.rand_like(x) < KEEP, 2.0, 1.0) * x,
            lambda x: x * torch.where(torch.rand_like(x) < KEEP, 0.0, 0.0),
        ],
        ids=["where", "fill", "numbers", "zeros"],
    )
    def test_against_sampling(self, function: Callable[[Tensor], Tensor]) -> None:
        x = torch.randn(2, 3, dtype=torch.float64)
        with pytest.warns(mp.TraceNote, match="other values than in eval mode"):
            made = trace(Noisy(function), x)
        samples = torch.stack([function(x) for _ in range(20_000)])
        graph = torch.fx.GraphModule(nn.Module(), made.graph)
        traced = torch.stack([graph(x)[0] for _ in range(20_000)])
        scale = samples.std(0) / 20_000**0.5
        assert ((traced.mean(0) - samples.mean(0)).abs() <= 5 * scale * 2**0.5 + 1e-12).all()
        torch.testing.assert_close(traced.var(0), samples.var(0), rtol=0.1, atol=1e-12)

    def test_one_variable_used_twice_stays_one(self) -> None:
        def either(x: Tensor) -> Tensor:
            mask = torch.rand_like(x) < KEEP
            return x * mask + x * ~mask  # x, whatever the mask

        x = torch.randn(2, 3)
        made = trace(Noisy(either), x)
        assert noise_of(made) == [aten.bernoulli.p]
        (result,) = torch.fx.GraphModule(nn.Module(), made.graph)(x)
        assert torch.equal(result, x)

    def test_a_fill_with_infinity_stays_a_mask(self) -> None:
        """Infinity times 0 is not 0."""
        x = torch.randn(2, 3)
        model = Noisy(lambda x: x.masked_fill(torch.rand_like(x) < 0.5, -torch.inf).softmax(1))
        with pytest.warns(mp.TraceNote), pytest.raises(mp.MissingRuleError, match="masked_fill"):
            mp.convert(model, x)


class TestWhatIsLeftAlone:
    def test_a_number_used_twice(self) -> None:
        def twice(x: Tensor) -> Tensor:
            u = torch.rand_like(x)
            return x + (u < 0.5) * u - 0.125

        with pytest.warns(mp.TraceNote, match="other values than in eval mode"):
            made = trace(Noisy(twice), torch.randn(2, 3), dropout=Noisy)
        assert noise_of(made) == [aten.rand_like.default]

    @pytest.mark.parametrize(
        ("function", "operator"),
        [
            (lambda x: x * (1 + 0.3 * torch.randn_like(x)), aten.randn_like.default),
            (lambda x: x + torch.randn(x.shape), aten.randn.default),
            (lambda x: x + torch.empty_like(x).normal_(0, 0.1), aten.normal_functional.default),
            (lambda x: x + torch.empty_like(x).uniform_(-1, 1), aten.uniform.default),
            (lambda x: x + torch.rand_like(x) - 0.5, aten.rand_like.default),
        ],
        ids=range(5),
    )
    def test_normal_and_uniform_numbers(self, function: Callable[[Tensor], Tensor], operator: object) -> None:
        assert noise_of(trace(Noisy(function), torch.randn(2, 3), dropout=Noisy)) == [operator]

    @pytest.mark.parametrize("probability", [0.0, 1.0])
    def test_certain_masks_are_no_noise(self, probability: float) -> None:
        model = Noisy(
            lambda x: x * (torch.rand_like(x) < probability) / max(probability, 1.0) + x * (1 - probability)
        )
        assert noise_of(trace(model, torch.randn(2, 3))) == []

    def test_numbers_nobody_uses(self) -> None:
        def unused(x: Tensor) -> Tensor:
            torch.rand(3)
            return x

        assert noise_of(trace(Noisy(unused), torch.randn(2, 3))) == []
