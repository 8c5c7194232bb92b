"""The UCI experiment: protocol, resuming, table. Small made-up sets, and one of the real ones if at hand."""

from __future__ import annotations

import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import momentprop as mp
from momentprop_reproduction.data import UciSet, load_uci
from momentprop_reproduction.data.errors import MissingDataError
from momentprop_reproduction.experiments import uci, uci_set
from momentprop_reproduction.experiments.uci_evaluation import GAUSSIAN, METHODS, evaluate, in_raw_units
from momentprop_reproduction.experiments.uci_scaling import Scaling
from momentprop_reproduction.experiments.uci_training import Stack
from momentprop_reproduction.running.executors import run_units
from momentprop_reproduction.running.units import Workspace

N = 60


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A made-up set, under the name of a real one."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, 3)) * [1, 10, 0.1] + 5
    arrays: dict[str, Any] = {"features": x, "target": 100 + 3 * np.sin(x[:, 0]) + 0.1 * rng.normal(size=N)}
    for i in range(3):
        order = rng.permutation(N)
        arrays |= {f"train_{i}": order[:-10], f"test_{i}": order[-10:]}
    grids = {"dropout_rates": [0.01, 0.1], "tau_values": [0.5, 5.0]}
    (tmp_path / "data" / "uci").mkdir(parents=True)
    np.savez(tmp_path / "data/uci/yacht.npz", **arrays, **grids, n_splits=3, n_hidden=8, n_epochs=4)
    return tmp_path / "data"


def settings(root: Path, **changes: Any) -> uci.Settings:
    base: dict[str, Any] = {
        "sets": ("yacht",),
        "epoch_factor": 2.0,
        "n_samples": 300,
        "validation_samples": 200,
    }
    return uci.Settings(root=root, **(base | changes))


def without_times(result: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key != "seconds"}


def test_a_set_gives_every_method_of_every_split(root: Path, tmp_path: Path) -> None:
    done: list[float] = []

    def progress(name: str, at: float, total: float, label: str) -> None:
        done.append(at / total)

    results = run_units(uci.units(settings(root)), tmp_path / "units", progress=progress)
    assert done == sorted(done)
    assert done[-1] == pytest.approx(1.0)
    row = uci.summarize(results)["sets"]["yacht"]
    assert row["n_splits"] == 3
    assert set(row["methods"]) == {*METHODS, GAUSSIAN}
    for measures in row["methods"].values():
        for measure in ("rmse", "nll"):
            values = measures[measure]["values"]
            assert measures[measure]["mean"] == pytest.approx(np.mean(values))
            assert measures[measure]["standard_error"] == pytest.approx(np.std(values, ddof=1) / 3**0.5)
    assert row["methods"]["MC"]["nll_difference"]["in_errors"] == 0
    assert set(row["drop_probability"]) <= {0.01, 0.1}
    assert set(row["tau"]) <= {0.5, 5.0}
    assert 0.9 < row["std"]["accurate"]["ratio_median"] < 1.1


def test_the_grid_point_with_the_best_validation_likelihood_is_chosen(root: Path, tmp_path: Path) -> None:
    (result,) = run_units(uci.units(settings(root)), tmp_path / "units").values()
    grid = [(p, tau) for p in (0.01, 0.1) for tau in (0.5, 5.0)]
    chosen = list(zip(result["drop_probability"], result["tau"], strict=True))
    assert chosen == [grid[int(np.argmax(values))] for values in result["validation_log_likelihood"]]


def test_an_interrupted_set_resumes_with_the_same_numbers(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (unit,) = uci.units(settings(root))
    whole, part = Workspace(tmp_path / "whole"), Workspace(tmp_path / "part")
    for workspace in (whole, part):
        workspace.folder.mkdir()
    expected = without_times(unit.run(whole))

    real, calls = uci_set.evaluate, []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(uci_set, "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        unit.run(part)
    monkeypatch.setattr(uci_set, "train", None)  # both trainings are done: neither runs again
    monkeypatch.setattr(uci_set, "sample_mixture", None)
    assert without_times(unit.run(part)) == expected
    assert len(calls) == 4  # the first test is not run again


def test_a_new_revision_tests_again_and_trains_nothing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run_units(uci.units(settings(root)), tmp_path)
    monkeypatch.setattr(uci_set, "train", None)
    monkeypatch.setattr(uci_set, "sample_mixture", None)
    calls, real = [], uci_set.evaluate

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(uci_set, "evaluate", counted)
    for module in (uci, uci_set):
        monkeypatch.setattr(module, "REVISION", 99)
    again = run_units(uci.units(settings(root)), tmp_path)
    assert len(calls) == 3
    assert [without_times(r) for r in again.values()] == [without_times(r) for r in first.values()]
    run_units(uci.units(settings(root)), tmp_path)
    assert len(calls) == 3


def test_the_seed_changes_the_numbers(root: Path, tmp_path: Path) -> None:
    first, second = (
        next(iter(run_units(uci.units(settings(root, seed=s, n_splits=1)), tmp_path / "units").values()))
        for s in (0, 1)
    )
    assert first["methods"] != second["methods"]


def test_validation_rows_are_not_trained_on(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The last 20 % of the training rows are held out, and standardisation does not see them either."""
    data = load_uci("yacht", root)
    rows = data.splits[0][0]
    seen = []
    real = uci_set.train

    def spy(tasks: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(tasks)
        return real(tasks, *args, **kwargs)

    monkeypatch.setattr(uci_set, "train", spy)
    (unit,) = uci.units(settings(root, n_splits=1))
    unit.run(Workspace(tmp_path))
    grid, final = seen
    assert [len(task.target) for task in grid] == [40] * 4
    scaling = Scaling.of(data.features[rows[:40]], data.target[rows[:40]])
    torch.testing.assert_close(grid[0].features, scaling.inputs(data.features[rows[:40]]).float())
    assert len(final[0].target) == 50
    # Keras: reg = l^2 (1-p) / (2 N tau)
    assert [task.decay for task in grid] == [
        1e-4 * (1 - p) / (2 * 40 * tau) for p in (0.01, 0.1) for tau in (0.5, 5.0)
    ]


def test_evaluation_is_in_units_of_the_raw_target() -> None:
    generator = torch.Generator().manual_seed(0)
    stack = Stack(torch.randn(1, 5 * 9 + 1, generator=generator), 3, 9)
    model = stack.network(0, 0.1)
    x = 3 + 2 * torch.randn(40, 3, generator=generator, dtype=torch.float64)
    y = 1000 + 50 * torch.randn(40, generator=generator, dtype=torch.float64)
    scaling = Scaling.of(x, y)
    raw = in_raw_units(model, scaling)
    inputs = scaling.inputs(x).float()
    expected = model(inputs) * scaling.target_std + scaling.target_mean
    torch.testing.assert_close(raw(inputs), expected)
    found = evaluate(model, scaling, x, y, noise=100.0, n_samples=2000, seed=0)["methods"]
    error = expected.detach().squeeze(1).double() - y
    assert found["NN"]["rmse"] == pytest.approx(error.square().mean().sqrt().item(), rel=1e-5)
    nll = 0.5 * math.log(2 * math.pi / 0.01) + 0.005 * error.square().mean().item()
    assert found["NN"]["nll"] == pytest.approx(nll, rel=1e-5)
    moments = mp.convert(raw, inputs[:2], "accurate")(inputs)
    normal = torch.distributions.Normal(moments.mean.squeeze(1), (moments.variance.squeeze(1) + 100).sqrt())
    assert found["accurate"]["nll"] == pytest.approx(-normal.log_prob(y.float()).mean().item(), rel=1e-5)
    jumping = mp.convert(raw, inputs[:2], "accurate", jumps=16)(inputs)
    expected = mp.regress(jumping, noise=100.0).nll(y.float()[:, None]).mean().item()
    assert found["jumps"]["nll"] == pytest.approx(expected, rel=1e-5)


def test_constant_features_are_not_divided_by_rounding_errors() -> None:
    x = torch.stack([torch.full((1000,), 0.1), torch.arange(1000.0)], 1).double()
    scaled = Scaling.of(x, torch.arange(1000.0).double()).inputs(x)
    assert scaled[:, 0].abs().max() < 1e-9
    assert scaled[:, 1].std(correction=0).item() == pytest.approx(1.0)


@pytest.mark.parametrize("seed", [0])
def test_quick_on_real_data(seed: int, tmp_path: Path) -> None:
    """Boston and Yacht as they are: the accurate tier's likelihood is that of MC's own two moments.

    With jumps it is that of MC's mixture: on Yacht the two are far apart.
    """
    if not os.environ.get("MOMENTPROP_DATA"):
        pytest.skip("MOMENTPROP_DATA is not set")
    try:
        sets: list[UciSet] = [load_uci(name) for name in ("boston", "yacht")]
    except MissingDataError as error:
        pytest.skip(str(error))
    table = uci.summarize(run_units(uci.units(uci.Settings(seed).quick()), tmp_path))["sets"]
    for data in sets:
        row = table[data.name]
        methods = row["methods"]
        assert methods["MC"]["rmse"]["mean"] < 0.6 * data.target.std().item()
        assert abs(methods["accurate"]["nll"]["mean"] - methods[GAUSSIAN]["nll"]["mean"]) < 0.05
        assert abs(methods["jumps"]["nll"]["mean"] - methods["MC"]["nll"]["mean"]) < 0.2
        assert abs(row["std"]["accurate"]["ratio_median"] - 1) < 0.05
    yacht = table["yacht"]["methods"]
    assert abs(yacht["accurate"]["nll"]["mean"] - yacht["MC"]["nll"]["mean"]) > 0.5


def test_the_figure_shows_every_set(root: Path, tmp_path: Path) -> None:
    results = run_units(uci.units(settings(root)), tmp_path / "units")
    table = uci.summarize(results)
    figure = uci.figures(results)["uci"]
    left, right = figure.axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["yacht"]
    assert "accurate" in left.get_legend_handles_labels()[1]
    # the tier's median is where it should be
    medians = [line.get_xdata()[0] for line in right.lines if len(line.get_xdata()) == 1]
    assert table["sets"]["yacht"]["std"]["accurate"]["ratio_median"] in medians
    figure.savefig(tmp_path / "uci.png")


def test_units_are_picklable_and_ordered_longest_first() -> None:
    import pickle

    listed = uci.units(uci.Settings())
    assert len(listed) == 9
    assert [unit.work for unit in listed] == sorted((unit.work for unit in listed), reverse=True)
    for unit in listed:
        assert isinstance(pickle.loads(pickle.dumps(unit)).run, partial)
