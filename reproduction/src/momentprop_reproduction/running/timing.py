"""Measures the wall time of several methods side by side, on a number of threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch


def best_seconds(calls: Mapping[str, Callable[[], object]], repeats: int = 7) -> dict[str, float]:
    """Shortest wall time of each call, after one call of each to warm up.

    The shortest, because other load on the machine only ever adds time. The calls take turns, so that
    none gets a quieter moment than the others.

    >>> sorted(best_seconds({"a": lambda: None, "b": lambda: None}))
    ['a', 'b']
    """
    for call in calls.values():
        call()
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


@contextmanager
def torch_threads(n: int) -> Iterator[None]:
    """Set torch's number of threads to n inside the block; afterwards it is as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)
