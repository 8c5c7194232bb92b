"""Branches that a model takes by chance, in Python: LayerDrop (Fan, Grave & Joulin 2020) and the like.

    if self.training and torch.rand([]) < self.layerdrop: continue

A static graph holds one of the branches. With probability 0 or 1 that is all there is, and tracing goes on
with it; otherwise it is an error, for the graph would hold whatever branch the dice fell on.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from momentprop.errors import TraceError
from momentprop.graph import private

_TORCH = inspect.getfile(torch).removesuffix("__init__.py")
_DRAWS = {"random": ("random", "uniform"), "numpy.random": ("rand", "random", "uniform")}
_NAME = re.compile("layer_?drop$", re.IGNORECASE)


class BranchByChanceError(TraceError):
    """A branch of the model is taken with a probability other than 0 and 1."""


@contextlib.contextmanager
def chances_decided(model: nn.Module) -> Iterator[None]:
    """While tracing, comparisons of random numbers with 0 or 1 are known, and others raise."""
    rates = _rates(model)

    def refuse(probability: float) -> None:
        raise BranchByChanceError(_message(model, probability, rates))

    with contextlib.ExitStack() as stack:
        for place, names in _DRAWS.items():
            for name in names if place in sys.modules else ():
                draw = getattr(sys.modules[place], name)
                setattr(sys.modules[place], name, _watched(draw, refuse))
                stack.callback(setattr, sys.modules[place], name, draw)
        if rates:  # elsewhere a single number may be noise like any other
            stack.enter_context(_SingleNumbers(refuse))
        yield


class _Number(float):
    """A random number of Python's, uniform on [low, high)."""

    low: float
    high: float
    refuse: Callable[[float], None]

    def _is_below(self, bound: Any) -> bool:
        if not isinstance(bound, (int, float)):
            return NotImplemented
        if self.low < bound < self.high:
            self.refuse((bound - self.low) / (self.high - self.low))
        return bound >= self.high

    def __lt__(self, bound: Any) -> bool:
        return self._is_below(bound)

    def __le__(self, bound: Any) -> bool:
        return self._is_below(bound)

    def __gt__(self, bound: Any) -> bool:
        below = self._is_below(bound)
        return below if below is NotImplemented else not below

    __ge__ = __gt__


def _watched(draw: Callable[..., Any], refuse: Callable[[float], None]) -> Callable[..., Any]:
    """`draw`, returning numbers that know how they were drawn; to torch itself, as it was."""

    def drawn(*args: Any, **kwargs: Any) -> Any:
        value = draw(*args, **kwargs)
        if not isinstance(value, float) or sys._getframe(1).f_code.co_filename.startswith(_TORCH):
            return value
        number = _Number(value)
        bounds = [*args, *kwargs.values()] if len(args) + len(kwargs) == 2 else [0.0, 1.0]
        number.low, number.high, number.refuse = *bounds, refuse
        return number

    return drawn


class _SingleNumbers(TorchFunctionMode):
    """torch.rand([]) and torch.rand(1) give numbers whose comparisons are decided in Python."""

    def __init__(self, refuse: Callable[[float], None]) -> None:
        super().__init__()
        self.refuse = refuse

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        size = args[0] if len(args) == 1 else args
        if func is torch.rand and size in ((), [], 1, (1,), [1]):
            return _Scalar(self.refuse, lambda: torch.rand(*args, **kwargs))
        return func(*args, **kwargs)


class _Scalar:
    """A uniform number that becomes a tensor if anything but a comparison needs it."""

    def __init__(self, refuse: Callable[[float], None], draw: Callable[[], torch.Tensor]) -> None:
        self._number = _Number(0.5)
        self._number.low, self._number.high, self._number.refuse = 0.0, 1.0, refuse
        self._draw = draw
        self._tensor: torch.Tensor | None = None

    def item(self) -> float:
        return self._number

    def __lt__(self, bound: Any) -> bool:
        return self._number < bound

    def __le__(self, bound: Any) -> bool:
        return self._number <= bound

    def __gt__(self, bound: Any) -> bool:
        return self._number > bound

    def __ge__(self, bound: Any) -> bool:
        return self._number >= bound

    def __getattr__(self, name: str) -> Any:
        return getattr(self._as_tensor(), name)

    def _as_tensor(self) -> torch.Tensor:
        if self._tensor is None:
            with private.without_overrides():
                self._tensor = self._draw()
        return self._tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [a._as_tensor() if isinstance(a, _Scalar) else a for a in args]
        return func(*plain, **(kwargs or {}))


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


def _message(model: nn.Module, probability: float, rates: dict[str, float]) -> str:
    own = [
        f for f in traceback.extract_stack() if not f.filename.startswith(_TORCH) and f.filename != __file__
    ]
    source = f"\n  File {own[-1].filename!r}, line {own[-1].lineno}: {own[-1].line}" if own else ""
    live = {name: rate for name, rate in rates.items() if rate > 0}
    named = ", ".join(f"{name} = {rate:g}" for name, rate in live.items())
    advice = f"LayerDrop is on: {named}. Set it to 0" if named else "Set that probability to 0"
    return (
        f"{type(model).__name__} could not be traced: in training mode it takes a branch with probability "
        f"{probability:g}, and a static graph holds one branch only{source}\n{advice}: every layer is then "
        "kept, as in eval mode. All other dropout is counted; that of whole layers is not."
    )
