"""Which modules are in training mode while a model is traced: those that may drop, and no others."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

# Layers of torch.nn whose dropout depends on their training flag. Its other layers stay in eval mode, as
# does every layer that holds running statistics; layers written by users are armed, since any may call
# F.dropout(x, p, self.training).
_ARMED = (
    nn.modules.dropout._DropoutNd,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)


@contextlib.contextmanager
def armed(model: nn.Module, disarm: frozenset[str] = frozenset()) -> Iterator[None]:
    """Dropout in training mode, everything that normalises in eval mode; restored afterwards."""
    with borrowed(model):
        for name, module in model.named_modules():
            module.training = name not in disarm and is_armed(module)
        yield


@contextlib.contextmanager
def borrowed(model: nn.Module, copy_tensors: bool = False) -> Iterator[None]:
    """Whatever happens to the model's modules meanwhile is forgotten: modes, attributes, hooks, lists.

    With `copy_tensors` also what is written to buffers and other tensors, though not to parameters. Random
    number generators are put back too.
    """
    kept = [(module, module.__dict__) for module in model.modules()]
    copies: dict[int, Tensor] = {}

    def fresh(value: Any) -> Any:
        if isinstance(value, Tensor) and copy_tensors and not isinstance(value, nn.Parameter):
            return copies.setdefault(id(value), value.clone())
        if isinstance(value, dict):
            copied = value.copy()
            copied.update({key: fresh(item) for key, item in value.items()})
            return copied
        return [fresh(item) for item in value] if type(value) is list else value

    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng())
        stack.callback(random.setstate, random.getstate())
        if numpy := sys.modules.get("numpy"):
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        for module, attributes in kept:
            if isinstance(module, torch.jit.ScriptModule):  # keeps its mode elsewhere
                stack.callback(setattr, module, "training", module.training)
            stack.callback(object.__setattr__, module, "__dict__", attributes)
            object.__setattr__(module, "__dict__", {key: fresh(value) for key, value in attributes.items()})
        yield


def is_armed(module: nn.Module) -> bool:
    statistics = "running_mean" in module._buffers or "running_var" in module._buffers
    if statistics or isinstance(module, nn.modules.batchnorm._NormBase):
        return False
    return isinstance(module, _ARMED) if is_torchs_own(type(module)) else True


def is_torchs_own(kind: type) -> bool:
    return kind.__module__.startswith(("torch.nn.modules", "torch.nn.utils"))
