"""torch.export of a function of flat tensors: quiet, and with an error that a user can meet."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from momentprop.errors import ExportError, MomentpropError
from momentprop.graph import private
from momentprop.lowering.free_batch import with_free_batch


def export_flat(module: nn.Module, tensors: Sequence[Tensor], dynamic: Sequence[Any]) -> ExportedProgram:
    """A module whose forward takes `*tensors`; `dynamic`: for each a dictionary of free sizes, or None."""
    try:
        return _exported(module, tensors, dynamic)
    except MomentpropError:
        raise
    except Exception as error:
        if "specialized it to be a constant" in str(error):
            with suppress(ValueError), quiet():
                return _exported(with_free_batch(module, tensors, dynamic), tensors, dynamic)
        raise ExportError(
            f"torch.export does not accept the network: {type(error).__name__}: {error}"
        ) from error


def _exported(module: nn.Module, tensors: Sequence[Tensor], dynamic: Sequence[Any]) -> ExportedProgram:
    with private.export_for_one_thread(), quiet(), torch.no_grad():
        return torch.export.export(module, tuple(tensors), dynamic_shapes=(tuple(dynamic),), strict=False)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the deprecation warnings that torch raises inside itself, and the stack traces of nodes.

    Nobody reads those here, and to record them takes a good part of an export's time. Both are switched off
    for the process: a conversion in another thread, which records them, waits.
    """
    config: Any = torch.fx.config
    with private.EXPORTING, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = getattr(config, "do_not_emit_stack_traces", False)  # older torch does not have it
        config.do_not_emit_stack_traces = True
        try:
            yield
        finally:
            config.do_not_emit_stack_traces = before
