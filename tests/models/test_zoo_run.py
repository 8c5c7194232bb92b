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


@pytest.mark.parametrize("workers", [1, 3])
def test_a_hang_or_a_crash_is_a_result_and_leaves_no_process(zoo_run: ModuleType, workers: int) -> None:
    found = dict(zoo_run.run_each(["hangs", "good", "crashes"], examine, 2, workers))
    assert found["good"]["name"] == "good"
    assert found["hangs"] == {"status": "time limit", "cause": "more than 2 s"}
    assert found["crashes"] == {"status": "crash", "cause": "exit code 3"}
    assert not multiprocessing.active_children()


def test_an_interruption_leaves_no_process(zoo_run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(connections: object, timeout: float) -> list[object]:
        raise KeyboardInterrupt

    monkeypatch.setattr(zoo_run, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(zoo_run.run_each(["hangs", "hangs"], examine, 30, 2))
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
