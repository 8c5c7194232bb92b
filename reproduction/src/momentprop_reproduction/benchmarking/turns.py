"""Times several functions side by side, so that a busy machine hits all of them alike."""

from __future__ import annotations

import ctypes
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

_TURN = 0.02  # seconds, or one call if that is longer
_WARM_UP = 3  # calls, or one if that takes longer than a second


@dataclass(frozen=True)
class Times:
    """Holds the seconds of single calls."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def p99(self) -> float:
        """The 99th percentile by nearest rank: of fewer than 100 calls the longest.

        >>> Times(tuple(range(1, 201))).p99, Times((1.0, 3.0, 2.0)).p99
        (198, 3.0)
        """
        return sorted(self.seconds)[math.ceil(0.99 * len(self.seconds)) - 1]


def take_turns(
    functions: Mapping[str, Callable[[], object]],
    seconds: float,
    least_rounds: int = 5,
    progress: Callable[[float], None] | None = None,
) -> dict[str, Times]:
    """Times of each function; they alternate, so that noise hits all of them alike.

    A turn is a few calls in a row, as in use: as many as fit into 20 ms. The first of them is not counted,
    since memory and caches are still as the function before left them; where one call takes longer than a
    turn that hardly matters, and it is counted.

    Args:
        functions: what to call, by name.
        seconds: for all of them together, warm-up not included.
        least_rounds: so often each has a turn, however long that takes.
        progress: told the fraction done.
    """
    found: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        for _ in range(_WARM_UP):
            if _timed(function) > 1:
                break
    start, rounds = time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < seconds or rounds < least_rounds:
        if progress is not None:
            progress(min(spent / seconds if seconds else 1.0, (rounds + 1) / least_rounds, 1.0))
        for name, function in functions.items():
            found[name] += _turn(function)
        rounds += 1
    return {name: Times(tuple(values)) for name, values in found.items()}


def _turn(function: Callable[[], object]) -> Sequence[float]:
    end = time.perf_counter() + _TURN
    first = _timed(function)
    if first > _TURN:
        return [first]
    times = [_timed(function)]
    while time.perf_counter() < end:
        times.append(_timed(function))
    return times


def _timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def keep_freed_memory() -> None:
    """Let glibc keep freed memory, as the allocators used for serving do; elsewhere nothing happens.

    By default it returns large buffers to the system after every call, and the page faults to get them back
    can cost as much as the network at large batches, for one method more than for another.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:
        return
    m_trim_threshold, m_mmap_threshold = -1, -3
    libc.mallopt(m_trim_threshold, 2**30)
    libc.mallopt(m_mmap_threshold, 2**30)
