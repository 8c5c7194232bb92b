"""torch.export of a function of flat tensors: quiet, and with an error that a user can meet."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from momentprop.errors import ExportError


def export_flat(module: nn.Module, tensors: Sequence[Tensor], dynamic: Sequence[Any]) -> ExportedProgram:
    """A module whose forward takes `*tensors`; `dynamic`: for each a dictionary of free sizes, or None."""
    try:
        with quiet(), torch.no_grad():
            return torch.export.export(module, tuple(tensors), dynamic_shapes=(tuple(dynamic),), strict=False)
    except ExportError:
        raise
    except Exception as error:
        raise ExportError(
            f"torch.export does not accept the network: {type(error).__name__}: {error}"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Without the deprecation warnings that torch raises inside itself, and without stack traces of nodes.

    Nobody reads those here, and to record them takes a good part of an export's time.
    """
    config: Any = torch.fx.config
    before = getattr(config, "do_not_emit_stack_traces", False)  # older torch does not have it
    config.do_not_emit_stack_traces = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        config.do_not_emit_stack_traces = before
