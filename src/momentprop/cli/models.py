"""Models named on the command line: `package.module:factory` with its weights, or a saved file."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from momentprop.errors import MissingExtraError, MomentpropError


class ModelError(MomentpropError):
    """A model named on the command line cannot be had."""


def is_saved(name: str) -> bool:
    """Say whether this names a file of mp.save rather than Python code."""
    return name.endswith(".pt2")


def build_model(name: str, weights: Path | None = None) -> nn.Module:
    """The model that `package.module:factory` gives, in eval mode.

    The factory is called without arguments; a module object is taken as it is. The current folder is searched
    for the package, as `python -m` does.
    """
    found = _named(name)
    if not isinstance(found, nn.Module) and not callable(found):
        raise ModelError(f"{name} is a {type(found).__name__}, no nn.Module and no function that makes one")
    try:
        model = found if isinstance(found, nn.Module) else found()
    except MomentpropError:
        raise
    except Exception as error:
        raise ModelError(f"{name} cannot be built: {_described(error)}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name} gave a {type(model).__name__}, not an nn.Module")
    if weights is not None:
        load_weights(model, weights)
    return model.eval()


def _named(name: str) -> Any:
    """Import what `package.module:attribute` names."""
    place, _, attribute = name.partition(":")
    if not place or not attribute:
        raise ModelError(
            f"{name!r} names no model: give package.module:factory, or a .pt2 file that mp.save wrote"
        )
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(place)
    except Exception as error:  # whatever the user's code does
        raise ModelError(f"{place} cannot be imported: {_described(error)}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ModelError(f"{place} has no {attribute!r}")
        found = getattr(found, part)
    return found


def _described(error: Exception) -> str:
    """Say what went wrong in the user's code, and where."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({place.filename}, line {place.lineno})"


def load_weights(model: nn.Module, path: Path) -> None:
    """Safetensors, or what torch.load reads without executing anything."""
    if path.suffix == ".safetensors":
        if importlib.util.find_spec("safetensors") is None:
            raise MissingExtraError("safetensors", "validate")
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            state: Any = load_file(path)
        except SafetensorError as error:
            raise ModelError(f"{path} is damaged, or no safetensors file: {error}") from None
    else:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise
        except Exception as error:
            raise ModelError(
                f"{path} holds more than weights, or is damaged: {str(error).splitlines()[0]}"
            ) from None
    for key in ("state_dict", "model", "model_state_dict"):  # checkpoints of common training loops
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError) as error:
        raise ModelError(f"the weights in {path} do not fit the model: {error}") from None


def parse_example(text: str, batch_dims: Sequence[int] | None = None) -> tuple[Tensor, ...]:
    """Inputs from their shapes: `3,32,32`, without the batch; several with `;`; `int64:` before indices.

    The batch comes first, unless `batch_dims` says where for each input.

    >>> [(tuple(t.shape), t.dtype) for t in parse_example("3,8,8;int64:5")]
    [((2, 3, 8, 8), torch.float32), ((2, 5), torch.int64)]
    """
    made, parts = [], text.split(";")
    batch_dims = batch_dims or [0] * len(parts)
    if len(batch_dims) != len(parts):
        raise ModelError(f"give --batch-dim once, or once for each of {len(parts)} inputs")
    for part, dim in zip(parts, batch_dims, strict=True):
        kind, _, sizes = part.strip().rpartition(":")
        dtype = getattr(torch, kind or "float32", None)
        try:
            shape = [int(n) for n in sizes.split(",") if n.strip()]
        except ValueError:
            shape = [0]
        if not isinstance(dtype, torch.dtype) or any(n < 1 for n in shape):
            raise ModelError(
                f"{part!r} is no shape of an input: give sizes without the batch, such as 3,32,32"
            )
        if not -len(shape) - 1 <= dim <= len(shape):
            raise ModelError(f"--batch-dim {dim} is no dimension of {part!r} with the batch")
        full = (2, *shape)
        rows = torch.randn(full).to(dtype) if dtype.is_floating_point else torch.zeros(full, dtype=dtype)
        made.append(rows.movedim(0, dim).contiguous())
    return tuple(made)
