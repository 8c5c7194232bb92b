"""Finds the one output that is meant among all that a network returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from momentprop.errors import InputError
from momentprop.moments import Moments, mean_of

Select = str | int | None  # the name of an output, or its position


def chosen(output: Any, select: Select = None) -> Any:
    """Return one of the moments or tensors that a network returned.

    `select` is its name, with dots inside containers, or its position. Without it the only one is taken, the
    one called `logits`, or the only `Moments`.

    >>> import torch
    >>> chosen({"logits": torch.zeros(2, 3), "hidden": torch.zeros(2, 8)}).shape
    torch.Size([2, 3])
    """
    if select is None and isinstance(output, (Moments, Tensor)):
        return output
    found = leaves(output)
    return found[name_of(found, select)]


def one_output(output: Any, select: Select = None) -> Any:
    """Return the output that is meant; raise unless it holds floating-point numbers."""
    found = chosen(output, select)
    if not mean_of(found).is_floating_point():
        raise ValueError(f"output must be floating-point numbers, not {mean_of(found).dtype}")
    return found


def leaves(output: Any, name: str = "") -> dict[str, Any]:
    """List moments and tensors by name: keys of mappings, fields of dataclasses, positions in tuples."""
    if isinstance(output, (Moments, Tensor)):
        return {name: output}
    found: dict[str, Any] = {}
    for key, value in _parts(output):
        found |= leaves(value, f"{name}.{key}" if name else str(key))
    return found


def name_of(found: Mapping[str, Any], select: Select = None) -> str:
    """Return the name of the output that is meant."""
    names = list(found)
    if isinstance(select, str) and select not in found and select.isdigit():
        select = int(select)  # as a command line has it
    if isinstance(select, int) and -len(names) <= select < len(names):
        return names[select]
    if select is not None:
        if select in found:
            return str(select)
        raise InputError(f"the network has no output {select!r}; it returns {_listed(names)}")
    random = [name for name, value in found.items() if isinstance(value, Moments)]
    for candidates in (names, [name for name in names if name == "logits"], random):
        if len(candidates) == 1:
            return candidates[0]
    if not names:
        raise TypeError("output must hold Moments or a tensor; there is none in it")
    raise InputError(
        f"the network returns several outputs ({_listed(names)}); say with select= which of them is meant"
    )


def _parts(output: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(output, Mapping):
        return output.items()
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return [(field.name, getattr(output, field.name)) for field in dataclasses.fields(output)]
    if isinstance(output, (tuple, list)):
        return zip(getattr(output, "_fields", range(len(output))), output, strict=True)
    return []


def _listed(names: list[str]) -> str:
    return ", ".join(names) if names != [""] else "one tensor"
