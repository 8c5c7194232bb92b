"""momentprop demo: what it writes, how it fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import momentprop
from momentprop.cli.app import app

PNG = b"\x89PNG\r\n"
runner = CliRunner()


def test_demo_writes_figures_and_results(tmp_path: Path) -> None:
    out = tmp_path / "new" / "demo"
    result = runner.invoke(app, ["demo", "--quick", "--out", str(out), "--seed", "1"])
    assert result.exit_code == 0, result.output
    for name in ("regression.png", "entropy.png", "roc.png"):
        image = (out / name).read_bytes()
        assert image.startswith(PNG)
        assert len(image) > 10_000
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert results["seed"] == 1
    assert results["command"].startswith("momentprop demo")
    assert results["command"].endswith("--seed 1 --quick")
    assert results["versions"]["momentprop"] == momentprop.__version__
    assert {"python", "torch", "matplotlib"} <= set(results["versions"])
    assert list(results["regression"]) == ["NN", "MC T=30", "momentprop"]
    assert list(results["digits"]) == ["NN", "MC T=50", "momentprop"]
    for method in ("NN", "MC T=30", "MC T=50", "momentprop"):
        assert method in result.stdout
    assert "200/200" in result.stderr
    assert "200/200" not in result.stdout


def test_demo_says_that_it_cannot_write(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    result = runner.invoke(app, ["demo", "--quick", "--out", str(occupied)])
    assert result.exit_code == 1
    assert "momentprop demo failed" in result.stderr
    assert "Traceback" not in result.output


def test_demo_says_that_matplotlib_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(momentprop, "plots", raising=False)
    monkeypatch.delitem(sys.modules, "momentprop.plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    result = runner.invoke(app, ["demo", "--quick", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "pip install 'momentprop[plots]'" in " ".join(result.stderr.split())
