"""Progress of a run of several units, on stderr: bars on a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from momentprop_reproduction.cli.forecast import Forecast

_LOG_EVERY = 60.0  # seconds between two lines of a log


class UnitBars:
    """A context manager, called as (unit, done, total, label).

    The first bar is the whole run with its remaining time; below it stand the units that run now.
    """

    def __init__(self, title: str, work: Mapping[str, float], console: Console | None = None) -> None:
        self.forecast = Forecast(work)
        self.title = title
        self.console = console or Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
        self.progress = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self.whole = self.progress.add_task(title, total=1.0, note="")
        self.tasks: dict[str, TaskID] = {}
        self.finished: set[str] = set()
        self.logged = time.monotonic()

    def __enter__(self) -> UnitBars:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def __call__(self, name: str, done: float, total: float, label: str) -> None:
        fraction = done / total if total > 0 else 0.0
        ended = label == "finished"
        # a unit that has done all it counts may still be writing
        self.forecast.update(name, 1.0 if ended else min(fraction, 0.999))
        if ended:
            self.finished.add(name)
        note = self._note()
        self.progress.update(self.whole, completed=self.forecast.fraction, note=note)
        self._bar(name, fraction, label, ended)
        if not self.console.is_terminal and (ended or time.monotonic() - self.logged > _LOG_EVERY):
            self.logged = time.monotonic()
            self.console.print(f"{self.title}: {name} {label} {fraction:.0%}; {note}", markup=False)

    def _bar(self, name: str, fraction: float, label: str, ended: bool) -> None:
        if ended:
            if name in self.tasks:
                self.progress.remove_task(self.tasks.pop(name))
            return
        if name not in self.tasks:
            self.tasks[name] = self.progress.add_task(f"  {name}", total=1.0, note="")
        self.progress.update(self.tasks[name], completed=fraction, note=label)

    def _note(self) -> str:
        left = self.forecast.remaining()
        when = "" if left is None else f", {timedelta(seconds=round(left))} left"
        count = f"{len(self.finished)}/{len(self.forecast.work)} units"
        return f"{self.forecast.fraction:.0%}, {count}{when}"
