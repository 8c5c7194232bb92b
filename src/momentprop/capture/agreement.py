"""Does the network as it was traced, with its noise idle, return what the model returns in eval mode?

Dropout is traced in training mode, and training may change more than dropout: auxiliary heads, masking of
inputs, losses, caches. A converted network returns what the eval-mode model returns. So that model is run
once, and outputs are compared; where they differ, the classes of modules that do so in training are found.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode
from torch.utils import _pytree as pytree

from momentprop.capture.arming import is_armed, is_torchs_own
from momentprop.capture.chance import own_draws
from momentprop.capture.quiet import silent
from momentprop.capture.randomness import OwnNumbers
from momentprop.capture.records import closed, flatten_output
from momentprop.capture.replica import replica

_SEEDS = 4  # runs of a model that draws random numbers in eval mode, until its outputs differ


@dataclass(frozen=True)
class Outputs:
    """Holds what a model returned, flat."""

    leaves: list[Any]
    spec: pytree.TreeSpec
    draws: int = 0  # how many operators drew random numbers
    random: bool = False  # other values every time: dropout that no training flag switches off

    def agrees(self, leaves: Sequence[Any], spec: pytree.TreeSpec) -> bool:
        """Say whether others have the same structure, shapes and, unless they are random, values."""
        same = spec == self.spec and len(leaves) == len(self.leaves)
        return same and all(map(self._alike, self.leaves, leaves))

    def same_shapes(self, leaves: Sequence[Any], spec: pytree.TreeSpec) -> bool:
        return dataclasses.replace(self, random=True).agrees(leaves, spec)

    def found_in(self, leaves: Sequence[Any]) -> list[int] | None:
        """Find where each of these outputs stands among others; None if one is missing."""
        found: list[int] = []
        for mine in self.leaves:
            places = [i for i in range(len(leaves)) if i not in found and self._alike(mine, leaves[i])]
            if not places:
                return None
            found.append(places[0])
        return found

    def _alike(self, mine: Any, other: Any) -> bool:
        if not isinstance(mine, Tensor) or not isinstance(other, Tensor):
            return type(mine) is type(other)
        if mine.shape != other.shape or mine.dtype != other.dtype:
            return False
        if self.random or mine.device.type == "meta" or other.device.type == "meta":
            return True
        return _close(mine, other)


def _close(a: Tensor, b: Tensor) -> bool:
    """Say whether values are equal up to half their digits: operators may be fused, or sums reordered."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    finite = a.isfinite() & b.isfinite()
    same = (a == b) | (a.isnan() & b.isnan()) | finite
    scale = a[finite].abs().max() if finite.any() else a.new_zeros(())
    bound = torch.finfo(a.dtype).eps ** 0.5 * scale
    return bool(same.all()) and not bool(((a - b).abs()[finite] > bound).any())


def evaluated(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outputs | None:
    """The outputs in eval mode; None if the model does not run."""
    try:
        first = _run(model, args, kwargs, lambda module: False)
        others = range(1, _SEEDS) if first.draws else ()
        for seed in others:
            second = _run(model, args, kwargs, lambda module: False, seed)
            if not first.agrees(second.leaves, second.spec):
                return dataclasses.replace(first, random=True)
    except Exception:  # tracing will fail too, and say why
        return None
    return first


def differing(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], reference: Outputs
) -> dict[type, int]:
    """Find classes that change the outputs when they alone are in training mode, with dropout idle.

    With each, how many dropouts it calls itself. Where only values differ and random numbers are drawn, it is
    noise that does not average to what eval mode computes: such classes stay as they are.
    """
    armed = [m for m in model.modules() if is_armed(m) and not is_torchs_own(type(m))]
    found: dict[type, int] = {}
    for kind in dict.fromkeys(map(type, armed)):
        idle = _IdleDropout()
        try:
            with idle:
                outputs = _run(model, args, kwargs, functools.partial(_is, kind))
            is_noise = outputs.draws != reference.draws
            agrees = reference.same_shapes if is_noise else reference.agrees
            differs = not agrees(outputs.leaves, outputs.spec)
        except Exception:
            differs = True
        if differs:
            found[kind] = idle.count
    return found


def failure(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
    """What the model raises in eval mode."""
    try:
        _run(model, args, kwargs, lambda module: False)
    except Exception as error:
        return error
    return None


def is_random_in_training(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], kind: type, reference: Outputs
) -> bool:
    """Say whether modules of a class, when they alone are in training mode, drop or draw random numbers."""
    idle = _IdleDropout()
    try:
        with idle:
            outputs = _run(model, args, kwargs, functools.partial(_is, kind))
    except Exception:  # tracing will leave such a class in eval mode, and say so
        return False
    return idle.count > 0 or outputs.draws > reference.draws


def _is(kind: type, module: nn.Module) -> bool:
    return type(module) is kind


class _IdleDropout(TorchFunctionMode):
    """Makes functional dropout pass its input on, and counts the calls that would have dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FUNCTIONAL:
            training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
            self.count += bool(training)
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            dropped = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0)
            self.count += dropped > 0
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = kwargs if len(args) > 4 else {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)


_FUNCTIONAL = (
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
    torch.feature_dropout,
    torch.alpha_dropout,
    torch.feature_alpha_dropout,
)


def _run(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    training: Callable[[nn.Module], bool],
    seed: int = 0,
) -> Outputs:
    """The outputs of a replica with modules in training mode as said."""
    args, kwargs = closed(pytree.tree_map_only(Tensor, torch.clone, (args, kwargs)))
    # torch.nn's transformers take no fused path where functions are overridden, as here by themselves. That
    # of eval mode leaves out padding, which the model in training computes.
    plain = BaseTorchFunctionMode()
    with torch.no_grad(), silent(), own_draws(), OwnNumbers(seed) as numbers, plain:
        twin = replica(model, copy_tensors=True)
        for module in twin.modules():
            module.training = training(module)
        leaves, spec = flatten_output(twin(*args, **kwargs))
    return Outputs(leaves, spec, numbers.draws)
