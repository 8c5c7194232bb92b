"""Keeps a thread from warning and logging, while all others do as ever.

`warnings.catch_warnings` and a disabled logger would silence the whole process; and where two threads use the
former by turns, the filters of one can be left in force for good.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Iterator
from typing import Any, cast

# Where torch.export fails, on a branch on values or on shapes, these tell at length what the error says too.
_LOGGERS = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")


class _Here(logging.Filter):
    """Matches what one thread warns of, if it begins so, and lets all log but that thread."""

    def __init__(self, start: str) -> None:
        super().__init__()
        self.start, self.thread = start, cast("int | None", threading.get_ident())

    def match(self, text: str) -> bool:
        """Answer what `warnings` asks the regular expression that otherwise stands in a filter."""
        return self.thread == threading.get_ident() and text.startswith(self.start)

    def filter(self, record: logging.LogRecord) -> bool:
        return self.thread != threading.get_ident()


@contextlib.contextmanager
def silent(start: str = "") -> Iterator[None]:
    """Ignore this thread's warnings that begin so."""
    here = _Here(start)
    entry: Any = ("ignore", here, Warning, None, 0)
    filters: Any = warnings.filters
    filters.insert(0, entry)
    try:
        yield
    finally:
        here.thread = None  # a block of another thread's may have kept a copy of the list
        with contextlib.suppress(ValueError):
            cast(Any, warnings.filters).remove(entry)


@contextlib.contextmanager
def speechless() -> Iterator[None]:
    """Neither warn nor log from this thread."""
    here = _Here("")
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addFilter(here)
    try:
        with silent():
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(here)
