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

from drawn import check_column, legend_of
from momentprop import plots
from momentprop.evaluate import metrics
from momentprop.predict.class_predictive import ClassPredictive

METHODS = ("NN", "MC T=50", "momentprop")


def labelled_lines(panel: Any) -> dict[str, Any]:
    return {line.get_label(): line for line in panel.lines if not line.get_label().startswith("_")}


def curves() -> dict[str, tuple[Any, Any]]:
    kept = np.linspace(0.2, 1, 9)
    return {name: (kept, 0.99 - (i + 1) * 0.02 * kept) for i, name in enumerate(METHODS)}


def classified(n: int = 400) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    logits = 2 * torch.randn(n, 5)
    target = torch.distributions.Categorical(logits=logits).sample()
    return {"sharp": (2 * logits).softmax(1), "true": logits.softmax(1)}, target


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


def test_reliability_diagram_takes_arrays_and_predictive_distributions() -> None:
    probs, target = classified()
    of_tensors, _ = plots.reliability_diagram(probs, target)
    others: list[dict[str, Any]] = [
        {k: v.numpy() for k, v in probs.items()},
        {k: ClassPredictive(v.log()) for k, v in probs.items()},
    ]
    for other in others:
        axes, _ = plots.reliability_diagram(other, target)
        assert legend_of(axes) == legend_of(of_tensors)


# ------------------------------------------------------------------------------------------- all of them


def test_filter_curve_draws_into_given_axes() -> None:
    left, right = Figure().subplots(1, 2)
    assert plots.filter_curve(curves(), axes=right) is right
    assert right.has_data()
    assert not left.has_data()


def test_reliability_diagram_draws_into_given_axes() -> None:
    given = Figure().subplots(2, 1)
    probs, target = classified()
    assert list(plots.reliability_diagram(probs, target, axes=given)) == list(given)
    assert all(panel.has_data() for panel in given)


def test_figures_are_as_wide_as_a_column() -> None:
    check_column(plots.filter_curve(curves()))
    check_column(plots.reliability_diagram(*classified())[0])
