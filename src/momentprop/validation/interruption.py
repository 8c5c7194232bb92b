"""Lets Ctrl-C act only between two steps of a long loop, so that sums are never left half updated."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def between_steps() -> Iterator[Callable[[], None]]:
    """Yield check(), which raises KeyboardInterrupt if Ctrl-C was pressed; a second one acts at once.

    Where somebody else handles SIGINT, or this is not the main thread, nothing is changed.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    asked = False

    def note(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    def check() -> None:
        if asked:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
