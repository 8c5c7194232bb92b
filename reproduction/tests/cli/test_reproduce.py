"""momentprop reproduce and results: what they write, how they resume, fail and are interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import momentprop
from momentprop.cli.app import app
from momentprop.errors import MomentpropError
from momentprop_reproduction.cli import reproduce as verb
from momentprop_reproduction.cli.forecast import Forecast
from momentprop_reproduction.cli.unit_progress import UnitBars
from momentprop_reproduction.data import load_cifar10, load_uci
from momentprop_reproduction.experiments.toy import TIERS
from momentprop_reproduction.page import uci as page_uci
from momentprop_reproduction.page.page import SECTIONS, page

ROOT = Path(__file__).parents[3]
PNG = b"\x89PNG\r\n"
runner = CliRunner()


def quick(name: str, out: Path, *options: str) -> tuple[dict[str, Any], Any]:
    result = runner.invoke(app, ["reproduce", name, "--quick", "--out", str(out), *options])
    assert result.exit_code == 0, result.output
    return json.loads((out / f"{name}.json").read_text(encoding="utf-8")), result


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Any, Path]:
    out = tmp_path_factory.mktemp("toy")
    return (*quick("toy", out, "--seed", "3"), out)


def test_toy_writes_record_figure_and_table(toy: tuple[dict[str, Any], Any, Path]) -> None:
    record, result, out = toy
    assert record["command"] == f"momentprop reproduce toy --quick --out {out} --seed 3"
    assert record["seed"] == record["settings"]["seed"] == 3
    assert record["versions"]["momentprop"] == momentprop.__version__
    assert record["figures"] == ["reproduce_toy.png"]
    assert (out / "reproduce_toy.png").read_bytes().startswith(PNG)
    methods = record["summary"]["methods"]
    assert list(methods) == ["NN", "MC T=30", "MC T=500", *TIERS.values()]
    for method in methods:
        assert f"| {method} |" in result.stdout
    assert "toy finished" in result.stderr


def test_toy_tiers_beside_sampling(toy: tuple[dict[str, Any], Any, Path]) -> None:
    methods = toy[0]["summary"]["methods"]
    paper, accurate = (methods[name] for name in TIERS.values())
    for place in ("inside", "outside"):
        assert methods["MC T=500"][f"std_ratio_{place}"] == 1
        assert abs(accurate[f"std_ratio_{place}"] - 1) < 0.1
        assert paper[f"std_ratio_{place}"] < 0.9  # the paper's rules understate the spread
    assert abs(accurate["rmse"] - methods["MC T=500"]["rmse"]) < 0.02
    assert abs(accurate["nll"] - methods["MC T=500"]["nll"]) < 0.1
    assert methods["NN"]["std_inside"] is None


def test_a_finished_run_is_not_run_again(toy: tuple[dict[str, Any], Any, Path]) -> None:
    record, _, out = toy
    again, result = quick("toy", out, "--seed", "3")
    assert again == record
    assert "finished" not in result.stderr


def test_figures_may_go_elsewhere(toy: tuple[dict[str, Any], Any, Path]) -> None:
    _, _, out = toy
    quick("toy", out, "--seed", "3", "--figures", str(out / "images"))
    assert (out / "images" / "reproduce_toy.png").exists()


@pytest.mark.parametrize("name", ["uci", "cifar"])
def test_quick(name: str, tmp_path: Path) -> None:
    if not os.environ.get("MOMENTPROP_DATA"):
        pytest.skip("MOMENTPROP_DATA is not set")
    try:
        load_uci("yacht") if name == "uci" else load_cifar10("test")
    except (MomentpropError, OSError) as error:
        pytest.skip(f"the data are not there: {error}")
    record, result = quick(name, tmp_path)
    assert record["figures"]
    for figure in record["figures"]:
        assert (tmp_path / figure).read_bytes().startswith(PNG)
    assert result.stdout.startswith("## ")
    assert os.environ["MOMENTPROP_DATA"] not in json.dumps(record["summary"])
    assert page(tmp_path).count("## ") >= 1


def test_interruption_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(verb, "run", interrupted)
    result = runner.invoke(app, ["reproduce", "toy", "--quick", "--out", str(tmp_path), "--workers", "2"])
    assert result.exit_code == 130
    assert f"momentprop reproduce toy --quick --out {tmp_path} --workers 2" in result.stderr
    assert str(tmp_path / "units") in result.stderr


def test_ctrl_c_ends_with_status_130_and_the_rest_resumes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from momentprop.cli import main; main()"]
    command += ["reproduce", "toy", "--out", str(tmp_path), "--workers", "1"]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 300  # a busy machine takes its time
    while not list(tmp_path.glob("units/toy-*/progress.json")) and time.monotonic() < until:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 130, stderr
    assert "Interrupted." in stderr
    assert "Traceback" not in stderr
    assert not (tmp_path / "toy.json").exists()


def test_failures_are_told_without_a_traceback(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    result = runner.invoke(app, ["reproduce", "toy", "--quick", "--out", str(occupied)])
    assert result.exit_code == 1
    assert "momentprop reproduce toy failed" in result.stderr
    assert "Traceback" not in result.output


def test_missing_data_are_named(tmp_path: Path) -> None:
    result = runner.invoke(
        app, ["reproduce", "uci", "--quick", "--out", str(tmp_path), "--data", str(tmp_path)]
    )
    assert result.exit_code == 1
    assert "boston" in result.stderr


def test_remaining_time_does_not_count_what_an_earlier_run_did() -> None:
    now = [0.0]
    forecast = Forecast({"a": 10.0, "b": 10.0}, clock=lambda: now[0])
    assert forecast.remaining() is None
    forecast.update("a", 0.5)  # resumed in its middle
    now[0] = 100.0
    assert forecast.remaining() is None
    forecast.update("a", 1.0)
    assert forecast.fraction == 0.5
    assert forecast.remaining() == 200.0  # 5 took 100 seconds, 10 are left


def test_progress_in_a_log_has_a_line_for_each_finished_unit(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+") as stream:
        with UnitBars("uci", {"a": 1.0, "b": 3.0}, Console(file=stream, width=200)) as bars:
            bars("a", 1, 2, "training")
            bars("a", 1, 1, "finished")
        stream.seek(0)
        [line] = stream.read().splitlines()
    assert line.startswith("uci: a finished 100%; 25%, 1/2 units, ")
    assert line.endswith(" left")


def test_progress_on_a_terminal_shows_running_units_and_remaining_time(tmp_path: Path) -> None:
    with (tmp_path / "screen").open("w+") as stream:
        console = Console(file=stream, force_terminal=True, width=120)
        with UnitBars("uci", {"a": 1.0, "b": 3.0}, console) as bars:
            bars("a", 1, 4, "training")
            bars("a", 2, 4, "training")
            bars.progress.refresh()
            assert len(bars.tasks) == 1
            bars("a", 1, 1, "finished")
            assert not bars.tasks
        stream.seek(0)
        text = stream.read()
    assert "training" in text
    assert "left" in text


def test_results_needs_records(tmp_path: Path) -> None:
    result = runner.invoke(app, ["results", "--in", str(tmp_path)])
    assert result.exit_code == 1
    assert "momentprop reproduce" in result.stderr


def test_results_writes_or_prints_the_page(toy: tuple[dict[str, Any], Any, Path]) -> None:
    _, _, out = toy
    printed = runner.invoke(app, ["results", "--in", str(out)])
    assert printed.exit_code == 0
    runner.invoke(app, ["results", "--in", str(out), "--out", str(out / "page.md")])
    assert (out / "page.md").read_text(encoding="utf-8") == printed.stdout == page(out)


def test_the_committed_page_is_made_from_the_committed_records() -> None:
    committed = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert committed == page(ROOT / "results"), (
        "make it again: momentprop results --in results --out docs/results.md"
    )


@pytest.mark.parametrize("name", SECTIONS)
def test_committed_records_are_full_runs_and_tell_no_machine(name: str) -> None:
    file = ROOT / "results" / f"{name}.json"
    if not file.exists():
        pytest.skip(f"no full run of {name} is committed yet")
    text = file.read_text(encoding="utf-8")
    record = json.loads(text)
    assert record["command"].startswith(f"momentprop reproduce {name} --out results --figures docs/images")
    assert "--quick" not in record["command"]
    assert not any(f'"{start}' in text for start in ("/home", "/root", "/tmp", "/work", "/Users"))
    for figure in record["figures"]:
        assert (ROOT / "docs" / "images" / figure).exists()


def test_the_page_names_the_sets_that_miss_the_aim() -> None:
    def method(nll: float) -> dict[str, Any]:
        over = {"mean": nll, "standard_error": 0.1, "values": []}
        return {"rmse": over, "nll": over, "nll_difference": {"mean": nll - 2, "in_errors": (nll - 2) / 0.1}}

    tiers = {"ratio_median": 1.0, "ratio_5": 0.9, "ratio_95": 1.1, "correlation": 0.99}
    row = {
        "methods": {
            "NN": method(3),
            "MC": method(2),
            "MC as one Gaussian": method(2),
            "accurate": method(2.05),
            "jumps": method(2.15),
        },
        "std": {"paper": tiers, "accurate": tiers},
        "seconds": {"predict": {"NN": 0.001, "MC": 5.0, "paper": 0.002, "accurate": 0.005, "jumps": 0.006}},
        "variant": "npz",
        "n": 506,
        "n_splits": 20,
        "epochs": 400,
        "drop_probability": [0.1] * 20,
        "tau": [0.25] * 20,
    }
    row["methods"]["paper"] = method(2.3)
    summary = {"sets": {"yacht": row, "boston": row}}
    text = page_uci.section({"summary": summary, "settings": {"n_samples": 10_000}, "figures": []}, "images")
    assert "The accurate tier is within one standard error on 2 of 2 sets." in text
    assert "The accurate tier with jumps is within one standard error on 0 of 2 sets; not on" in text
    assert (
        "The paper tier is within one standard error on 0 of 2 sets; not on boston (3.00), yacht (3.00)."
        in text
    )
    line = next(line for line in text.splitlines() if line.startswith("| yacht | 3.00"))
    assert "| 2.35 | 2.11 | 1.25 ± 0.01 |" in line  # as printed, on a set where the paper's are known
    assert "|  |  | 2.40 ± 0.04 |" in text  # and blank where not
    assert "| 1,000 |" in text  # times faster
