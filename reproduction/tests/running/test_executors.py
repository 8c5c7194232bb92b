"""Executors: the same results to the last digit, deaths survived, failures named, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import work
from momentprop_reproduction.running.executors import UnitsFailedError, run_units
from momentprop_reproduction.running.units import Job, Unit

needs_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason="Ray is not installed: pip install 'momentprop-reproduction[ray]'"
)
ELSEWHERE: Any = [
    pytest.param({"workers": 2}, id="processes"),
    pytest.param({"workers": 2, "engine": "ray"}, id="ray", marks=needs_ray),
]
EVERYWHERE: Any = [pytest.param({}, id="in-process"), *ELSEWHERE]


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    import ray

    from momentprop_reproduction.running.cluster import RayCluster

    ray.init(**RayCluster._options(workers=2, threads=1))
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def _one_ray_for_all(request: pytest.FixtureRequest) -> None:
    """A local Ray of two CPUs takes seconds to start."""
    where = request.node.callspec.params.get("where", {}) if hasattr(request.node, "callspec") else {}
    if where.get("engine") == "ray" and "command" not in request.fixturenames:
        request.getfixturevalue("local_ray")


def trainings() -> list[Unit]:
    units = [Unit(f"train-{seed}", partial(work.train, work.Settings(), seed, None)) for seed in range(3)]
    names = [unit.name for unit in units]
    return [Unit("evaluate", partial(work.evaluate, names=names), needs=tuple(units)), *units]


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    torch.rand(11)  # what the process did before must not matter
    return run_units(trainings(), tmp_path_factory.mktemp("units"))


@pytest.mark.parametrize("where", ELSEWHERE)
def test_same_results_to_the_last_digit(
    where: dict[str, Any], in_process: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    calls: list[tuple[Any, ...]] = []
    results = run_units(trainings(), tmp_path, progress=lambda *args: calls.append(args), **where)
    assert results == in_process
    assert list(results) == ["evaluate", "train-0", "train-1", "train-2"]
    finished = [name for name, *_, label in calls if label == "finished"]
    assert sorted(finished) == sorted(results)
    assert finished[-1] == "evaluate"  # after what it needs


@pytest.mark.parametrize("where", ELSEWHERE)
def test_a_killed_workers_unit_is_retried(where: dict[str, Any], tmp_path: Path) -> None:
    units = [Unit("dies", partial(work.die_first, times=2)), trainings()[1]]
    results = run_units(units, tmp_path, **where)
    assert results["dies"] == {"deaths": 2}


@pytest.mark.parametrize("where", ELSEWHERE)
def test_a_unit_that_always_dies_is_named_and_the_others_finish(
    where: dict[str, Any], tmp_path: Path
) -> None:
    units = [Unit("dies", partial(work.die_first, times=100)), trainings()[1]]
    with pytest.raises(UnitsFailedError, match=r"dies: its process died 3 times") as error:
        run_units(units, tmp_path, **where)
    assert list(error.value.failures) == ["dies"]
    assert Job(units[1], tmp_path).record() is not None


@pytest.mark.parametrize("where", EVERYWHERE)
def test_all_failures_at_once(where: dict[str, Any], tmp_path: Path) -> None:
    bad = [Unit(f"bad-{i}", partial(work.fail, message=f"message {i}")) for i in range(2)]
    after = Unit("after", partial(work.evaluate, names=["bad-0"]), needs=(bad[0],))
    last = Unit("last", partial(work.evaluate, names=["after"]), needs=(after,))
    good = trainings()[1]
    with pytest.raises(UnitsFailedError, match="the others are finished and on disk") as error:
        run_units([last, *bad, Unit("nan", work.no_json), good], tmp_path, **where)
    failures = error.value.failures
    assert set(failures) == {"bad-0", "bad-1", "after", "last", "nan"}
    assert "RuntimeError: message 1" in failures["bad-1"]
    assert failures["after"] == "not run, since it needs bad-0"
    assert failures["last"] == "not run, since it needs after"
    assert Job(good, tmp_path).record() is not None


@pytest.mark.parametrize("where", ELSEWHERE)
def test_progress_comes_from_the_other_process(where: dict[str, Any], tmp_path: Path) -> None:
    calls: list[tuple[Any, ...]] = []
    run_units(
        [Unit("s", partial(work.sleep, seconds=1.5))],
        tmp_path,
        progress=lambda *args: calls.append(args),
        **where,
    )
    assert ("s", 1, 4, "asleep") in calls
    assert calls[-1] == ("s", 1, 1, "finished")


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """A process group of its own, as a shell makes it, that runs one short and some long units."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, json, work\n"
        "from functools import partial\n"
        "from pathlib import Path\n"
        "from momentprop_reproduction.running.executors import run_units\n"
        "from momentprop_reproduction.running.units import Unit\n"
        "def main():\n"
        "    where = json.loads(sys.argv[1])\n"
        "    units = [Unit('short', partial(work.sleep, seconds=0.0)),\n"
        "             Unit('long', partial(work.sleep, seconds=600.0)),\n"
        "             Unit('other', partial(work.sleep, seconds=601.0))]\n"
        "    try:\n"
        "        run_units(units, Path(sys.argv[2]), **where)\n"
        "    except KeyboardInterrupt:\n"
        "        sys.exit(130)\n"
        "if __name__ == '__main__':\n"
        "    main()\n"
    )
    started = []

    def start(where: dict[str, Any], folder: Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(script), json.dumps(where), str(folder)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
            start_new_session=True,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def pid_of(folder: Path, name: str, seconds: float = 300.0) -> int:
    """Of the process that runs the unit, once it does."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for file in folder.glob(f"{name}-*/pid"):
            if text := file.read_text():
                return int(text)
        time.sleep(0.1)
    raise AssertionError(f"{name} did not start")


def ends(pid: int, seconds: float = 20.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return True
        if state == "Z":  # ended; whoever inherited it has not looked yet
            return True
        time.sleep(0.1)
    return False


@pytest.mark.skipif(not Path("/proc").exists(), reason="process states are read from /proc")
@pytest.mark.parametrize("where", EVERYWHERE)
def test_ctrl_c_keeps_finished_units_and_leaves_no_process(
    where: dict[str, Any], tmp_path: Path, command: Callable[..., subprocess.Popen[str]]
) -> None:
    folder = tmp_path / "units"
    process = command(where, folder)
    pid = pid_of(folder, "long")
    until = time.monotonic() + 300
    while not list(folder.glob("short-*/result.json")) and time.monotonic() < until:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert ends(pid)
    assert len(list(folder.glob("short-*/result.json"))) == 1
    assert not list(folder.glob("long-*/result.json"))


@pytest.mark.skipif(not Path("/proc").exists(), reason="process states are read from /proc")
def test_workers_end_when_their_parent_is_killed(
    tmp_path: Path, command: Callable[..., subprocess.Popen[str]]
) -> None:
    folder = tmp_path / "units"
    process = command({"workers": 2}, folder)
    pid = pid_of(folder, "long")
    process.kill()
    assert ends(pid)


def test_two_different_units_of_one_name_are_refused(tmp_path: Path) -> None:
    units = [Unit("a", partial(work.sleep, seconds=s)) for s in (0.0, 1.0)]
    with pytest.raises(ValueError, match="two different units are named 'a'"):
        run_units(units, tmp_path)


def test_unknown_engines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="engine must be one of local, ray, not 'spark'"):
        run_units(trainings(), tmp_path, engine="spark")


def test_without_ray_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'momentprop-reproduction\[ray\]'"):
        run_units(trainings(), tmp_path, engine="ray")
