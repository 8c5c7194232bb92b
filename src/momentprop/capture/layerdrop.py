"""Branches that a model takes by chance, in Python: LayerDrop (Fan, Grave & Joulin 2020) and the like.

    if self.training and torch.rand([]) < self.layerdrop: continue

A static graph holds one of the branches. With probability 0 or 1 that is all there is, and tracing goes on
with it; otherwise it is an error, for the graph would hold whatever branch the dice fell on.
"""

from __future__ import annotations

import contextlib
import linecache
import re
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from momentprop.capture.chance import Place, drew_meanwhile, own_draws
from momentprop.errors import TraceError
from momentprop.graph.place import TORCH

_NAME = re.compile("layer_?drop$", re.IGNORECASE)
_BELOW, _ABOVE = ("lt", "le", "__lt__", "__le__"), ("gt", "ge", "__gt__", "__ge__")

T = TypeVar("T")


class BranchByChanceError(TraceError):
    """A branch of the model is taken with a probability other than 0 and 1."""


def without_branches(model: nn.Module, run: Callable[[], T]) -> T:
    """Return what `run` does, which calls the model in training mode; raise if chance decides a branch.

    Single numbers of torch's are compared by a mode. Of Python's and numpy's only the generators' states tell
    that some were drawn, and the model's attributes named layerdrop what for.
    """
    rates = _rates(model)
    live = {name: rate for name, rate in rates.items() if 0 < rate < 1}

    def refuse(probability: float) -> None:
        raise BranchByChanceError(_message(model, [probability], live, _own_place()))

    def attempt() -> T:
        # where there is no such attribute, a single number may be noise like any other
        with _SingleNumbers(refuse) if rates else contextlib.nullcontext():
            return run()

    with drew_meanwhile() as drew:
        result, error = _outcome(attempt)
    if drew:  # this thread or another
        with own_draws(drew) as places:
            _outcome(attempt)
        if places and (live or not rates):
            raise BranchByChanceError(_message(model, live.values(), live, places[0])) from error
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _outcome(run: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return run(), None
    except Exception as error:
        return None, error


class _SingleNumbers(TorchFunctionMode):
    """Decides comparisons of torch.rand([]) and torch.rand(1) in Python."""

    def __init__(self, refuse: Callable[[float], None]) -> None:
        super().__init__()
        self.refuse = refuse
        self.drawn: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if args and any(args[0] is number for number in self.drawn):
            if name == "item":
                return _Number(self.refuse)
            if name in (*_BELOW, *_ABOVE) and isinstance(args[1], (int, float)):
                return _is_below(args[1], self.refuse) == (name in _BELOW)
        drawn = func(*args, **kwargs)
        if func is torch.rand and (args[0] if len(args) == 1 else args) in ((), [], 1, (1,), [1]):
            self.drawn.append(drawn)
        return drawn


class _Number(float):
    """A single number in Python: what matters is what it is compared with."""

    def __new__(cls, refuse: Callable[[float], None]) -> _Number:
        number = super().__new__(cls, 0.5)
        number.refuse = refuse
        return number

    refuse: Callable[[float], None]

    def __lt__(self, bound: Any) -> bool:
        return _is_below(bound, self.refuse)

    def __gt__(self, bound: Any) -> bool:
        return not _is_below(bound, self.refuse)

    __le__, __ge__ = __lt__, __gt__


def _is_below(bound: float, refuse: Callable[[float], None]) -> bool:
    """Say whether a random number between 0 and 1 is below the bound; refuse bounds between these."""
    if 0 < bound < 1:
        refuse(bound)
    return bound >= 1


def _rates(model: nn.Module) -> dict[str, float]:
    """Attributes named layerdrop, of modules and their configurations, and their values."""
    found: dict[str, float] = {}
    configs: set[int] = set()
    for path, module in model.named_modules():
        config = getattr(module, "config", None)
        holders = [(path, module)]
        if hasattr(config, "__dict__") and id(config) not in configs:
            configs.add(id(config))
            holders.append((f"{path}.config", config))
        for place, holder in holders:
            for name, value in vars(holder).items():
                if _NAME.search(name) and isinstance(value, (int, float)):
                    found[f"{place}.{name}".lstrip(".")] = value
    return found


def _own_place() -> Place | None:
    """Return the innermost line of the user's code that is being run."""
    own = [
        f for f in traceback.extract_stack() if not f.filename.startswith(TORCH) and f.filename != __file__
    ]
    return (own[-1].filename, own[-1].lineno or 0) if own else None


def _message(model: nn.Module, probabilities: Any, live: dict[str, float], place: Place | None) -> str:
    numbers = " or ".join(dict.fromkeys(f"{p:g}" for p in probabilities))
    chance = f"takes a branch with probability {numbers}" if numbers else "draws random numbers in Python"
    source = f"\n  File {place[0]!r}, line {place[1]}: {linecache.getline(*place).strip()}" if place else ""
    named = ", ".join(f"{name} = {rate:g}" for name, rate in live.items())
    advice = f"LayerDrop is on: {named}. Set it to 0" if named else "Leave them out, or keep that branch"
    return (
        f"{type(model).__name__} could not be traced: in training mode it {chance}, and a static graph holds "
        f"one branch only{source}\n{advice}: every layer is then "
        "kept, as in eval mode. All other dropout is counted; that of whole layers is not."
    )
