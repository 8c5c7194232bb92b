"""The panels of the CIFAR figures show what they are given: points, lines, labels, limits."""

from __future__ import annotations

import math
from io import BytesIO

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from drawn import check_column, legend_of
from momentprop.evaluate import metrics
from momentprop_reproduction.experiments import cifar_panels
from momentprop_reproduction.experiments.cifar_panels import auc_against_samples, density_scatter


def pair(n: int = 500) -> tuple[torch.Tensor, torch.Tensor]:
    reference = torch.rand(n)
    return reference, reference + 0.1 * torch.randn(n)


SIZES = (1, 3, 10, 30, 100)
AUCS = 0.9 + 0.01 * np.arange(20).reshape(4, 5) / 20


# -------------------------------------------------------------------------------------------- agreement


def test_density_scatter_shows_all_points_and_the_correlation() -> None:
    reference, ours = pair()
    panel = density_scatter(reference, ours, "MC std", "our std")
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
    panel = density_scatter(reference, reference.clone())
    (points,) = panel.collections
    x, near = points.get_offsets()[:, 0], points.get_array()
    assert (np.diff(near) >= 0).all()
    assert near.max() == 1
    assert near[np.abs(x - 0.5) < 0.01].min() > 5 * near[np.abs(x - 0.5) > 0.1].max()


def test_density_is_that_of_a_normal_kernel() -> None:
    from scipy.stats import norm

    reference, ours = (t.numpy() for t in pair(300))
    near = cifar_panels._points_near(reference, ours, (-0.5, 1.5))
    std = 2 / 200 * math.sqrt(12 / 2)
    kernel = norm.pdf(reference[:, None], reference, std) * norm.pdf(ours[:, None], ours, std)
    assert np.corrcoef(near, kernel.sum(1))[0, 1] > 0.97


def test_density_scatter_refuses_what_has_no_correlation() -> None:
    with pytest.raises(ValueError, match="all values of b are equal"):
        density_scatter(torch.rand(5), torch.ones(5))


# ------------------------------------------------------------------------------------- against sampling


def test_auc_against_samples_shows_mean_spread_and_lines() -> None:
    panel = auc_against_samples(SIZES, AUCS, {"NN": 0.88, "momentprop": 0.92})
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
    panel = auc_against_samples(SIZES, AUCS[:1], {}, name="sampling")
    assert legend_of(panel) == ["sampling"]
    panel.figure.savefig(BytesIO())


def test_many_sizes_get_at_most_ten_ticks() -> None:
    sizes = range(1, 38)
    panel = auc_against_samples(sizes, np.full((2, 37), 0.9), {})
    assert len(panel.get_xticks()) <= 10


def test_auc_against_samples_refuses_other_shapes() -> None:
    with pytest.raises(ValueError, match=r"\[repetitions, 5 sizes\], not \[5, 4\]"):
        auc_against_samples(SIZES, AUCS.T, {})


def test_panels_draw_into_given_axes() -> None:
    left, right = Figure().subplots(1, 2)
    assert density_scatter(*pair(), axes=left) is left
    assert not right.has_data()
    assert auc_against_samples(SIZES, AUCS, {}, axes=right) is right
    assert right.has_data()


def test_panels_are_as_wide_as_a_column() -> None:
    check_column(density_scatter(*pair()), is_square=True)
    check_column(auc_against_samples(SIZES, AUCS, {"momentprop": 0.92}))
