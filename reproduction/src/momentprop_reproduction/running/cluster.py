"""Units on a Ray cluster.

With the environment variable RAY_ADDRESS the cluster there is used; its machines need this package and must
all see the units' folder. Without it a Ray is started on this machine and stopped at the end.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from momentprop.errors import MissingExtraError
from momentprop_reproduction.running.executors import RETRIES, Executor, UnitProgress
from momentprop_reproduction.running.processes import pass_on_progress, perform_writing
from momentprop_reproduction.running.units import Job

_SECONDS = 0.5  # between two looks


class RayCluster(Executor):
    """Runs as many units at a time as the cluster has CPUs for; Ray repeats one whose process died."""

    def __init__(self, workers: int, threads: int, progress: UnitProgress | None) -> None:
        try:
            import ray
        except ImportError as error:
            raise MissingExtraError("ray", "ray", "momentprop-reproduction") from error
        self.ray: Any = ray
        self.progress = progress
        self.started = not ray.is_initialized()
        if self.started:
            ray.init(**self._options(workers, threads))
        self.capacity = sys.maxsize  # Ray queues what it has no CPU for
        self.run = ray.remote(num_cpus=threads, max_retries=RETRIES, retry_exceptions=False)(perform_writing)
        self.running: dict[Any, Job] = {}

    @staticmethod
    def _options(workers: int, threads: int) -> dict[str, Any]:
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
        if not os.environ.get("RAY_ADDRESS"):
            options["include_dashboard"] = False
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # reports of use, over the network
            options["num_cpus"] = workers * threads if workers else None
            # what this process can import, the processes beside it can too
            path = os.pathsep.join(entry for entry in sys.path if entry)
            options["runtime_env"] = {"env_vars": {"PYTHONPATH": path}}
        return options

    def start(self, job: Job) -> None:
        job.folder.mkdir(parents=True, exist_ok=True)
        self.running[self.run.remote(job)] = job

    def wait(self) -> list[tuple[Job, str]]:
        ready, _ = self.ray.wait(list(self.running), num_returns=1, timeout=_SECONDS)
        if self.progress is not None:
            for job in self.running.values():
                pass_on_progress(job, self.progress)
        ended = []
        for reference in ready:
            job = self.running.pop(reference)
            try:
                failure = self.ray.get(reference)
            except self.ray.exceptions.WorkerCrashedError:
                failure = f"its process died {RETRIES + 1} times (often: out of memory)"
            except self.ray.exceptions.RayError as error:
                failure = str(error)
            ended.append((job, failure))
        return ended

    def close(self) -> None:
        for reference in self.running:
            self.ray.cancel(reference, force=True)
        self.running.clear()
        if self.started:
            self.ray.shutdown()
