"""Tells the inputs of a batch from its target: in tuples (x, y), and in dictionaries with `labels`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from momentprop.errors import InputError

_TARGETS = ("labels", "label", "targets", "target", "y")  # what data sets call them


@dataclass(frozen=True)
class Batch:
    """Holds a model's inputs, with their names if it takes them by name, and the target if there is one."""

    inputs: tuple[Any, ...]
    names: tuple[str, ...] = ()
    target: Any = None

    @staticmethod
    def of(given: Any, has_target: bool) -> Batch:
        """Open what a loader gives: x, (x, y), (x1, x2, y), ((x1, x2), y), a mapping, or (mapping, y)."""
        if isinstance(given, Mapping):
            inputs = dict(given)
            target = next((inputs.pop(name) for name in _TARGETS if name in inputs), None)
            return Batch(tuple(inputs.values()), tuple(map(str, inputs)), target)
        members = tuple(given) if isinstance(given, (tuple, list)) else (given,)
        if not has_target or len(members) < 2:
            return Batch(members)
        *first, target = members
        if len(first) == 1 and isinstance(first[0], Mapping):
            return Batch(tuple(first[0].values()), tuple(map(str, first[0])), target)
        if len(first) == 1 and isinstance(first[0], (tuple, list)):
            first = list(first[0])
        return Batch(tuple(first), (), target)

    def in_order(self, names: tuple[str, ...]) -> Batch:
        """The same with the inputs in this order, if these are their names."""
        if sorted(names) != sorted(self.names):
            raise InputError(f"a batch has the inputs {_listed(self.names)}, and another {_listed(names)}")
        if not names:
            return self
        by_name = dict(zip(self.names, self.inputs, strict=True))
        return replace(self, inputs=tuple(by_name[name] for name in names), names=names)


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "without names"


def call(network: Any, inputs: tuple[Any, ...], names: tuple[str, ...] = ()) -> Any:
    """Call a network with its inputs in order, or by name."""
    return network(**dict(zip(names, inputs, strict=True))) if names else network(*inputs)
