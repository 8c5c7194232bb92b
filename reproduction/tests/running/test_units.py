"""Units: their settings, files that are whole or absent, and what is reused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import work
from momentprop_reproduction.running.executors import run_units
from momentprop_reproduction.running.units import Job, Unit, Workspace, write_json


def unit(seed: int = 0, size: int = 4, where: Path | None = None, name: str = "a") -> Unit:
    return Unit(name, partial(work.train, work.Settings(size), seed, where))


def test_settings_are_what_is_bound_whichever_way() -> None:
    by_name = Unit("a", partial(work.train, seed=0, settings=work.Settings(4), where=None))
    assert unit().settings == {"settings": {"size": 4, "rates": [0.1, 0.2]}, "seed": 0}
    assert by_name.settings == unit().settings
    assert by_name.digest == unit().digest


def test_where_things_lie_is_no_setting(tmp_path: Path) -> None:
    assert unit(where=tmp_path).digest == unit().digest


def test_other_settings_have_another_folder() -> None:
    assert len({unit().folder_name, unit(seed=1).folder_name, unit(size=5).folder_name}) == 3


def test_what_a_unit_needs_belongs_to_its_settings() -> None:
    def after(seed: int) -> Unit:
        return Unit("b", partial(work.evaluate, names=["a"]), needs=(unit(seed),))

    assert after(0).digest == after(0).digest
    assert after(0).digest != after(1).digest


def test_settings_that_json_does_not_know_are_refused() -> None:
    with pytest.raises(TypeError, match="must be JSON-able"):
        _ = Unit("a", partial(work.fail, message=torch.zeros(1))).digest


def test_checkpoints_come_back(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    assert workspace.load("net") is None
    tensors = {"w": torch.randn(3, 2).T, "n": torch.tensor(7)}
    workspace.save("net", tensors, epoch=12, best={"nll": 0.5})
    loaded = workspace.load("net")
    assert loaded is not None
    for key, tensor in tensors.items():
        assert torch.equal(loaded[key], tensor)
    assert workspace.load_meta("net") == {"epoch": 12, "best": {"nll": 0.5}}


def test_a_file_is_whole_or_as_before(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    write_json(file, {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(file, {"a": float("nan")})
    assert json.loads(file.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [file]


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "result.json"
    write_json(file, {"a": 1})

    def half(self: Path, data: bytes) -> int:
        with self.open("wb") as stream:
            stream.write(data[: len(data) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(KeyboardInterrupt):
        write_json(file, {"a": 2})
    assert json.loads(file.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [file]


def test_the_record(tmp_path: Path) -> None:
    job = Job(unit(seed=5), tmp_path)
    assert job.record() is None
    job.perform()
    record = job.record()
    assert record is not None
    assert record["name"] == "a"
    assert record["settings"]["seed"] == 5
    assert record["seconds"] > 0
    assert {"momentprop", "python", "torch"} <= set(record["versions"])
    assert record["result"]["threads"] == record["threads"] == 1
    assert str(tmp_path) not in job.result_file.read_text()


def test_the_callers_threads_and_random_state_stay(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    before = torch.get_rng_state()
    Job(unit(), tmp_path).perform()
    assert torch.get_num_threads() == 2
    assert torch.equal(before, torch.get_rng_state())


def test_finished_units_are_not_run_again(tmp_path: Path) -> None:
    calls: list[Any] = []
    for _ in range(2):
        run_units([unit()], tmp_path, progress=lambda *args: calls.append(args))
    assert calls == [("a", i, 3, "epochs") for i in (1, 2, 3)] + [("a", 1, 1, "finished")]


def test_a_result_of_other_settings_is_not_reused(tmp_path: Path) -> None:
    first = run_units([unit(seed=0)], tmp_path)
    other = run_units([unit(seed=1)], tmp_path)
    assert first["a"]["sum"] != other["a"]["sum"]
    assert run_units([unit(seed=0)], tmp_path) == first
