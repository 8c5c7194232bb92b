"""The command: what it prints, what it writes, how it fails."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

import momentprop
from momentprop.cli import main
from momentprop.cli.app import app
from momentprop.rules.registry import RULES

runner = CliRunner()


def test_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout == f"momentprop {momentprop.__version__}\n"


def test_ops_names_operator_exactness_and_reference_on_one_line() -> None:
    result = runner.invoke(app, ["ops"])
    assert result.exit_code == 0
    [line] = [line for line in result.stdout.splitlines() if "aten.relu.default" in line]
    assert "exact for Gaussian inputs" in line
    assert "paper, ReLU" in line


def test_ops_json_lists_every_rule() -> None:
    result = runner.invoke(app, ["ops", "--json"])
    assert result.exit_code == 0
    rows = json.loads(result.stdout)
    assert [row["operator"] for row in rows] == [str(rule.op) for rule in RULES]
    assert {"operator", "tier", "exactness", "reference"} == set(rows[0])
    softmax = [row["tier"] for row in rows if row["operator"] == "aten.softmax.int"]
    assert sorted(softmax) == ["fast, accurate", "paper"]


def test_ops_lists_the_operators_with_a_given_part_in_their_name() -> None:
    result = runner.invoke(app, ["ops", "ReLU", "--json"])
    names = [row["operator"] for row in json.loads(result.stdout)]
    assert "aten.relu.default" in names
    assert names == [str(rule.op) for rule in RULES if "relu" in str(rule.op)]
    table = runner.invoke(app, ["ops", "relu"]).stdout
    assert all(name in table for name in names)
    assert "aten.linear.default" not in table


def test_ops_says_that_there_is_no_such_operator() -> None:
    result = runner.invoke(app, ["ops", "no_such_operator"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "no rule for an operator with 'no_such_operator'" in result.stderr


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_main_says_what_to_install(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("momentprop.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"{package} is not installed" in captured.err
    assert "pip install 'momentprop[cli]'" in captured.err
