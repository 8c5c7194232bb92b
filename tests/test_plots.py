"""The figures show what they are given: lines, labels, limits."""

from __future__ import annotations

import math
from io import BytesIO
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from momentprop import plots
from momentprop.evaluate import metrics

METHODS = ("NN", "MC T=50", "momentprop")


def legend_of(panel: Any) -> list[str]:
    return [text.get_text() for text in panel.get_legend().get_texts()]


def labelled_lines(panel: Any) -> dict[str, Any]:
    return {line.get_label(): line for line in panel.lines if not line.get_label().startswith("_")}


def curves() -> dict[str, tuple[Any, Any]]:
    kept = np.linspace(0.2, 1, 9)
    return {name: (kept, 0.99 - (i + 1) * 0.02 * kept) for i, name in enumerate(METHODS)}


def classified(n: int = 400) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    logits = 2 * torch.randn(n, 5)
    target = torch.distributions.Categorical(logits=logits).sample()
    return {"sharp": (2 * logits).softmax(1), "true": logits.softmax(1)}, target


def pair(n: int = 500) -> tuple[torch.Tensor, torch.Tensor]:
    reference = torch.rand(n)
    return reference, reference + 0.1 * torch.randn(n)


SIZES = (1, 3, 10, 30, 100)
AUCS = 0.9 + 0.01 * np.arange(20).reshape(4, 5) / 20


# -------------------------------------------------------------------------------------------- filtering


def test_filter_curve_has_a_line_per_method() -> None:
    panel = plots.filter_curve(curves())
    assert legend_of(panel) == list(METHODS)
    for name, line in labelled_lines(panel).items():
        np.testing.assert_array_equal(line.get_xdata(), curves()[name][0])
        np.testing.assert_array_equal(line.get_ydata(), curves()[name][1])
    assert len({line.get_color() for line in panel.lines}) == 3
    assert panel.get_xlim() == (0.2, 1)
    assert panel.get_xlabel() == "fraction of inputs kept"
    assert plots.filter_curve(curves(), "largest entropy kept").get_xlabel() == "largest entropy kept"


def test_filter_curve_takes_tensors_and_nan_where_nothing_is_kept() -> None:
    kept, accuracy = torch.tensor([0.0, 0.5, 1.0]), torch.tensor([math.nan, 0.9, 0.8])
    panel = plots.filter_curve({"a": (kept, accuracy)})
    assert 0.79 < panel.get_ylim()[0] < 0.8
    panel.figure.savefig(BytesIO())


def test_filter_curve_says_which_curve_is_incomplete() -> None:
    with pytest.raises(ValueError, match=r"momentprop: \(9,\) cut-offs but \(8,\) accuracies"):
        plots.filter_curve(curves() | {"momentprop": (np.ones(9), np.ones(8))})


# -------------------------------------------------------------------------------------------- agreement


def test_density_scatter_shows_all_points_and_the_correlation() -> None:
    reference, ours = pair()
    panel = plots.density_scatter(reference, ours, "MC std", "our std")
    (points,) = panel.collections
    drawn = sorted(map(tuple, points.get_offsets().tolist()))
    assert drawn == sorted(zip(reference.tolist(), ours.tolist(), strict=True))
    assert [text.get_text() for text in panel.texts] == [f"r = {metrics.pearson(reference, ours)}"]
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("MC std", "our std")
    # equality is a diagonal only if both axes are the same
    assert panel.get_xlim() == panel.get_ylim()
    assert panel.get_aspect() == 1
    (identity,) = panel.lines
    np.testing.assert_array_equal(identity.get_xdata(), identity.get_ydata())
    assert panel.get_xlim()[0] < min(ours.min(), reference.min())
    assert panel.get_xlim()[1] > max(ours.max(), reference.max())


def test_density_scatter_colours_by_density_with_the_densest_on_top() -> None:
    cluster, line = torch.randn(300) * 0.01 + 0.5, torch.linspace(0, 1, 20)
    reference = torch.cat([cluster, line])
    panel = plots.density_scatter(reference, reference.clone())
    (points,) = panel.collections
    x, near = points.get_offsets()[:, 0], points.get_array()
    assert (np.diff(near) >= 0).all()
    assert near.max() == 1
    assert near[np.abs(x - 0.5) < 0.01].min() > 5 * near[np.abs(x - 0.5) > 0.1].max()


def test_density_is_that_of_a_normal_kernel() -> None:
    from scipy.stats import norm

    reference, ours = (t.numpy() for t in pair(300))
    near = plots._points_near(reference, ours, (-0.5, 1.5))
    std = 2 / 200 * math.sqrt(12 / 2)
    kernel = norm.pdf(reference[:, None], reference, std) * norm.pdf(ours[:, None], ours, std)
    assert np.corrcoef(near, kernel.sum(1))[0, 1] > 0.97


def test_density_scatter_refuses_what_has_no_correlation() -> None:
    with pytest.raises(ValueError, match="all values of b are equal"):
        plots.density_scatter(torch.rand(5), torch.ones(5))


# ------------------------------------------------------------------------------------------ calibration


def test_reliability_diagram_shows_every_bin_its_count_and_the_error() -> None:
    probs, target = classified()
    upper, lower = plots.reliability_diagram(probs, target, n_bins=10)
    errors = {name: metrics.ece(p, target, 10, n_resamples=1).value for name, p in probs.items()}
    assert legend_of(upper) == [f"{name} (ECE {error:.3f})" for name, error in errors.items()]
    bars = iter(lower.patches)
    for (_, line), intervals, p in zip(
        labelled_lines(upper).items(), upper.collections, probs.values(), strict=True
    ):
        confidence, accuracy, count = metrics.reliability(p, target, 10)
        filled = count > 0
        np.testing.assert_allclose(line.get_xdata(), confidence[filled])
        np.testing.assert_allclose(line.get_ydata(), accuracy[filled])
        ends = [tuple(segment[:, 1]) for segment in intervals.get_segments()]
        expected = [metrics.wilson(a * n, n) for a, n in zip(accuracy[filled], count[filled], strict=True)]
        np.testing.assert_allclose(ends, [(float(e.low), float(e.high)) for e in expected], rtol=1e-6)
        for index in torch.nonzero(filled).flatten().tolist():
            bar = next(bars)
            assert bar.get_height() == count[index]
            assert index / 10 < bar.get_x() < bar.get_x() + bar.get_width() < (index + 1) / 10
            assert to_hex(bar.get_facecolor()) == to_hex(line.get_color())
    assert next(bars, None) is None
    beside = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in lower.patches)
    assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(beside))
    assert lower.get_yscale() == "log"
    assert lower.get_ylim()[0] < 1  # one input has a bar of some height
    assert lower.get_xlabel() == "confidence"
    low = min(line.get_xdata().min() for line in labelled_lines(upper).values())
    assert low - 0.1 <= upper.get_xlim()[0] <= low
    assert upper.get_xlim()[1] == 1


def test_reliability_diagram_of_certainty() -> None:
    """All in the last bin, of which the empty others say nothing."""
    probs = torch.tensor([[1.0, 0.0]]).expand(9, 2)
    upper, lower = plots.reliability_diagram({"sure": probs}, torch.tensor([0] * 6 + [1] * 3))
    assert legend_of(upper) == ["sure (ECE 0.333)"]
    assert [bar.get_height() for bar in lower.patches] == [9]
    upper.figure.savefig(BytesIO())


def test_reliability_diagram_takes_arrays() -> None:
    probs, target = classified()
    of_arrays, _ = plots.reliability_diagram({k: v.numpy() for k, v in probs.items()}, target.numpy())
    of_tensors, _ = plots.reliability_diagram(probs, target)
    assert legend_of(of_arrays) == legend_of(of_tensors)


# ------------------------------------------------------------------------------------- against sampling


def test_auc_against_samples_shows_mean_spread_and_lines() -> None:
    panel = plots.auc_against_samples(SIZES, AUCS, {"NN": 0.88, "momentprop": 0.92})
    assert legend_of(panel) == ["MC dropout, mean ± std of 4 runs", "NN (0.880)", "momentprop (0.920)"]
    curve, nn, ours = panel.lines
    np.testing.assert_allclose(curve.get_ydata(), AUCS.mean(0))
    assert set(nn.get_ydata()) == {0.88}
    assert set(ours.get_ydata()) == {0.92}
    assert len({line.get_color() for line in panel.lines}) == 3
    (band,) = panel.collections
    corners = band.get_paths()[0].vertices
    spread = np.sqrt(((AUCS - AUCS.mean(0)) ** 2).sum(0) / 3)
    for x, middle, half in zip(SIZES, AUCS.mean(0), spread, strict=True):
        there = corners[corners[:, 0] == x, 1]
        assert (there.min(), there.max()) == pytest.approx((middle - half, middle + half))
    assert panel.get_xscale() == "log"
    panel.figure.canvas.draw()
    assert [tick.get_text() for tick in panel.get_xticklabels()] == [str(size) for size in SIZES]


def test_auc_against_samples_of_one_run_has_no_spread() -> None:
    panel = plots.auc_against_samples(SIZES, AUCS[:1], {}, name="sampling")
    assert legend_of(panel) == ["sampling"]
    panel.figure.savefig(BytesIO())


def test_many_sizes_get_at_most_ten_ticks() -> None:
    sizes = range(1, 38)
    panel = plots.auc_against_samples(sizes, np.full((2, 37), 0.9), {})
    assert len(panel.get_xticks()) <= 10


def test_auc_against_samples_refuses_other_shapes() -> None:
    with pytest.raises(ValueError, match=r"\[repetitions, 5 sizes\], not \[5, 4\]"):
        plots.auc_against_samples(SIZES, AUCS.T, {})


# ------------------------------------------------------------------------------------------- all of them


def draw(name: str, axes: Any = None) -> Any:
    probs, target = classified()
    match name:
        case "filter_curve":
            return plots.filter_curve(curves(), axes=axes)
        case "density_scatter":
            return plots.density_scatter(*pair(), axes=axes)
        case "reliability_diagram":
            return plots.reliability_diagram(probs, target, axes=axes)
        case _:
            return plots.auc_against_samples(SIZES, AUCS, {"momentprop": 0.92}, axes=axes)


ONE_PANEL = ["filter_curve", "density_scatter", "auc_against_samples"]


@pytest.mark.parametrize("name", ONE_PANEL)
def test_draws_into_given_axes(name: str) -> None:
    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert draw(name, axes=right) is right
    assert right.has_data()
    assert not left.has_data()


def test_reliability_diagram_draws_into_given_axes() -> None:
    given = Figure().subplots(2, 1)
    assert list(draw("reliability_diagram", axes=given)) == list(given)
    assert all(panel.has_data() for panel in given)


@pytest.mark.parametrize("name", [*ONE_PANEL, "reliability_diagram"])
def test_a_figure_of_its_own_is_as_wide_as_a_column_and_keeps_its_text_inside(name: str) -> None:
    axes = draw(name)
    panel = np.ravel(axes)[0]
    figure = panel.figure
    assert figure.get_size_inches()[0] == 3.4
    target = BytesIO()
    figure.savefig(target, format="png")
    assert target.getvalue().startswith(b"\x89PNG")
    width, height = figure.get_size_inches()
    drawn = figure.get_tightbbox()
    assert -0.01 <= drawn.x0 < drawn.x1 <= width + 0.01
    assert -0.01 <= drawn.y0 < drawn.y1 <= height + 0.01
    if name != "density_scatter":  # equal axes leave room at the sides
        assert panel.get_window_extent().width > 0.7 * width * figure.dpi
