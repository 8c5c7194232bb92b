"""Tells how much of a run is done, and when it will end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


class Forecast:
    """Remaining time by the work done so far: remaining work x elapsed time / work done.

    Args:
        work: of every unit that is to run, in any one unit of time.
        clock: seconds since whenever.

    >>> now = iter([0.0, 10.0])
    >>> forecast = Forecast({"a": 2.0, "b": 6.0}, clock=lambda: next(now))
    >>> forecast.update("a", 1.0)
    >>> forecast.fraction, forecast.remaining()
    (0.25, 30.0)
    """

    def __init__(self, work: Mapping[str, float], clock: Callable[[], float] = time.monotonic) -> None:
        self.work = dict(work)
        self.done = dict.fromkeys(work, 0.0)
        self.found: dict[str, float] = {}  # done before this run: a unit that resumes begins in its middle
        self.clock = clock
        self.start = clock()

    def update(self, name: str, fraction: float) -> None:
        """`fraction` of a unit is done. The first word of a unit that is not its last says where it began."""
        self.found.setdefault(name, fraction if fraction < 1 else 0.0)
        self.done[name] = fraction

    @property
    def fraction(self) -> float:
        """Return the share of the work that is done, including what an earlier run did of these units."""
        return self._sum(self.done) / sum(self.work.values())

    def remaining(self) -> float | None:
        """Seconds, or None before anything was done."""
        worked = self._sum(self.done) - self._sum(self.found)
        if worked <= 0:
            return None
        return (sum(self.work.values()) - self._sum(self.done)) * (self.clock() - self.start) / worked

    def _sum(self, fractions: Mapping[str, float]) -> float:
        return sum(self.work[name] * fraction for name, fraction in fractions.items())
