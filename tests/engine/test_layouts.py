"""Which elements belong to which sample: found for every way models lay out their batch, or not claimed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import momentprop as mp
from exact import Model, accurate, assert_exact, values
from momentprop.capture.trace import Trace, trace
from momentprop.engine.layouts import Layout, layouts
from networks import Apply

B = 4  # the batch of the examples; none of the other sizes is 4


def found(model: nn.Module, *inputs: Any) -> tuple[Trace, dict[str, Layout]]:
    made = trace(model, inputs)
    state = [
        made.constants[name] if name in made.constants else functools.reduce(getattr, name.split("."), model)
        for name in made.state
    ]
    return made, layouts(made, state)


def layout_of(model: nn.Module | Callable[..., Any], *inputs: Any) -> Layout | None:
    """The layout of the (first) output."""
    if not isinstance(model, nn.Module):
        model = Apply(model, "f") if len(inputs) == 1 else Several(model)
    made, known = found(model, *inputs)
    return known.get(list(made.graph.nodes)[-1].args[0][0].name)


class Several(nn.Module):
    """A function of several inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


def drop(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5, True)


def sequence() -> Tensor:
    return torch.randn(B, 5, 2)


class TestLayouts:
    @pytest.mark.parametrize(
        ("function", "expected"),
        [
            (lambda x: drop(x), Layout(1, 10)),
            (lambda x: drop(x).relu() + 1, Layout(1, 10)),
            (lambda x: drop(x).sum((1, 2)), Layout(1, 1)),
            (lambda x: drop(x).mean(1), Layout(1, 2)),
            (lambda x: drop(x).transpose(1, 2).flatten(1), Layout(1, 10)),
            (lambda x: drop(x)[:, -1], Layout(1, 2)),
            (lambda x: drop(x).softmax(1), Layout(1, 10)),
            (lambda x: drop(x).cumsum(1), Layout(1, 10)),
            (lambda x: F.max_pool1d(drop(x), 2), Layout(1, 5)),
            # merged with the batch
            (lambda x: drop(x).reshape(-1, 2), Layout(1, 10, False)),
            (lambda x: drop(x).flatten(), Layout(1, 10, False)),
            (lambda x: drop(x).reshape(-1, 2).reshape(-1, 5, 2), Layout(1, 10)),
            # the batch in the middle, or last
            (lambda x: drop(x).transpose(0, 1), Layout(5, 2, False)),
            (lambda x: drop(x).permute(1, 2, 0), Layout(10, 1, False)),
            (lambda x: drop(x)[None], Layout(1, 10, False)),
            # [T, B, C] merged, time-major
            (lambda x: drop(x).transpose(0, 1).reshape(-1, 2), Layout(5, 2, False)),
            (lambda x: drop(x).transpose(0, 1).flatten(), Layout(5, 2, False)),
            (lambda x: drop(x).permute(1, 2, 0).reshape(5, -1), Layout(10, 1, False)),
            (lambda x: drop(x).transpose(0, 1).reshape(-1, 2).reshape(5, -1, 2), Layout(5, 2, False)),
            # every sample twice, one batch after the other
            (lambda x: torch.cat([drop(x), -drop(x)]), Layout(2, 10, False)),
        ],
        ids=range(20),
    )
    def test_where_the_batch_goes(self, function: Callable[[Tensor], Tensor], expected: Layout) -> None:
        assert layout_of(function, sequence()) == expected

    @pytest.mark.parametrize("time", range(1, 11))
    def test_sizes_that_the_probes_batch_could_be_mistaken_for(self, time: int) -> None:
        x = torch.randn(B, time, 3)
        assert layout_of(lambda x: drop(x).transpose(0, 1), x) == Layout(time, 3, False)
        assert layout_of(lambda x: drop(x).permute(2, 1, 0), x) == Layout(3 * time, 1, False)
        merged = layout_of(lambda x: drop(x).permute(2, 1, 0).flatten(), x)
        assert merged == Layout(3 * time, 1, False)

    def test_every_value_that_depends_on_the_inputs(self) -> None:
        model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 2))
        made, known = found(model, torch.randn(B, 3))
        names = {n.name for n in made.graph.nodes if n.op == "call_function" or n in made.input_nodes}
        assert set(known) == names
        assert {known[n.name].size for n in made.input_nodes} == {3}

    def test_convolutions(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout2d(0.5), nn.Flatten())
        assert layout_of(model.eval(), torch.randn(B, 3, 5, 5)) == Layout(1, 36)

    def test_merged_and_split_by_a_model(self) -> None:
        """Frames through a network for images, then back to one row per sample."""

        class Frames(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv = nn.Conv1d(2, 3, 3)

            def forward(self, x: Tensor) -> Tensor:
                frames = drop(self.conv(x.reshape(-1, *x.shape[2:])))
                return frames.reshape(x.shape[0], x.shape[1], -1).sum(1)

        made, known = found(Frames(), torch.randn(B, 5, 2, 7))
        inside = next(n.name for n in made.graph.nodes if "conv" in n.name and n.op == "call_function")
        assert known[inside] == Layout(1, 5 * 3 * 5, False)
        assert known[list(made.graph.nodes)[-1].args[0][0].name] == Layout(1, 15)

    @pytest.mark.parametrize("pad", [(0, 0, 1, 1), (1, 1, 0, 0), (2, 0, 1, 3)])
    def test_padding_is_part_of_a_sample(self, pad: tuple[int, ...]) -> None:
        x = sequence()
        size = F.pad(x, pad)[0].numel()
        assert layout_of(lambda x: F.pad(drop(x), pad), x) == Layout(1, size)
        moved = layout_of(lambda x: F.pad(drop(x).transpose(0, 1), (1, 1)), x)
        assert moved == Layout(5, 4, False)

    @pytest.mark.parametrize("length", range(2, 7))
    def test_padding_in_front_of_the_batch(self, length: int) -> None:
        """Zeros before and after a sequence of one: [length, batch, 2], the batch second."""
        x = torch.randn(B, 1, 2)
        for place in range(length):
            pad = (0, 0, 0, 0, place, length - 1 - place)
            layout = layout_of(lambda x, pad=pad: F.pad(x.transpose(0, 1), pad), x)
            assert layout == Layout(length, 2, False), f"at {place}"

    def test_constants_belong_to_no_sample(self) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(2))

            def forward(self, x: Tensor) -> Tensor:
                return drop(x) * self.weight.exp() + torch.ones(2).cumsum(0)

        made, known = found(Model(), sequence())
        constants = {n.name for n in made.graph.nodes if "exp" in n.name or "cumsum" in n.name}
        assert constants
        assert not constants & set(known)

    def test_values_that_are_lists(self) -> None:
        made, known = found(Apply(lambda x: sum(drop(x).split(2, 1)), "split"), torch.randn(B, 6, 2))
        (split,) = [n.name for n in made.graph.nodes if "split" in n.name]
        assert known[split] == Layout(1, 4)  # that of one part

    def test_a_list_whose_first_part_is_padding(self) -> None:
        """No sample reaches that part, but the others."""
        model = Apply(lambda x: sum(F.pad(drop(x), (1, 0)).split(1, 1)), "split")
        made, known = found(model, torch.randn(B, 3))
        (split,) = [n.name for n in made.graph.nodes if "split" in n.name]
        assert known[split] == Layout(1, 1)

    def test_several_inputs(self) -> None:
        """Also one without a batch, and one that is a number."""
        x, y = torch.randn(B, 3), torch.randn(B, 1)
        assert layout_of(lambda x, y: drop(x) * y, x, y) == Layout(1, 3)
        assert layout_of(lambda x, y: drop(x) * y, x, torch.randn(3)) == Layout(1, 3)
        assert layout_of(lambda x, y: drop(x) * y, x, torch.tensor(2.0)) == Layout(1, 3)
        assert layout_of(lambda x, k: drop(x) * k, x, 2) == Layout(1, 3)
        made, known = found(Several(lambda x, y: drop(x) * y), x, torch.randn(3))
        assert [n.name in known for n in made.input_nodes] == [True, False]


class TestWhatTheProbeMustBear:
    """Ordinary models, for which ones or NaN as inputs are out of the ordinary."""

    def test_a_sample_that_is_standardised(self) -> None:
        """Constant samples have no standard deviation."""

        def standardised(x: Tensor) -> Tensor:
            return drop((x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True))

        assert layout_of(standardised, torch.randn(B, 5)) == Layout(1, 5)

    def test_numbers_that_are_indices(self) -> None:
        """A column of a table holds categories; NaN is none of them."""

        class Table(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embedding = nn.Embedding(9, 2)

            def forward(self, x: Tensor) -> Tensor:
                return drop(torch.cat([self.embedding(x[:, 0].long()), x[:, 1:]], 1))

        assert layout_of(Table(), torch.ones(B, 5)) == Layout(1, 6)

    @pytest.mark.parametrize(
        "function",
        [
            lambda y: torch.relu(y - 1000),
            lambda y: y * 0,
            lambda y: y - y,
            lambda y: F.pad(y, (1, 0))[:, :1].expand(-1, 5),
        ],
        ids=["off", "times zero", "difference", "padding"],
    )
    def test_values_that_no_input_of_the_probe_changes(self, function: Callable[[Tensor], Tensor]) -> None:
        """Other inputs, other masks or other weights might; samples do not mix in any case."""
        assert layout_of(lambda x: function(drop(x)), torch.randn(B, 5)) == Layout(1, 5)

    def test_missing_values_that_are_filled(self) -> None:
        """NaN is an input like others here, and goes no further."""
        assert layout_of(lambda x: drop(x.nan_to_num(0.0)), torch.randn(B, 5)) == Layout(1, 5)


class TestOtherNoise:
    """Drawn alike in all runs, so that it does not look like a change of the sample."""

    @pytest.mark.parametrize(
        "noise",
        [
            lambda x: x * torch.randn_like(x),
            lambda x: x + torch.rand(x.shape),
            lambda x: x * torch.empty_like(x).exponential_(),
            lambda x: x * x.new_empty(x.shape[0], 1, 1).bernoulli_(0.25),
            lambda x: x * torch.floor(0.25 + torch.rand(x.shape[0], 1, 1)),
            lambda x: F.alpha_dropout(x, 0.5, True),
            lambda x: torch.where(torch.rand_like(x) < 0.5, x, -x),
        ],
        ids=["normal", "uniform", "exponential", "bernoulli", "floor", "alpha", "where"],
    )
    def test_where_the_batch_goes(self, noise: Callable[[Tensor], Tensor]) -> None:
        assert layout_of(lambda x: noise(x), sequence()) == Layout(1, 10)
        assert layout_of(lambda x: noise(x).transpose(0, 1), sequence()) == Layout(5, 2, False)
        merged = layout_of(lambda x: noise(x).transpose(0, 1).reshape(-1, 2), sequence())
        assert merged == Layout(5, 2, False)

    def test_drawn_for_all_samples_at_once(self) -> None:
        """One number shared by the batch belongs to no sample, what it multiplies does."""
        assert layout_of(lambda x: x * torch.rand(1), sequence()) == Layout(1, 10)


class Tokens(nn.Module):
    """An embedding of integers, moved before or after the look-up."""

    def __init__(self, before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 2)
        self.before, self.after = before, after

    def forward(self, tokens: Tensor) -> Tensor:
        return self.after(drop(self.embedding(self.before(tokens))))


class TestIntegerInputs:
    tokens = torch.zeros(B, 5, dtype=torch.long)

    @pytest.mark.parametrize(
        ("after", "expected"),
        [
            (lambda e: e, Layout(1, 10)),
            (lambda e: e.transpose(0, 1), Layout(5, 2, False)),
            (lambda e: e.transpose(0, 1).reshape(-1, 2), Layout(5, 2, False)),
            (lambda e: e.mean(1), Layout(1, 2)),
        ],
        ids=["as it is", "transposed", "merged", "averaged"],
    )
    def test_embedding(self, after: Callable[[Tensor], Tensor], expected: Layout) -> None:
        assert layout_of(Tokens(lambda t: t, after), self.tokens) == expected

    @pytest.mark.parametrize(
        ("before", "expected"),
        [
            (lambda t: t + 1, Layout(1, 10)),
            (lambda t: t[:, 1:], Layout(1, 8)),
            (lambda t: t.t(), Layout(5, 2, False)),
            (lambda t: t.flatten(), Layout(1, 10, False)),
        ],
        ids=["shifted", "cut", "transposed", "merged"],
    )
    def test_integers_move_before_the_embedding(
        self, before: Callable[[Tensor], Tensor], expected: Layout
    ) -> None:
        assert layout_of(Tokens(before, lambda e: e), self.tokens) == expected

    def test_added_to_positions(self) -> None:
        """What does not depend on the tokens does not hide what does."""

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.token, self.position = nn.Embedding(9, 2), nn.Embedding(5, 2)

            def forward(self, tokens: Tensor) -> Tensor:
                return drop(self.token(tokens) + self.position(torch.arange(5)))

        assert layout_of(Model(), self.tokens) == Layout(1, 10)

    def test_a_mask_beside_numbers(self) -> None:
        mask = torch.ones(B, 5, dtype=torch.bool)
        x = sequence()
        assert layout_of(lambda x, m: drop(x).masked_fill(m[..., None], 0.0), x, mask) == Layout(1, 10)
        assert layout_of(lambda x, m: drop(x) * m[..., None], x, mask) == Layout(1, 10)

    def test_a_mask_that_counts(self) -> None:
        """The mean over what is valid: it must not take an empty mask for the probe."""
        mask = torch.ones(B, 5, dtype=torch.bool)

        def mean(x: Tensor, mask: Tensor) -> Tensor:
            return (drop(x) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)

        assert layout_of(mean, sequence(), mask) == Layout(1, 2)

    def test_a_comparison_of_numbers(self) -> None:
        """NaN does not pass a comparison."""
        assert layout_of(lambda x: drop((x > 0).float()), sequence()) == Layout(1, 10)


class TestMixing:
    """Where noise reaches several samples, nothing is claimed of some value on its way."""

    @pytest.mark.parametrize(
        "function",
        [
            lambda y: y - y.mean(0),
            lambda y: y.softmax(0),
            lambda y: y.cumsum(0),
            lambda y: y.sum(),
            lambda y: y.roll(1, 0),
            lambda y: F.layer_norm(y.transpose(0, 2), [y.shape[0]]),
            lambda y: y + y[:1],
            lambda y: y.flip(0),
            lambda y: y + y.flip(0),
        ],
        ids=["mean", "softmax", "cumsum", "sum", "roll", "norm", "first", "flip", "flip and add"],
    )
    def test_something_has_no_layout(self, function: Callable[[Tensor], Tensor]) -> None:
        made, known = found(Apply(lambda x: function(drop(x)), "mixes"), sequence())
        random: set[Any] = set()
        for node in made.graph.nodes:
            if "dropout" in node.name or random.intersection(node.all_input_nodes):
                random.add(node)
        names = {node.name for node in random if node.op == "call_function"}
        assert not names <= set(known)

    def test_dropout_on_a_parameter_is_shared_by_all_samples(self) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.bias = nn.Parameter(torch.randn(2))

            def forward(self, x: Tensor) -> Tensor:
                return x + drop(self.bias)

        made, known = found(Model(), sequence())
        (dropout,) = [n.name for n in made.graph.nodes if "dropout" in n.name]
        assert dropout not in known

    def test_a_fixed_batch(self) -> None:
        """The probe cannot have another batch than the model's: nothing is known about any value."""
        _, known = found(Apply(lambda x: drop(x).view(4, 10), "fixed"), sequence())
        assert known == {}

    def test_a_model_that_cannot_run_on_the_probe(self) -> None:
        """Random matrices are not positive definite: nothing is known, nothing raised."""
        model = Apply(lambda x: drop(torch.linalg.cholesky(x)), "cholesky")
        _, known = found(model, torch.eye(2).expand(3, 2, 2).clone())
        assert known == {}

    def test_pairs_of_rows_are_one_sample(self) -> None:
        _, known = found(Apply(lambda x: drop(x).reshape(-1, 2, 10).sum(1), "pairs"), sequence())
        assert {layout.size for layout in known.values()} == {20, 10}


@st.composite
def laid_out(draw: Callable[..., Any]) -> tuple[Layout, Tensor, Tensor]:
    """A layout, a value in it, and the same value as [batch, elements]."""
    before, after = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    batch = draw(st.sampled_from([0, 1, 5]))
    value = torch.arange(float(before * batch * after)).reshape(before, batch, after)
    flat = value.transpose(0, 1).reshape(batch, before * after)
    if before == 1 and draw(st.booleans()):
        shape = draw(st.sampled_from([(batch, after), (batch, 1, after)]))
        return Layout(1, after), value.reshape(shape), flat
    shape = draw(
        st.sampled_from([(before, batch, after), (before * batch, after), (before * batch * after,)])
    )
    return Layout(before, after, whole=False), value.reshape(shape), flat


class TestLayout:
    @given(laid_out())
    def test_samples_and_back(self, drawn: tuple[Layout, Tensor, Tensor]) -> None:
        layout, value, flat = drawn
        assert layout.size == flat.shape[1]
        assert layout.batch_of(value) == flat.shape[0]
        assert torch.equal(layout.samples(value), flat)
        assert torch.equal(layout.restored(flat, value), value)

    @given(laid_out(), st.integers(1, 3))
    def test_split_and_back_for_several_rows(self, drawn: tuple[Layout, Tensor, Tensor], k: int) -> None:
        layout, value, flat = drawn
        rows = torch.stack([value + 100 * i for i in range(k)])
        split = layout.split(rows, flat.shape[0])
        assert split.shape[:2] == (flat.shape[0], k)
        for i in range(k if len(flat) else 0):
            assert torch.equal(split[:, i], flat + 100 * i)
        each = torch.stack([flat + 100 * i for i in range(k)])
        assert torch.equal(layout.restored(each, value), rows)

    def test_split_of_one_number_per_sample(self) -> None:
        rows = torch.arange(6.0).reshape(2, 3)
        assert torch.equal(Layout(1, 1).split(rows, 3), rows.T[..., None])

    def test_split_of_fewer_elements_than_the_value_has(self) -> None:
        """Noise of channel dropout: one number per channel, whatever follows the channels."""
        rows = torch.arange(12.0).reshape(2, 3, 2)
        assert torch.equal(Layout(1, 50).split(rows, 3), rows.transpose(0, 1))
        merged = torch.arange(12.0).reshape(2, 6, 1)  # [K, T B, channel], time first
        expected = merged.reshape(2, 2, 3).permute(2, 0, 1)
        assert torch.equal(Layout(2, 25, whole=False).split(merged, 3), expected)


class Shifted(torch.nn.Module):
    """Takes no integer below 5."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = torch.nn.Embedding(4, 6), torch.nn.Linear(6, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(torch.dropout(self.table(tokens - 5), 0.2, self.training).mean(1))


@pytest.mark.parametrize("batch", [1, 3])
def test_integers_that_the_model_was_traced_with(batch: int) -> None:
    tokens = torch.tensor([[5, 6, 8], [7, 7, 5], [6, 8, 6]])[:batch]
    assert mp.convert(Shifted(), tokens).fidelity == "accurate"


MOVED = {
    "[T, B, C]": lambda m, x: m.drop(x).transpose(0, 1),
    "[T, B, C], dropout inside": lambda m, x: m.b(m.drop(x.transpose(0, 1))),
    "[C, T, B]": lambda m, x: m.drop(x.permute(2, 1, 0)) * 2,
    "[B T, C] inside": lambda m, x: m.b(m.drop(x.reshape(-1, 2))).reshape(x.shape[0], -1),
    "[B T, C]": lambda m, x: m.b(m.drop(x.reshape(-1, 2))),
    "[T B, C] inside": lambda m, x: m.b(m.drop(x.transpose(0, 1).reshape(-1, 2))).reshape(2, -1, 2).sum(0),
    "[T, B, C, 1]": lambda m, x: m.drop(x.transpose(0, 1)[..., None]).sum(0),
    "[T, B, C, 1, 1]": lambda m, x: m.drop(x.transpose(0, 1)[..., None, None]).sum(0),
    "[C, T, B, 1]": lambda m, x: m.drop(x.permute(2, 1, 0)[..., None]).sum((0, 3)),
    "[1, B, T, C]": lambda m, x: m.drop(x[None]).sum(0),
    "every sample twice": lambda m, x: (lambda y: y[: x.shape[0]] - 2 * y[x.shape[0] :])(
        m.drop(torch.cat([x, -x])[:, 0])
    ),
}


@pytest.mark.parametrize("name", MOVED)
def test_batches_anywhere_are_exact(name: str) -> None:
    """Three samples of [2, 2]; the one that covariance is computed for is found wherever it is."""
    model = Model(MOVED[name], b=nn.Linear(2, 2))
    x = values(3, 2, 2)
    assert_exact(model, x)
    assert accurate(model, x[:1])[0].covariance.shape[0] == 1


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


def test_examples_are_where_the_weights_are() -> None:
    """Not on the default device, which says nothing about this model."""
    model = Tokens(lambda t: t, lambda y: drop(y).transpose(0, 1).flatten(0, 1))
    made = trace(model, torch.zeros(2, 3, dtype=torch.long))  # as examples of their own they tell nothing
    state = [functools.reduce(getattr, name.split("."), model) for name in made.state]
    expected = layouts(made, state)
    assert expected[list(made.graph.nodes)[-1].args[0][0].name].before == 3
    with default_device("meta"):
        assert layouts(made, state) == expected
