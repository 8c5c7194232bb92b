"""benchmarks/zoo_run.py: limits, crashes, interruptions, missing packages, results that are kept."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from scripts import script

pytestmark = [
    pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def zoo_run() -> Iterator[ModuleType]:
    with script("benchmarks/zoo_run.py") as module:
        yield module


def examine(name: str) -> dict[str, Any]:
    if name == "hangs":
        time.sleep(60)
    if name == "crashes":
        os._exit(3)
    return {"status": "fine", "name": name, "secret": "/home"}


def test_a_hang_or_a_crash_is_a_result_and_leaves_no_process(zoo_run: ModuleType) -> None:
    assert zoo_run.run_one("good", examine, 30)["name"] == "good"
    assert zoo_run.run_one("hangs", examine, 0.2) == {"status": "time limit", "cause": "more than 0 s"}
    assert zoo_run.run_one("crashes", examine, 30) == {"status": "crash", "cause": "exit code 3"}
    assert not multiprocessing.active_children()


def test_an_interruption_leaves_no_process(zoo_run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: object, timeout: float) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(multiprocessing.connection.Connection, "poll", interrupted)
    with pytest.raises(KeyboardInterrupt):
        zoo_run.run_one("hangs", examine, 30)
    assert not multiprocessing.active_children()


def test_results_are_kept_and_resumed(
    zoo_run: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zoo = {name: SimpleNamespace(needs="") for name in ("a", "b", "crashes")}
    zoo["other"] = SimpleNamespace(needs="no_such_package")
    question = zoo_run.Question(
        "Why?", examine, "fine", lambda name, result: f"{name} {result['status']}", ("secret",)
    )
    parser = argparse.ArgumentParser()
    zoo_run.add_arguments(parser, 30, tmp_path / "zoo.json")
    found = zoo_run.run_all(question, zoo, parser.parse_args(["--only", "a"]))
    assert set(found) == {"a", "crashes"}  # whose names contain an a
    capsys.readouterr()
    assert list(zoo_run.run_all(question, zoo, parser.parse_args([]))) == ["a", "b", "crashes"]
    told = capsys.readouterr().err.splitlines()
    assert told == [
        "1 networks skipped: no_such_package is not installed",
        "[2/3] b fine",
        "[3/3] crashes crash",
    ]
    kept = json.loads((tmp_path / "zoo.json").read_text())
    assert kept["question"] == "Why?"
    assert kept["networks"]["b"]["name"] == "b"
    assert "secret" not in kept["networks"]["b"]
    assert [path.name for path in tmp_path.iterdir()] == ["zoo.json"]
