"""Tells whether a model was changed after its conversion, where a converted network would not follow.

A converted network has the model's parameters, so it follows what happens to their values. It has the drop
probabilities and the structure of the day it was made.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from momentprop.capture.arming import DROPPING
from momentprop.errors import ChangedError

_RATE = re.compile("p|.*drop.*|keep_prob", re.IGNORECASE)
_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)  # what they hold is what they do


@dataclass(frozen=True)
class _Seen:
    """Holds what one module was like."""

    name: str
    module: weakref.ref[nn.Module]
    rates: tuple[tuple[str, float], ...]
    parts: tuple[tuple[str, weakref.ref[nn.Module]], ...]
    parameters: tuple[tuple[str, weakref.ref[nn.Parameter]], ...]
    kinds: tuple[tuple[torch.dtype, torch.device], ...]  # of these

    @staticmethod
    def of(name: str, module: nn.Module) -> _Seen:
        kinds = (int, float) if isinstance(module, DROPPING) else float  # elsewhere integers may count drops
        rates = tuple(
            [(k, v) for k, v in vars(module).items() if _RATE.fullmatch(k) and isinstance(v, kinds)]
        )
        return _Seen(
            f"{name}.".lstrip("."),
            weakref.ref(module),
            rates,
            _references(module._modules),
            _references(module._parameters),
            tuple([(p.dtype, p.device) for p in module._parameters.values() if p is not None]),
        )

    def change(self) -> str | None:
        """Say what has changed; a module that is gone has no say."""
        module = self.module()
        if module is None:
            return None
        for name, rate in self.rates:
            now = module.__dict__.get(name)
            if now != rate:
                return f"{self.name}{name} is {now}, and was {rate}"
        for name, part in self.parts:
            now = module._modules.get(name)
            if now is None or now is not part():
                return f"{self.name}{name} is another module"
        if isinstance(module, _LISTS) and len(module._modules) != len(self.parts):
            kind, now, before = type(module).__name__, len(module._modules), len(self.parts)
            return f"{self.name}{kind} has {now} parts, and had {before}"
        for (name, parameter), (dtype, device) in zip(self.parameters, self.kinds, strict=True):
            now = module._parameters.get(name)
            if now is None or now is not parameter():
                return f"{self.name}{name} is another parameter"
            if now.dtype is not dtype or now.device != device:
                return f"{self.name}{name} is {now.dtype} on {now.device}, and was {dtype} on {device}"
        return None


class Watch:
    """Remembers a model without keeping it alive."""

    def __init__(self, model: nn.Module) -> None:
        self._seen = [
            _Seen.of(name, module)
            for name, module in model.named_modules()
            if not isinstance(module, torch.jit.ScriptModule)
        ]

    def check(self) -> None:
        """Raise if the model has changed."""
        for seen in self._seen:
            change = seen.change()
            if change is not None:
                raise ChangedError(f"the model was changed after its conversion: {change}; convert it again")


def _references(parts: Mapping[str, Any]) -> tuple[tuple[str, weakref.ref[Any]], ...]:
    return tuple([(name, weakref.ref(part)) for name, part in parts.items() if part is not None])
