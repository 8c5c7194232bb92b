"""nn.Module + example inputs -> an exported program, dropout armed and the batch dynamic; or an error."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from momentprop.capture.arming import armed
from momentprop.capture.batch import Batch
from momentprop.capture.layerdrop import BranchByChanceError, without_branches
from momentprop.capture.quiet import speechless
from momentprop.capture.records import PACKED, closed, flatten_output
from momentprop.errors import TraceError
from momentprop.graph import private
from momentprop.graph.place import TORCH

_OWN = str(Path(__file__).parents[1])
PREFIX = "model."  # what wrapping puts before every name


class _Call(nn.Module):
    """The model as a module that takes and returns flat lists."""

    def __init__(
        self, model: nn.Module, spec: pytree.TreeSpec, keep: Callable[[pytree.TreeSpec, list[type]], None]
    ) -> None:
        super().__init__()
        self.model, self.spec, self.keep = model, spec, keep

    def forward(self, inputs: list[Any]) -> list[Any]:
        args, kwargs = pytree.tree_unflatten(inputs, self.spec)
        left_out: list[type] = []
        leaves, spec = flatten_output(self.model(*closed(args), **closed(kwargs)), left_out)
        self.keep(spec, left_out)
        return leaves


def export(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Batch, disarm: frozenset[str]
) -> tuple[ExportedProgram, pytree.TreeSpec, list[type]]:
    """The program, the structure of its outputs, and the types of outputs that None stands for."""
    leaves, spec = pytree.tree_flatten((args, kwargs))

    def run() -> tuple[ExportedProgram, pytree.TreeSpec, list[type]]:
        kept: list[tuple[pytree.TreeSpec, list[type]]] = []
        twin = armed(model, disarm)
        _take_masks_as_given(twin)
        program = torch.export.export(
            _Call(twin, spec, lambda *outputs: kept.append(outputs)),
            (leaves,),
            dynamic_shapes=(batch.free_sizes(leaves),),
            strict=False,
        )
        return program, *kept[-1]

    try:
        with private.export_for_one_thread(any_backend=True), speechless(), torch.no_grad():
            return without_branches(model, run)
    except BranchByChanceError:
        raise
    except Exception as error:
        raise TraceError(explain(model, error)) from None


def _take_masks_as_given(model: nn.Module) -> None:
    """Keep torch.nn's transformers from a branch on whether a mask is causal, which cannot be traced.

    Such a mask is treated as a general mask instead.
    """
    for module in model.modules():
        for kind, name in _ASKS_FOR_MASKS:
            if isinstance(module, kind):
                module.register_forward_pre_hook(functools.partial(_with_default, name), with_kwargs=True)


_ASKS_FOR_MASKS = ((nn.TransformerEncoder, "is_causal"), (nn.TransformerDecoder, "tgt_is_causal"))


def _with_default(name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return the call, with False for the argument where it is None or not given."""
    bound = inspect.signature(module.forward).bind_partial(*args, **kwargs)
    if name in bound.signature.parameters and bound.arguments.get(name) is None:
        bound.arguments[name] = False
    return bound.args, bound.kwargs


def _packs(error: Exception) -> bool:
    """Say whether a packed sequence was in use where the error was raised."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(isinstance(value, PackedSequence) for frame in frames for value in frame.f_locals.values())


def explain(model: nn.Module, error: Exception) -> str:
    """Say what torch.export said, and the place in the user's code it happened at."""
    frames = [
        f"\n  File {frame.filename!r}, line {frame.lineno}: {frame.line}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((TORCH, _OWN, "<"))
    ]
    text = str(error).strip()
    if _packs(error):
        advice = PACKED
    elif "data-dependent" in text or "data dependent" in text:
        advice = "Control flow on tensor values cannot be traced: use torch.where."
    else:
        advice = "Check that the model runs on the example inputs, and that torch.export accepts it."
    first = text.splitlines()[0] if text else type(error).__name__
    return f"{type(model).__name__} could not be traced: {first}{''.join(frames[-1:])}\n{advice}"
