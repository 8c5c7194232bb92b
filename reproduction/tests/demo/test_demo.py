"""The experiments run, follow from their seed, and draw their figures."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score, roc_curve

from momentprop import plots
from momentprop_reproduction.demo import digits, toy

TINY: dict[str, Any] = {"epochs": 2, "n_samples": 5, "truth_samples": 10, "repeats": 1}


pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class Watched:
    result: Any
    progress: list[tuple[int, int]]
    rng_untouched: bool


def watched(run: Any, **settings: Any) -> Watched:
    calls: list[tuple[int, int]] = []
    before = torch.get_rng_state()
    result = run(progress=lambda done, total: calls.append((done, total)), **settings)
    return Watched(result, calls, torch.equal(before, torch.get_rng_state()))


@pytest.fixture(scope="module")
def regression() -> Watched:
    return watched(toy.run, seed=3, epochs=200, truth_samples=200, repeats=1)


@pytest.fixture(scope="module")
def classes() -> Watched:
    return watched(digits.run, seed=3, **TINY)


def without_times(table: dict[str, dict[str, float | None]]) -> dict[str, dict[str, float | None]]:
    return {name: {k: v for k, v in row.items() if k != "seconds"} for name, row in table.items()}


def test_progress_counts_every_epoch(regression: Watched, classes: Watched) -> None:
    assert regression.progress == [(i, 200) for i in range(1, 201)]
    assert classes.progress == [(1, 2), (2, 2)]


def test_the_callers_random_state_is_untouched(regression: Watched, classes: Watched) -> None:
    assert regression.rng_untouched
    assert classes.rng_untouched


@pytest.mark.parametrize("run", [toy.run, digits.run])
def test_everything_but_times_follows_from_the_seed(run: Any) -> None:
    first = run(seed=5, **TINY)
    torch.rand(7)  # the caller's random state must not matter
    again, other = run(seed=5, **TINY), run(seed=6, **TINY)
    assert without_times(first.table) == without_times(again.table)
    assert without_times(first.table) != without_times(other.table)


def test_toy_table_is_complete(regression: Watched) -> None:
    table = regression.result.table
    assert list(table) == ["NN", "MC T=30", "momentprop"]
    for name, row in table.items():
        for column in ("rmse", "nll", "seconds"):
            assert math.isfinite(row[column])
        for column in ("std_inside", "std_outside", "std_ratio_inside", "std_ratio_outside"):
            assert row[column] is None if name == "NN" else row[column] > 0


def test_toy_fits_inside_and_spreads_outside(regression: Watched) -> None:
    for name, row in regression.result.table.items():
        assert row["rmse"] < 0.4  # the curve's own standard deviation is 0.8
        if name != "NN":
            assert row["std_outside"] > 1.5 * row["std_inside"]
    std, x = regression.result.std["momentprop"], regression.result.x
    low, high = regression.result.training_range
    assert std[0] > std[x >= low][0]
    assert std[-1] > std[x <= high][-1]


def test_digits_are_those_of_scikit_learn() -> None:
    images, labels = digits.load()
    expected = load_digits()
    np.testing.assert_array_equal(images.squeeze(1).numpy(), expected.images / 16)
    np.testing.assert_array_equal(labels.numpy(), expected.target)


def test_digits_table_is_complete(classes: Watched) -> None:
    table = classes.result.table
    assert list(table) == ["NN", "MC T=5", "momentprop"]
    for row in table.values():
        assert 0 <= row["accuracy"] <= 1
        assert 0 <= row["auroc"] <= 1
        assert -1 <= row["entropy_correlation"] <= 1
        assert row["nll"] > 0
        assert row["seconds"] > 0


def test_digits_learns_and_agrees_with_sampling() -> None:
    table = digits.run(seed=0, epochs=20, truth_samples=50, n_samples=20, repeats=1).table
    assert all(row["accuracy"] > 0.85 and row["auroc"] > 0.75 for row in table.values())
    assert table["momentprop"]["entropy_correlation"] > 0.9


def test_at_least_one_epoch() -> None:
    with pytest.raises(ValueError, match="epochs must be at least 1, not 0"):
        toy.run(epochs=0)


def test_regression_bands(regression: Watched) -> None:
    r = regression.result
    axes = plots.regression_bands(r.x, r.mean, r.std, (r.observed_x, r.observed_y), r.training_range)
    assert axes.shape == (2,)
    upper = [text.get_text() for text in axes[0].get_legend().get_texts()]
    lower = [text.get_text() for text in axes[1].get_legend().get_texts()]
    assert upper == ["training data", "NN", "MC T=30", "momentprop"]
    assert lower == ["MC T=30, mean ± 2 std", "momentprop, mean ± 2 std"]


def test_entropy_histograms(classes: Watched) -> None:
    c = classes.result
    axes = plots.entropy_histograms(c.known_entropy, c.novel_entropy)
    assert [panel.get_title() for panel in axes] == list(c.table)


def test_roc_curves_show_the_area_of_the_table(classes: Watched) -> None:
    c = classes.result
    axes = plots.roc_curves(c.known_entropy, c.novel_entropy)
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == [f"{name} (AUC {row['auroc']:.3f})" for name, row in c.table.items()]


def test_roc_area_with_ties() -> None:
    known, novel = np.array([0.0, 1.0, 1.0, 2.0]), np.array([1.0, 2.0, 2.0, 3.0])
    axes = plots.roc_curves({"a": known}, {"a": novel})
    expected = roc_auc_score([0] * 4 + [1] * 4, np.concatenate([known, novel]))
    assert f"{expected:.3f}" in axes.get_legend().get_texts()[0].get_text()


def test_roc_curves_are_those_of_scikit_learn() -> None:
    scores = np.random.default_rng(0).integers(0, 9, 50)  # with ties
    axes = plots.roc_curves({"a": scores[:20]}, {"a": scores[20:]})
    expected = roc_curve([0] * 20 + [1] * 30, scores, drop_intermediate=False)
    np.testing.assert_allclose(axes.lines[1].get_xydata(), np.stack(expected[:2], 1), rtol=1e-15)


def test_roc_curves_refuse_scores_that_are_no_numbers() -> None:
    with pytest.raises(ValueError, match="contains NaN"):
        plots.roc_curves({"a": np.array([0.0, math.nan])}, {"a": np.array([1.0])})


def test_plots_draw_into_given_axes(classes: Watched) -> None:
    c = classes.result
    figure = Figure()
    first, *others = figure.subplots(1, 4)
    assert plots.roc_curves(c.known_entropy, c.novel_entropy, axes=first) is first
    assert list(plots.entropy_histograms(c.known_entropy, c.novel_entropy, axes=others)) == others
