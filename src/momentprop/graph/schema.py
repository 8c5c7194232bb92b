"""Reads the schemas of operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from momentprop.graph.private import OpOverload


def bind(op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Call arguments by their names in the operator's schema, defaults filled in."""
    bound = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    bound.update(zip((a.name for a in op._schema.arguments), args, strict=False))
    bound.update(kwargs)
    return bound
