"""Peak memory of one call, in a process of its own."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import multiprocessing
import resource
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from momentprop_reproduction.benchmarking import private
from momentprop_reproduction.benchmarking.methods import Method
from momentprop_reproduction.benchmarking.programs import Setting
from momentprop_reproduction.benchmarking.runtimes import prepare
from momentprop_reproduction.benchmarking.subject import Subject

_LIMIT = 900.0  # seconds for a process: it may have to compile
_RESET = Path("/proc/self/clear_refs")


def peaks(
    build: Callable[[], Subject], method: Method, runtime: str, setting: Setting, batches: Sequence[int]
) -> dict[int, int]:
    """Bytes that a call adds at its peak, by batch size; raises RuntimeError where that cannot be seen.

    `build` is called in the new process, and so are files of programs found there, if they have been made.
    """
    if not _RESET.exists():
        raise RuntimeError("the peak of a process's memory can be seen on Linux only")
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(
        target=_work, args=(send, build, method, runtime, dataclasses.replace(setting, arena=False), batches)
    )
    process.start()
    send.close()
    try:
        found = receive.recv() if receive.poll(_LIMIT) else f"no answer after {_LIMIT:.0f} s"
    except EOFError:
        found = "the process ended"
    finally:
        if process.is_alive():
            process.join(5)
            process.kill()
        process.join()
    if isinstance(found, str):
        raise RuntimeError(found)
    return dict(found)


def _work(
    send: Connection,
    build: Callable[[], Subject],
    method: Method,
    runtime: str,
    setting: Setting,
    batches: Sequence[int],
) -> None:
    try:
        torch.set_num_threads(setting.threads)
        with torch.no_grad(), private.static_shapes():
            subject = build()
            function = prepare(subject, method, runtime, setting)
            found = {}
            for batch in sorted(batches):
                x = subject.batch(batch)
                # what is compiled, or made on the first call, is not the call's; static code needs its size
                function(x if runtime == "compiled" else subject.batch(1))
                found[batch] = _added(lambda x=x: function(x))  # type: ignore[misc]
        send.send(found)
    except Exception as error:
        send.send("".join(traceback.format_exception_only(error)).strip())


def _added(function: Callable[[], object]) -> int:
    """Return the bytes above what the process held before."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    _RESET.write_text("5")  # the peak begins anew
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    function()
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    return max(0, peak - before)
