"""Outputs that get a covariance: parsed, chosen sample by sample, and the same numbers as the full one's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import momentprop as mp
from momentprop.engine.layouts import Layout
from momentprop.engine.selection import Selection
from momentprop.moments import Moments
from networks import Apply


class TestParse:
    def test_all(self) -> None:
        assert Selection.parse(None) == Selection()
        assert Selection.parse(None).count(7) == 7

    @pytest.mark.parametrize(("largest", "count"), [(1, 1), (3, 3), (7, 7), (8, 7)])
    def test_number(self, largest: int, count: int) -> None:
        assert Selection.parse(largest) == Selection(largest=largest)
        assert Selection.parse(largest).count(7) == count

    @pytest.mark.parametrize("indices", [[0], [6, 2], (3, 4, 5), range(2, 6), torch.tensor([1, 0])])
    def test_indices(self, indices: Any) -> None:
        parsed = Selection.parse(indices)
        assert parsed.indices == tuple(int(i) for i in indices)  # in the order given
        assert parsed.count(7) == len(indices)

    @pytest.mark.parametrize("largest", [0, -1])
    def test_number_below_one(self, largest: int) -> None:
        with pytest.raises(ValueError, match=f"outputs must be at least 1, not {largest}"):
            Selection.parse(largest)

    @pytest.mark.parametrize("indices", [[], [1, 1], [-1], [0, -2]], ids=str)
    def test_indices_that_are_none_or_repeat_or_are_negative(self, indices: list[int]) -> None:
        with pytest.raises(ValueError, match="outputs must be a number, or different indices >= 0"):
            Selection.parse(indices)

    def test_a_name(self) -> None:
        with pytest.raises(ValueError, match="outputs='logits' is a name; give how many"):
            Selection.parse("logits")

    def test_index_out_of_range(self) -> None:
        with pytest.raises(ValueError, match=r"outputs=\[2, 7\]: the model has 7 outputs per sample"):
            Selection.parse([2, 7]).count(7)


LAYOUTS = [
    (Layout(1, 6), (4, 6)),
    (Layout(1, 6), (4, 2, 3)),
    (Layout(2, 3, whole=False), (2, 4, 3)),
    (Layout(2, 3, whole=False), (8, 3)),
]


@pytest.mark.parametrize(("layout", "shape"), LAYOUTS, ids=str)
class TestCotangents:
    """`Selection.of` for values of four samples with six elements each."""

    def picked(self, selection: Selection, mean: Tensor, layout: Layout) -> tuple[Tensor, Tensor | None]:
        """[batch, K, elements], and the indices."""
        seeds, indices = selection.of(Moments(mean, 1.0), layout)
        assert seeds.shape[1:] == mean.shape
        return layout.split(seeds, 4), indices

    def test_all(self, layout: Layout, shape: tuple[int, ...]) -> None:
        rows, indices = self.picked(Selection(), torch.randn(shape), layout)
        assert indices is None
        assert torch.equal(rows, torch.eye(6).expand(4, 6, 6))

    def test_largest(self, layout: Layout, shape: tuple[int, ...]) -> None:
        mean = torch.randn(shape)
        rows, indices = self.picked(Selection(largest=2), mean, layout)
        expected = layout.samples(mean).argsort(1, descending=True)  # and the four others as probes
        assert torch.equal(indices, expected)
        assert torch.equal(rows, torch.eye(6)[expected])

    def test_probes_are_evenly_spaced(self, layout: Layout, shape: tuple[int, ...]) -> None:
        wide = Layout(layout.before, 10 * layout.after, layout.whole)
        mean = torch.randn(*shape[:-1], 10 * shape[-1])
        _, indices = Selection(largest=4).of(Moments(mean, 1.0), wide)
        order = wide.samples(mean).argsort(1, descending=True)
        assert torch.equal(indices, order[:, [0, 1, 2, 3, 11, 25, 39, 53]])

    def test_as_many_as_there_are(self, layout: Layout, shape: tuple[int, ...]) -> None:
        """No choice is left: the same as all, in order."""
        rows, indices = self.picked(Selection(largest=6), torch.randn(shape), layout)
        assert indices is None
        assert torch.equal(rows, torch.eye(6).expand(4, 6, 6))

    def test_indices(self, layout: Layout, shape: tuple[int, ...]) -> None:
        rows, indices = self.picked(Selection(indices=(5, 1)), torch.randn(shape), layout)
        assert torch.equal(indices, torch.tensor([5, 1]).expand(4, 2))
        assert torch.equal(rows, torch.eye(6)[[5, 1]].expand(4, 2, 6))


def network(classes: int = 6) -> nn.Sequential:
    """Two layers with ReLU and dropout, so that covariance differs from the forward sweep's variance."""
    return (
        nn.Sequential(
            nn.Linear(4, 40), nn.ReLU(), nn.Dropout(0.4), nn.Linear(40, 30), nn.ReLU(), nn.Dropout(0.3)
        )
        .append(nn.Linear(30, classes))
        .double()
    )


def block(covariance: Tensor, indices: Tensor) -> Tensor:
    """The rows and columns at the indices, sample by sample."""
    return torch.stack([c[i][:, i] for c, i in zip(covariance, indices, strict=True)])


@pytest.mark.parametrize("fidelity", ["accurate", "auto"])
@pytest.mark.parametrize("outputs", [1, 3, 5, [4], [0, 5], [5, 2, 0]], ids=str)
def test_chosen_outputs_have_the_full_covariances_block(fidelity: str, outputs: Any) -> None:
    """The others have the variance of the forward sweep, that of tier fast; or are probes, and swept."""
    x, model = torch.randn(3, 4).double(), network()
    full = mp.convert(model, x, "accurate")(x)
    forward = mp.convert(model, x, "fast")(x)
    out = mp.convert(model, x, fidelity, outputs=outputs)(x)
    indices = out.indices
    count = outputs if isinstance(outputs, int) else len(outputs)
    assert indices.shape == (3, count)
    if isinstance(outputs, int):
        assert torch.equal(indices, full.mean.topk(count).indices)
    else:
        assert torch.equal(indices, torch.tensor(outputs).expand(3, count))
    torch.testing.assert_close(out.mean, full.mean)
    torch.testing.assert_close(out.covariance, block(full.covariance, indices))
    expected = forward.variance.scatter(1, indices, full.variance.gather(1, indices))
    if isinstance(outputs, int):
        left = full.mean.argsort(1, descending=True)[:, count:]
        probes = left[:, [0, 1, 3, 4]] if count == 1 else left
        factor = (full.variance / forward.variance).gather(1, probes).log().mean(1, keepdim=True).exp()
        swept = torch.cat([indices, probes], 1)
        expected = (forward.variance * factor).scatter(1, swept, full.variance.gather(1, swept))
    torch.testing.assert_close(out.variance, expected)
    assert not torch.isclose(full.variance, forward.variance, rtol=1e-3).any()  # else nothing was tested


def test_as_many_as_there_are_is_all_of_them() -> None:
    x, model = torch.randn(3, 4).double(), network()
    full, out = (mp.convert(model, x, "accurate", outputs=m)(x) for m in (None, 99))
    assert out.indices is None
    torch.testing.assert_close(out.covariance, full.covariance)


def test_indices_of_a_sample_that_is_not_flat() -> None:
    """They count its elements in row-major order, also where the batch is not the first dimension."""
    x, model = torch.randn(3, 4).double(), network()
    full = mp.convert(model, x, "accurate")(x)
    image = nn.Sequential(model, nn.Unflatten(1, (2, 3)))
    moved = nn.Sequential(image, Apply(lambda y: y.transpose(0, 1), "transpose"))
    for shaped in (image, moved):
        out = mp.convert(shaped, x, "accurate", outputs=[4, 1])(x)
        torch.testing.assert_close(out.covariance, block(full.covariance, out.indices))


def test_several_outputs_each_get_their_own() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = network(6), network(4)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"first": self.first(x), "second": self.second(x)}

    x, model = torch.randn(3, 4).double(), Two()
    out = mp.convert(model, x, "accurate", outputs=2)(x)
    for name, part in (("first", model.first), ("second", model.second)):
        alone = mp.convert(part, x, "accurate", outputs=2)(x)
        assert torch.equal(out[name].indices, alone.indices)
        torch.testing.assert_close(out[name].covariance, alone.covariance)


@pytest.mark.parametrize("fidelity", ["accurate", "auto"])
def test_index_out_of_range_is_reported_at_conversion(fidelity: str) -> None:
    with pytest.raises(ValueError, match=r"outputs=\[0, 6\]: the model has 6 outputs per sample"):
        mp.convert(network(), torch.zeros(2, 4).double(), fidelity, outputs=[0, 6])


@pytest.mark.parametrize("fidelity", ["fast", "paper"])
def test_tiers_without_covariance_have_nothing_to_choose(fidelity: str) -> None:
    with pytest.raises(ValueError, match=f"which tier '{fidelity}' does not compute"):
        mp.convert(network(), torch.zeros(2, 4).double(), fidelity, outputs=2)


def test_choosing_few_of_many_makes_auto_accurate() -> None:
    """Without a choice the same network would be too much for it."""
    x, model = torch.randn(2, 4).double(), network(100)
    bnn = mp.convert(model, x, outputs=3)
    assert bnn.fidelity == "accurate"
    assert bnn(x).covariance.shape == (2, 3, 3)


def test_other_batch_sizes() -> None:
    bnn = mp.convert(network(), torch.zeros(2, 4).double(), outputs=2)
    x = torch.randn(5, 4).double()
    whole = bnn(x)
    for i in range(5):
        torch.testing.assert_close(bnn(x[i : i + 1]).covariance, whole.covariance[i : i + 1])
        assert torch.equal(bnn(x[i : i + 1]).indices, whole.indices[i : i + 1])
    assert bnn(x[:0]).covariance.shape == (0, 2, 2)


def test_variances_that_are_not_swept_are_right_too() -> None:
    """Of 120 outputs 12 are swept; what these show of the forward sweep's error mends the others."""
    x, model = torch.rand(3, 4).double(), network(120)
    with torch.no_grad():  # features that rise and fall together
        for layer in (model[0], model[3], model[6]):
            layer.weight.abs_()
    full = mp.convert(model, x, "accurate")(x)
    out = mp.convert(model, x, "accurate", outputs=8)(x)
    forward = mp.convert(model, x, "fast")(x)
    assert out.covariance.shape == (3, 8, 8)
    assert ((forward.std / full.std).median() - 1).abs() > 0.05  # else nothing was tested
    assert ((out.std / full.std).median() - 1).abs() < 0.03


def test_outputs_without_noise_do_not_matter() -> None:
    """Probes that do not vary say nothing, and what does not vary stays certain."""
    x, model = torch.randn(3, 4).double(), network(20)
    with torch.no_grad():
        model[-1].weight[4:] = 0
    out = mp.convert(model, x, "accurate", outputs=2)(x)
    assert not out.variance[:, 4:].any()
    assert out.variance[:, :4].all()
