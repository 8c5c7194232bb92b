"""Units in local processes: a new one for each unit, so that a death takes nothing else along."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
import traceback
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from momentprop_reproduction.running.executors import RETRIES, Executor, UnitProgress
from momentprop_reproduction.running.units import Job, write_bytes, write_json

_RAISED = 3  # exit status of a process whose unit raised
_SECONDS = 0.5  # between two looks


class Processes(Executor):
    """Runs each unit in a process of its own, at most `workers` at a time."""

    def __init__(self, workers: int, progress: UnitProgress | None) -> None:
        self.capacity = workers
        self.progress = progress
        self.running: dict[str, tuple[Job, BaseProcess, int]] = {}  # with the number of deaths

    def start(self, job: Job, deaths: int = 0) -> None:
        job.folder.mkdir(parents=True, exist_ok=True)
        error_file(job).unlink(missing_ok=True)
        # spawn: a forked child would share the parent's thread pools in an unknown state
        process = multiprocessing.get_context("spawn").Process(target=_child, args=(job,), daemon=True)
        process.start()
        self.running[job.unit.name] = (job, process, deaths)

    def wait(self) -> list[tuple[Job, str]]:
        wait([process.sentinel for _, process, _ in self.running.values()], timeout=_SECONDS)
        ended = []
        for job, process, deaths in list(self.running.values()):
            if self.progress is not None:
                pass_on_progress(job, self.progress)
            if process.is_alive():
                continue
            process.join()
            del self.running[job.unit.name]
            status = process.exitcode or 0
            if status == 0:
                ended.append((job, ""))
            elif status == _RAISED:
                ended.append((job, error_file(job).read_text(encoding="utf-8")))
            elif deaths < RETRIES:
                self.start(job, deaths + 1)
            else:
                ended.append((job, f"its process died {deaths + 1} times, the last time {_cause(status)}"))
        return ended

    def close(self) -> None:
        processes = [process for _, process, _ in self.running.values()]
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        self.running.clear()


def error_file(job: Job) -> Path:
    return job.folder / "error.txt"


def progress_file(job: Job) -> Path:
    return job.folder / "progress.json"


def pass_on_progress(job: Job, progress: UnitProgress) -> None:
    """Read what the process last wrote. A file: a queue's lock would die with a killed process."""
    try:
        done, total, label = json.loads(progress_file(job).read_bytes())
    except OSError:
        return  # nothing said yet
    progress(job.unit.name, done, total, label)


def perform_writing(job: Job) -> str:
    """Perform a job in a process of its own; progress goes to a file. Returns the traceback, if it raises."""
    last = 0.0

    def report(done: float, total: float, label: str) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= _SECONDS or done >= total:
            last = now
            write_json(progress_file(job), [done, total, label])

    try:
        job.perform(report)
    except Exception:  # whatever a unit raises is reported with the others
        return traceback.format_exc()
    finally:
        progress_file(job).unlink(missing_ok=True)
    return ""


def _child(job: Job) -> None:
    # Ctrl-C reaches all processes at once; the parent decides, and stops this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if failure := perform_writing(job):
        write_bytes(error_file(job), failure.encode())
        raise SystemExit(_RAISED)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _cause(status: int) -> str:
    if status > 0:
        return f"with exit status {status}"
    if -status == signal.SIGKILL:
        return "killed by SIGKILL (often: out of memory; try fewer workers)"
    return f"by {signal.Signals(-status).name}"
