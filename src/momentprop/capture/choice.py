"""Chooses the modules whose dropout counts: the caller names them, or their modes tell."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from momentprop.capture.agreement import evaluated, is_random_in_training
from momentprop.capture.arming import DROPPING, is_armed, is_torchs_own, may_drop
from momentprop.errors import TraceNote

Where = type[nn.Module] | tuple[type[nn.Module], ...] | str | Callable[[str, nn.Module], bool]

_SHOWN = 6


@dataclass(frozen=True)
class Choice:
    """Holds which modules of a model have no say in its uncertainty."""

    left_out: frozenset[int]  # ids of modules
    explicit: bool = False  # the caller chose: all noise of the other modules counts, whatever it is

    @staticmethod
    def of(model: nn.Module, dropout: Where | Choice | None, args: tuple[Any, ...], kwargs: Any) -> Choice:
        """What a caller asks for; by default all dropouts count, unless some of them were put into eval().

        Where all are in eval mode, that is how a trained network is handed over, and all count.
        """
        if isinstance(dropout, Choice):
            return dropout
        if dropout is None:
            return Choice(_in_eval(model, args, kwargs))
        is_chosen = chooser(dropout, "dropout")
        named = model.named_modules(remove_duplicate=False)
        chosen = {id(m) for name, m in named if may_drop(m) and is_chosen(name, m)}
        every = frozenset(id(m) for m in model.modules() if may_drop(m))
        if every and not chosen:
            raise ValueError(_nothing_chosen(model, dropout))
        return Choice(every - chosen, explicit=True)

    def names(self, model: nn.Module) -> frozenset[str]:
        """The names of the modules that are left out."""
        return frozenset(name for name, m in model.named_modules() if id(m) in self.left_out)


def chooser(where: Where, argument: str) -> Callable[[str, nn.Module], bool]:
    """Turn a class, a tuple of classes or a regular expression into a function (name, module) -> bool."""
    if isinstance(where, str):
        pattern = re.compile(where)
        return lambda name, _: pattern.fullmatch(name) is not None
    if isinstance(where, (type, tuple)):
        classes = where if isinstance(where, tuple) else (where,)
        if not all(isinstance(c, type) and issubclass(c, nn.Module) for c in classes):
            raise TypeError(f"{argument} must name classes of modules, not {where!r}")
        return lambda _, module: isinstance(module, classes)
    if not callable(where):
        raise TypeError(
            f"{argument} must be a class, a name pattern or a function, not {type(where).__name__}"
        )
    return where


def _in_eval(model: nn.Module, args: tuple[Any, ...], kwargs: Any) -> frozenset[int]:
    """The modules that drop and are in eval mode, where others that drop are in training mode."""
    modes = {m.training for m in model.modules() if may_drop(m)}
    if len(modes) < 2:
        return frozenset()
    dropping = _dropping(model, args, kwargs)
    idle = {name: m for name, m in dropping.items() if not m.training}
    if not idle or len(idle) == len(dropping):
        return frozenset()
    note = (
        f"the dropout of {_listed(list(idle))} is left out: in eval mode, while other modules that drop are "
        "in training mode. `dropout=` chooses which dropouts count; dropout=nn.Module counts all"
    )
    warnings.warn(note, TraceNote, stacklevel=6)
    return frozenset(map(id, idle.values()))


def _dropping(model: nn.Module, args: tuple[Any, ...], kwargs: Any) -> dict[str, nn.Module]:
    """The modules that are random in training mode by themselves; those of users are run to see."""
    able = {name: m for name, m in model.named_modules() if may_drop(m)}
    own = dict.fromkeys(type(m) for m in able.values() if not isinstance(m, DROPPING))
    reference = evaluated(model, args, kwargs) if own else None
    random = {
        kind for kind in own if reference and is_random_in_training(model, args, kwargs, kind, reference)
    }
    return {name: m for name, m in able.items() if type(m) in random or _rate(m) > 0}


def _rate(module: nn.Module) -> float:
    """The drop probability of torch's own layers."""
    rate = getattr(module, "p" if isinstance(module, nn.modules.dropout._DropoutNd) else "dropout", 0.0)
    return rate if isinstance(module, DROPPING) and isinstance(rate, (int, float)) else 0.0


def _nothing_chosen(model: nn.Module, dropout: Where) -> str:
    able = {n: m for n, m in model.named_modules() if may_drop(m)}
    torchs = {n: m for n, m in able.items() if is_torchs_own(type(m)) and is_armed(m)}
    there = [f"{n or 'the model itself'} ({type(m).__name__})" for n, m in (torchs or able).items()]
    return (
        f"dropout={dropout!r} chooses no module that drops. There are: {_listed(there) if there else 'none'}"
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(name or "the model itself" for name in names[:_SHOWN]) + more
