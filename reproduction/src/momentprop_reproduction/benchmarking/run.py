"""One run of the benchmark: every method in every runtime, for every batch size and number of threads."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from momentprop_reproduction.benchmarking import private
from momentprop_reproduction.benchmarking.memory import peaks
from momentprop_reproduction.benchmarking.methods import PLAIN, Method
from momentprop_reproduction.benchmarking.programs import Setting
from momentprop_reproduction.benchmarking.rows import Result, Row
from momentprop_reproduction.benchmarking.runtimes import RUNTIMES, Call, prepare
from momentprop_reproduction.benchmarking.subject import Subject
from momentprop_reproduction.benchmarking.turns import keep_freed_memory, take_turns
from momentprop_reproduction.benchmarking.work import work_of
from momentprop_reproduction.running.timing import torch_threads

Progress = Callable[[str, float, float, str], None]  # unit, done, total, what is being done
_PREPARE = {"eager": 2.0, "compiled": 2.0, "aot": 40.0, "onnx": 8.0}  # seconds per method, for the forecast
_COMPILE = {"compiled": 15.0}  # and once more for every batch size
_BUSY = 0.9  # of a core: a process that has less is held up by others
_MEMORY = {"eager": 8.0, "compiled": 30.0, "aot": 8.0, "onnx": 8.0}


@dataclass(frozen=True)
class Plan:
    """Says what to measure."""

    methods: tuple[Method, ...]
    batches: tuple[int, ...] = (1, 8, 32, 256)
    threads: tuple[int, ...] = (1, 2)
    runtimes: tuple[str, ...] = RUNTIMES
    seconds: float = 10.0  # for all methods of one runtime, batch size and number of threads
    least_rounds: int = 5
    memory: bool = True
    backend: str = "inductor"

    def __post_init__(self) -> None:
        if unknown := [name for name in self.runtimes if name not in RUNTIMES]:
            raise ValueError(f"runtimes are {', '.join(RUNTIMES)}, not {', '.join(unknown)}")
        if any(n < 1 for n in (*self.batches, *self.threads)) or not self.batches or not self.threads:
            raise ValueError("batch sizes and numbers of threads must be at least 1")

    def units(self) -> dict[str, float]:
        """The parts of a run with a guess of their seconds."""
        n, found = len(self.methods), {}
        for threads in self.threads:
            for runtime in self.runtimes:
                found[_unit(threads, runtime)] = n * _PREPARE[runtime]
                for batch in self.batches:
                    found[_unit(threads, runtime, batch)] = self.seconds + n * _COMPILE.get(runtime, 0.5)
        for runtime in self.runtimes if self.memory else ():
            found[f"{runtime}, memory"] = n * _MEMORY[runtime]
        return found


def run(build: Callable[[], Subject], plan: Plan, progress: Progress, result: Result) -> Result:
    """Measure, filling `result`: what an interrupted run has measured is there.

    Args:
        build: makes the network; pickled for the processes in which memory is measured.
        plan: what to measure.
        progress: told (unit, done, total, what is being done), with units of `plan.units()`.
        result: from `start`.
    """
    keep_freed_memory()
    subject = build()
    for method in plan.methods:
        try:
            result.multiply_adds[method.name] = work_of(subject, method)
        except Exception:  # the reason is in the rows of this method
            result.multiply_adds[method.name] = None
    with tempfile.TemporaryDirectory(prefix="momentprop-bench-") as folder:
        for threads in plan.threads:
            setting = Setting(threads, Path(folder), plan.backend)
            # this cache knows our operators by name alone: it would give what they were when it was filled
            with torch_threads(threads), private.without_autograd_cache():
                for runtime in plan.runtimes:
                    _measure(subject, plan, runtime, setting, progress, result)
        if plan.memory:
            # after the times: what was compiled for them is found in caches
            setting = Setting(plan.threads[0], Path(folder), plan.backend)
            for runtime in plan.runtimes:
                _weigh(build, plan, runtime, setting, progress, result)
    result.complete = True
    return result


def start(subject: Subject, plan: Plan) -> Result:
    """Make a result without rows."""
    settings = {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(plan).items()}
    settings["methods"] = [method.name for method in plan.methods]
    return Result(subject.name, subject.shapes, settings)


def _measure(
    subject: Subject, plan: Plan, runtime: str, setting: Setting, progress: Progress, result: Result
) -> None:
    calls: dict[str, Call] = {}
    errors: dict[str, str] = {}
    unit = _unit(setting.threads, runtime)
    for i, method in enumerate(plan.methods):
        progress(unit, i, len(plan.methods), f"preparing {method.name}")
        try:
            calls[method.name] = prepare(subject, method, runtime, setting)
        except Exception as error:
            errors[method.name] = _reason(error)
    progress(unit, 1, 1, "finished")
    for batch in plan.batches:
        unit = _unit(setting.threads, runtime, batch)
        x = subject.batch(batch)
        private.forget_compiled()  # otherwise code for other batch sizes counts against dynamo's limit
        with torch.no_grad(), private.static_shapes():
            failed = dict(errors)
            working: dict[str, Callable[[], object]] = {}
            for i, (name, call) in enumerate(calls.items()):
                progress(unit, 0.3 * i, len(calls), f"first call of {name}")
                try:
                    working[name] = _bound(call, x)
                    working[name]()  # compiles
                except Exception as error:
                    del working[name]
                    failed[name] = _reason(error)

            def tell(fraction: float, unit: str = unit) -> None:
                progress(unit, 0.3 + 0.7 * fraction, 1, "measuring")

            wall, core = time.perf_counter(), time.process_time()
            times = take_turns(working, plan.seconds, plan.least_rounds, tell) if working else {}
            share = (time.process_time() - core) / max(time.perf_counter() - wall, 1e-9)
        if times and share < _BUSY:
            result.notes.append(
                f"{unit}: this process had {share:.0%} of a core, others had the rest: short calls slip "
                "through between them and long ones do not, so these ratios are not to be trusted"
            )
        base = result.multiply_adds.get(PLAIN)
        for method in plan.methods:
            own = result.multiply_adds.get(method.name)
            limit = own / base if own and base else None
            row = Row(setting.threads, runtime, batch, method.name, limit, error=failed.get(method.name))
            if method.name in times:
                row.measured(times[method.name], times.get(PLAIN))
            result.rows.append(row)
        progress(unit, 1, 1, "finished")


def _weigh(
    build: Callable[[], Subject],
    plan: Plan,
    runtime: str,
    setting: Setting,
    progress: Progress,
    result: Result,
) -> None:
    unit = f"{runtime}, memory"
    for i, method in enumerate(plan.methods):
        rows = result.of(threads=setting.threads, runtime=runtime, method=method.name)
        batches = [row.batch for row in rows if row.error is None]
        progress(unit, i, len(plan.methods), method.name)
        if batches:
            try:
                found = peaks(build, method, runtime, setting, batches)
                result.add_memory(setting.threads, runtime, method.name, found)
            except RuntimeError as error:
                result.notes.append(f"peak memory of {method.name}, {runtime}: {_reason(error)}")
    progress(unit, 1, 1, "finished")


def _unit(threads: int, runtime: str, batch: int | None = None) -> str:
    place = f"{threads} thread{'s' * (threads > 1)}, {runtime}"
    return place if batch is None else f"{place}, batch {batch}"


def _bound(call: Call, x: tuple[Tensor, ...]) -> Callable[[], object]:
    return lambda: call(x)


def _reason(error: BaseException) -> str:
    """Return the first line of what an error says."""
    lines: Sequence[str] = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip() if lines else type(error).__name__
