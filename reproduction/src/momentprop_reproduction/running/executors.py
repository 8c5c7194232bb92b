"""Run units: in this process, in several local processes, or on a Ray cluster, with the same results.

Finished units are on disk and are not run again. A unit whose process dies (killed, out of memory) is tried
again; one that raises is not, since it would raise again. Either way the other units still run, and the
error at the end names all that failed.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from momentprop.errors import MomentpropError
from momentprop_reproduction.running.units import Job, Unit

RETRIES = 2  # after a process died
ENGINES = ("local", "ray")

UnitProgress = Callable[[str, float, float, str], None]
"""Called as progress(unit name, done, total, label)."""


class UnitsFailedError(MomentpropError):
    """Some units failed. `failures` has the reason of each, by name."""

    def __init__(self, failures: dict[str, str]) -> None:
        self.failures = failures
        listing = "\n\n".join(f"{name}: {reason.rstrip()}" for name, reason in failures.items())
        super().__init__(
            f"{len(failures)} unit(s) of work failed; the others are finished and on disk, "
            f"and the same command runs only these again.\n\n{listing}"
        )


class Executor(ABC):
    """Runs jobs somewhere. `start` is called at most `capacity` times before one of them ends."""

    capacity: int = 1

    @abstractmethod
    def start(self, job: Job) -> None:
        """Begin a job."""

    @abstractmethod
    def wait(self) -> list[tuple[Job, str]]:
        """The jobs that have ended, each with the reason of its failure or ""; after half a second, none."""

    @abstractmethod
    def close(self) -> None:
        """Stop what still runs."""


class InProcess(Executor):
    """Runs one job after the other, in this process."""

    def __init__(self, progress: UnitProgress | None) -> None:
        self.progress = progress
        self.job: Job | None = None

    def start(self, job: Job) -> None:
        self.job = job

    def wait(self) -> list[tuple[Job, str]]:
        assert self.job is not None
        job, progress = self.job, self.progress
        try:
            job.perform(None if progress is None else partial(progress, job.unit.name))
        except Exception:  # whatever a unit raises is reported with the others
            return [(job, traceback.format_exc())]
        return [(job, "")]

    def close(self) -> None:
        pass


def run_units(
    units: Sequence[Unit],
    folder: Path,
    *,
    workers: int = 0,
    engine: str = "local",
    threads: int = 1,
    progress: UnitProgress | None = None,
) -> dict[str, dict[str, Any]]:
    """Run what is not finished yet, and return every unit's result by name.

    Args:
        units: the work, in the order in which to start it; what a unit needs is run before it.
        folder: where the units keep their files. With Ray on several machines, one that all of them see.
        workers: number of processes; 0 means this process. With Ray, the CPUs of a local Ray.
        engine: "local", or "ray" for the cluster that RAY_ADDRESS names, else a Ray on this machine.
        threads: per unit.
        progress: told how far each unit is. Units finished earlier are not mentioned.

    Raises:
        UnitsFailedError: after all other units were run.
    """
    jobs = {unit.name: Job(unit, Path(folder).resolve(), threads) for unit in all_units(units)}
    waiting = [job for job in jobs.values() if job.record() is None]
    if waiting:
        executor = _executor(engine, workers, threads, progress)
        try:
            _run(waiting, executor, progress)
        finally:
            executor.close()
    return {unit.name: jobs[unit.name].record()["result"] for unit in units}  # type: ignore[index]


def records(units: Sequence[Unit], folder: Path) -> list[dict[str, Any]]:
    """Read what these units and those they need wrote, if finished: settings, versions, seconds, result."""
    jobs = [Job(unit, Path(folder)) for unit in all_units(units)]
    return [record for job in jobs if (record := job.record()) is not None]


def unfinished(units: Sequence[Unit], folder: Path) -> list[Unit]:
    """List those of these units, and of those they need, that `run_units` would run."""
    return [unit for unit in all_units(units) if Job(unit, Path(folder)).record() is None]


def _run(waiting: list[Job], executor: Executor, progress: UnitProgress | None) -> None:
    open_names = {job.unit.name for job in waiting}
    failures: dict[str, str] = {}
    running = 0
    while waiting or running:
        for job in list(waiting):
            needs = {need.name for need in job.unit.needs}
            if lost := sorted(needs & failures.keys()):
                failures[job.unit.name] = f"not run, since it needs {', '.join(lost)}"
                waiting.remove(job)
            elif running < executor.capacity and not needs & open_names:
                executor.start(job)
                waiting.remove(job)
                running += 1
        if not running:
            continue  # what waited needs something that failed
        for job, failure in executor.wait():
            running -= 1
            open_names.discard(job.unit.name)
            if failure:
                failures[job.unit.name] = failure
            elif progress is not None:
                progress(job.unit.name, 1, 1, "finished")
    if failures:
        raise UnitsFailedError(failures)


def all_units(units: Sequence[Unit]) -> list[Unit]:
    """List every unit once, and before it those it needs."""
    found: dict[str, Unit] = {}

    def add(unit: Unit) -> None:
        for need in unit.needs:
            add(need)
        if found.setdefault(unit.name, unit).digest != unit.digest:
            raise ValueError(f"two different units are named {unit.name!r}")

    for unit in units:
        add(unit)
    return list(found.values())


def _executor(engine: str, workers: int, threads: int, progress: UnitProgress | None) -> Executor:
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, not {engine!r}")
    if workers < 0 or threads < 1:
        raise ValueError(f"workers must be 0 or more and threads 1 or more, not {workers} and {threads}")
    if engine == "ray":
        from momentprop_reproduction.running.cluster import RayCluster

        return RayCluster(workers, threads, progress)
    if workers:
        from momentprop_reproduction.running.processes import Processes

        return Processes(workers, progress)
    return InProcess(progress)
