"""nn.Module + example inputs -> an exported program, dropout armed and the batch dynamic; or an error."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from momentprop.capture.arming import armed
from momentprop.capture.layerdrop import BranchByChanceError, chances_decided
from momentprop.capture.signature import flatten_output
from momentprop.errors import TraceError

_TORCH = inspect.getfile(torch).removesuffix("__init__.py")
PREFIX = "model."  # what wrapping puts before every name


class _Call(nn.Module):
    """The model as a module of two arguments (args, kwargs) that returns flat outputs."""

    def __init__(self, model: nn.Module, keep: Callable[[pytree.TreeSpec, list[type]], None]) -> None:
        super().__init__()
        self.model, self.keep = model, keep

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        left_out: list[type] = []
        leaves, spec = flatten_output(self.model(*args, **kwargs), left_out)
        self.keep(spec, left_out)
        return leaves


def export(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], disarm: frozenset[str]
) -> tuple[ExportedProgram, pytree.TreeSpec, list[type]]:
    """The program, the structure of its outputs, and the types of outputs that None stands for."""
    leaves = pytree.tree_leaves((args, kwargs))
    batch = next(v.shape[0] for v in leaves if isinstance(v, Tensor) and v.dim())

    def dynamic(leaf: Any) -> Any:
        return {0: Dim.AUTO} if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == batch else None

    kept: list[tuple[pytree.TreeSpec, list[type]]] = []
    call = _Call(model, lambda *outputs: kept.append(outputs))
    try:
        with (
            warnings.catch_warnings(),
            armed(model, disarm),
            chances_decided(model),
            _masks_as_given(),
            _quiet(),
            torch.no_grad(),
        ):
            warnings.simplefilter("ignore")
            program = torch.export.export(
                call, (args, kwargs), dynamic_shapes=pytree.tree_map(dynamic, (args, kwargs)), strict=False
            )
    except BranchByChanceError:
        raise
    except Exception as error:
        raise TraceError(_explain(model, error)) from error
    return program, *kept[-1]


@contextlib.contextmanager
def _masks_as_given() -> Iterator[None]:
    """torch.nn's transformers look whether a mask is causal, a branch on values; the mask itself will do."""
    module: Any = nn.modules.transformer
    detect = module._detect_is_causal_mask
    module._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        module._detect_is_causal_mask = detect


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Where torch.export fails on a branch it prints the whole graph, next to which no message is seen."""
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    disabled, logger.disabled = logger.disabled, True
    try:
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            yield
        sys.stderr.write(printed.getvalue())  # nothing failed: whatever it is, it is the model's
    finally:
        logger.disabled = disabled


def _explain(model: nn.Module, error: Exception) -> str:
    """What torch.export said, and the place in the user's code it happened at."""
    frames = [
        f"\n  File {frame.filename!r}, line {frame.lineno}: {frame.line}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_TORCH) and frame.filename != __file__
    ]
    text = str(error).strip()
    if "data-dependent" in text or "data dependent" in text:
        advice = "Control flow on tensor values cannot be traced: use torch.where."
    else:
        advice = "Check that the model runs on the example inputs, and that torch.export accepts it."
    first = text.splitlines()[0] if text else type(error).__name__
    return f"{type(model).__name__} could not be traced: {first}{''.join(frames[-1:])}\n{advice}"
