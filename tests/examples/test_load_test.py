"""examples/load_test.py: failures of clients are heard, and the service is stopped whatever happens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from scripts import script


@pytest.fixture
def example() -> Iterator[ModuleType]:
    with script("examples/load_test.py") as module:
        yield module


class Process:
    """Stands for the service."""

    def __init__(self, command: list[str]) -> None:
        self.stopped = False

    def poll(self) -> None:
        return None

    def terminate(self) -> None:
        self.stopped = True

    def wait(self, timeout: float | None = None) -> int:
        return 0


@pytest.mark.parametrize("problem", [ConnectionResetError("gone"), 503])
def test_one_client_that_fails_is_heard(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, problem: Any
) -> None:
    calls = itertools.count()

    def ask(*_: object) -> int:
        if next(calls) != 5:
            return 200
        if isinstance(problem, Exception):
            raise problem
        return int(problem)

    monkeypatch.setattr(example, "ask", ask)
    with pytest.raises(RuntimeError, match=r"ConnectionResetError: gone|status 503"):
        example.load(1, 1, 2, 0.05)


def test_an_interrupted_start_stops_the_service(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(example.subprocess, "Popen", Process)
    monkeypatch.setattr(example, "ask", interrupted)
    server = example.Server(Path("model.onnx"), 1)
    with pytest.raises(KeyboardInterrupt):
        server.__enter__()
    assert server.process.stopped


def test_a_service_that_is_not_ready_is_asked_again_after_a_while(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    statuses = iter([503, 503, 200])
    monkeypatch.setattr(example.subprocess, "Popen", Process)
    monkeypatch.setattr(example, "ask", lambda *_: next(statuses))
    monkeypatch.setattr(example.time, "sleep", slept.append)
    with example.Server(Path("model.onnx"), 1):
        assert len(slept) == 2
