"""Prepares for ONNX files: checks packages, keeps the exporter quiet, opens sessions of ONNX Runtime."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from momentprop.errors import MissingExtraError


def check_onnx(runtime: bool = True) -> None:
    """Raise if the packages that write files, or the one that runs them, are missing."""
    for package in ("onnx", "onnxscript", *(["onnxruntime"] if runtime else [])):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "onnx")


@contextmanager
def silent_exporter() -> Iterator[None]:
    """Silence the exporter's log messages about missing packages and about what is left as it is."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def open_session(path: Path, threads: int = 0, arena: bool = True) -> Any:
    """Open a file in ONNX Runtime on the CPU.

    Args:
        threads: how many share an operator; 0: one per core.
        arena: keep memory for the next call; without, the peak of its memory can be seen.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = options.enable_mem_pattern = arena
    # between calls threads would go on spinning, and take the cores from whatever else runs
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
