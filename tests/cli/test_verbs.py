"""Verbs of other distributions: found by their entry points, and missed in one sentence."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
import typer
from typer.testing import CliRunner, Result

from momentprop.cli import verbs

group = typer.Typer(help="A verb with several commands.")


@group.command("one")
def one_of_a_group() -> None:
    print("one of a group")


@group.command("other")
def other_of_a_group() -> None:
    print("the other of a group")


def single(times: int = 1) -> None:
    """A verb that is one command."""
    print("single " * times)


def run(monkeypatch: pytest.MonkeyPatch, found: dict[str, str], *arguments: str) -> Result:
    """The command, with these verbs by what they load."""
    entries = [EntryPoint(name, value, verbs.GROUP) for name, value in found.items()]
    monkeypatch.setattr(verbs, "entry_points", lambda group: entries if group == verbs.GROUP else [])
    app = typer.Typer(add_completion=False)
    app.command("own")(lambda: print("own"))
    verbs.add_verbs(app)
    return CliRunner().invoke(app, arguments)


def test_functions_and_groups_become_verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"single": f"{__name__}:single", "several": f"{__name__}:group"}
    assert run(monkeypatch, found, "single", "--times", "2").stdout == "single single \n"
    assert run(monkeypatch, found, "several", "other").stdout == "the other of a group\n"
    help_text = run(monkeypatch, found, "--help").stdout
    assert "A verb that is one command." in help_text
    assert "A verb with several commands." in help_text


@pytest.mark.parametrize("verb", verbs.REPRODUCTION)
@pytest.mark.parametrize("arguments", [[], ["--help"], ["toy", "--quick", "--out", "x"]])
def test_without_the_experiments_their_verbs_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch, verb: str, arguments: list[str]
) -> None:
    result = run(monkeypatch, {}, verb, *arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith(f"momentprop {verb} belongs to the distribution momentprop-reproduction, which is")
    assert line.endswith("pip install ./reproduction")
    assert verb not in run(monkeypatch, {}, "--help").stdout


def test_a_verb_that_cannot_be_loaded_says_so_and_harms_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"broken": "no_such_package.verbs:broken", "single": f"{__name__}:single"}
    result = run(monkeypatch, found, "broken", "--option")
    assert result.exit_code == 1
    assert "momentprop broken cannot be loaded from no_such_package.verbs:broken" in result.stderr
    assert "No module named 'no_such_package'" in result.stderr
    assert run(monkeypatch, found, "single").stdout == "single \n"
    assert run(monkeypatch, found, "own").stdout == "own\n"
