"""Results that are chosen once and kept: dataclasses that go to plain JSON and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Self

import torch
from torch import Tensor

Counts = Tensor  # of integers


class Record:
    """A dataclass of numbers and tensors that goes to plain JSON and back."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON numbers, lists and strings."""
        return {name: plain(getattr(self, name)) for name in _names(type(self))}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`."""
        missing = [name for name in _names(cls) if name not in data]
        if missing:
            raise ValueError(f"the dictionary lacks {', '.join(missing)}; give one that to_dict made")
        return cls(**{f.name: _READ.get(f.type, _as_is)(data[f.name]) for f in fields(cls)})  # type: ignore[arg-type]


def plain(value: Any) -> Any:
    """Write a value as strict JSON knows it: tensors as lists, infinity as "inf", NaN as null."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _tensor(value: Any) -> Tensor:
    def numbers(v: Any) -> Any:
        return [numbers(u) for u in v] if isinstance(v, list) else _number(v)

    return torch.tensor(numbers(value), dtype=torch.float64)


def _counts(value: Any) -> Tensor:
    return torch.tensor(value, dtype=torch.int64)


def _as_is(value: Any) -> Any:
    return value


_READ = {"float": _number, "Tensor": _tensor, "Counts": _counts}  # by a field's annotation


def _names(record: type) -> list[str]:
    return [f.name for f in fields(record)]
