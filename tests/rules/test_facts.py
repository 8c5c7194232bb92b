"""What each kind of fact says of gain * x + constant, of a reshape, and what everything else forgets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from momentprop.moments import Fact, Moments, plain
from momentprop.rules.facts import (
    Contrast,
    Directions,
    ElementMap,
    Neighbours,
    Shared,
    Unexplained,
    alone,
    carried,
    direction_of,
    knowing,
    lattice,
    neighbours_of,
    reshaped,
    variance_within,
)
from momentprop.rules.registry import RULES

aten = torch.ops.aten
SHAPE = (2, 3, 4, 5)  # batch, channels, size


def moments(*shape: int) -> Moments:
    mean, variance = torch.randn(2, *shape, dtype=torch.float64)
    return Moments(mean, variance.exp())


def must_not_be_asked() -> Tensor:
    raise AssertionError("computed")


def step(gain: Any = None, *, linear: bool = True, noisy: bool = False) -> ElementMap:
    return ElementMap(lambda: gain, linear, noisy)


GAINS = {
    "1": None,
    "a number": -2.5,
    "per channel": torch.randn(3, 1, 1, dtype=torch.float64),
    "per element": torch.randn(SHAPE, dtype=torch.float64),
}
each_gain = pytest.mark.parametrize("gain", GAINS.values(), ids=GAINS)


class TestMoments:
    def test_asked_for_one_kind(self) -> None:
        first, second = Shared(torch.ones(2)), Contrast(lambda shifts: torch.ones(1))
        x = knowing(moments(2), first, None, second)
        assert x.fact(Shared) is first
        assert x.fact(Contrast) is second
        assert x.fact(Neighbours) is None

    def test_what_is_known_takes_the_place_of_other_facts(self) -> None:
        x = knowing(moments(2), Shared(torch.ones(2)))
        assert knowing(x).facts == ()
        assert plain(x).facts == ()
        assert x.fact(Shared) is not None  # as it was

    def test_values_that_know_nothing(self) -> None:
        for value in (moments(2), torch.ones(2), 1.0):
            assert neighbours_of(value) is None
            assert direction_of(value) is None


class TestCarried:
    def test_each_fact_is_asked_what_still_holds(self) -> None:
        x = knowing(moments(*SHAPE), Shared(torch.ones(SHAPE)), Directions(torch.ones(1, *SHAPE)))
        out = carried(moments(*SHAPE), x, 2.0)
        assert torch.equal(out.fact(Shared).direction, torch.full(SHAPE, 2.0))
        assert torch.equal(out.fact(Directions).rows, torch.full((1, *SHAPE), 2.0))
        assert carried(out, x, linear=False).fact(Shared) is None

    def test_a_gain_that_broadcasts_the_input_ends_all_facts(self) -> None:
        x = knowing(moments(1, 3), Directions(torch.ones(1, 1, 3)))
        assert carried(moments(2, 3), x).facts == ()

    def test_inputs_that_know_nothing_leave_the_output_alone(self) -> None:
        out = moments(2)
        assert carried(out, moments(2), must_not_be_asked) is out
        assert carried(out, torch.ones(2), must_not_be_asked) is out
        assert reshaped(out, moments(2)) is out

    def test_kinds_forget_by_default(self) -> None:
        fact = Fact()
        assert fact.after(step(), moments(2)) is None
        assert fact.reshaped(moments(2)) is None
        noise = Unexplained(torch.ones(2))
        assert noise.after(step(), moments(2)) is None
        assert noise.reshaped(moments(2)) is None


class TestNeighbours:
    asked = ([1, 1], [1, 2], [2, 2], [1, -1])  # start, step, count, shift
    covariance = torch.randn(2, 3, 2, 2, dtype=torch.float64)

    def told(self, *asked: Any) -> Tensor:
        assert asked == self.asked
        return self.covariance

    @each_gain
    @pytest.mark.parametrize("linear", [False, True])
    def test_gains_of_both_elements_scale_it(self, gain: Any, linear: bool) -> None:
        """Cov(g1 z1, g2 z2) = g1 g2 Cov(z1, z2); noise of every element's own adds nothing to it."""
        after = Neighbours(self.told).after(step(gain, linear=linear, noisy=not linear), moments(*SHAPE))
        full = torch.as_tensor(1.0 if gain is None else gain, dtype=torch.float64).expand(SHAPE)
        here, there = full[..., 1:3, 1:4:2], full[..., 2:4, 0:3:2]
        torch.testing.assert_close(after.told(*self.asked), here * there * self.covariance)

    def test_gains_are_asked_for_where_they_are_needed_alone(self) -> None:
        """They cost something: nothing is computed before pooling asks, nor where the answer is zero."""
        zero = Neighbours(lambda *_: None).after(ElementMap(must_not_be_asked), moments(*SHAPE))
        assert zero.told([0], [1], [1], [1]) is None

    def test_a_reshape_forgets(self) -> None:
        assert Neighbours(self.told).reshaped(moments(6, 20)) is None


class TestContrast:
    fact = Contrast(lambda shifts: torch.ones(2, 3, 1, 1))

    @pytest.mark.parametrize("gain", ["1", "a number", "per channel"])
    def test_stays_where_a_channel_has_one_gain(self, gain: str) -> None:
        assert self.fact.after(step(GAINS[gain]), moments(*SHAPE)) is self.fact

    @pytest.mark.parametrize(
        "other",
        [step(GAINS["per element"]), step(linear=False), step(noisy=True)],
        ids=["per element", "to first order", "noisy"],
    )
    def test_ends_elsewhere(self, other: ElementMap) -> None:
        assert self.fact.after(other, moments(*SHAPE)) is None
        assert self.fact.reshaped(moments(6, 20)) is None


class TestShared:
    direction = torch.randn(SHAPE, dtype=torch.float64)

    @each_gain
    def test_a_linear_gain_scales_it(self, gain: Any) -> None:
        after = Shared(self.direction).after(step(gain), moments(*SHAPE))
        assert torch.equal(after.direction, self.direction * (1.0 if gain is None else gain))

    def test_noise_of_every_element_leaves_it(self) -> None:
        fact = Shared(self.direction)
        assert fact.after(step(noisy=True), moments(*SHAPE)) is fact

    def test_ends_behind_what_is_not_linear(self) -> None:
        assert Shared(self.direction).after(step(linear=False), moments(*SHAPE)) is None

    def test_a_reshape_keeps_it(self) -> None:
        """The direction has the elements in their order; gains do not fit it then."""
        fact = Shared(self.direction)
        flat = moments(2, 60)
        assert fact.reshaped(flat) is fact
        assert fact.after(step(2.0), flat) is None

    def test_forgotten_by_rules_for_which_it_does_not_hold(self) -> None:
        x = knowing(Moments(torch.randn(2, 4, 3), 1.0), Shared(torch.ones(2, 4, 3)))
        assert direction_of(RULES.find(aten.relu.default)(x)) is None
        assert direction_of(RULES.find(aten.transpose.int)(x, 1, 2)) is None
        assert direction_of(RULES.find(aten.sum.dim_IntList)(x, [1])) is None
        add = RULES.find(aten.add.Tensor)
        assert direction_of(add(x, x)) is None
        assert direction_of(add(x, torch.ones(4, 3))) is not None

    def test_variance_behind_a_sum(self) -> None:
        """What a channel shares is added up before it is squared, the rest after."""
        own = torch.rand(SHAPE, dtype=torch.float64)
        x = knowing(Moments(self.direction, own + self.direction**2), Shared(self.direction))
        torch.testing.assert_close(alone(x), own)
        variance, shared = variance_within(x, lambda v: v.sum(-1), lambda d: d.sum(-1))
        moved = self.direction.sum(-1)
        torch.testing.assert_close(variance, own.sum(-1) + moved**2)
        assert torch.equal(shared.direction, moved)
        variance, shared = variance_within(plain(x), lambda v: v.sum(-1), must_not_be_asked)
        assert torch.equal(variance, x.variance.sum(-1))
        assert shared is None


class TestDirections:
    rows = torch.randn(2, *SHAPE, dtype=torch.float64)

    @each_gain
    @pytest.mark.parametrize("linear", [False, True])
    def test_gains_scale_them(self, gain: Any, linear: bool) -> None:
        after = Directions(self.rows).after(step(gain, linear=linear, noisy=not linear), moments(*SHAPE))
        assert torch.equal(after.rows, self.rows * (1.0 if gain is None else gain))

    def test_a_reshape_forgets(self) -> None:
        assert Directions(self.rows).reshaped(moments(6, 20)) is None


def test_lattice() -> None:
    x = torch.arange(24.0).reshape(1, 2, 3, 4)
    assert torch.equal(lattice(x, [1, 0], [1, 2], [2, 2]), x[..., 1:3, 0:4:2])
    assert torch.equal(lattice(x[0, 0, 0], [1, 3], [1, 1], [2, 1]), x[0, 0, 0, 3:4])
    column = x[..., :1]
    assert torch.equal(lattice(column, [0, 3], [2, 1], [2, 1]), column[..., 0:3:2, :])
    assert lattice(torch.tensor(2.0), [0, 0], [1, 1], [1, 1]) == 2.0
