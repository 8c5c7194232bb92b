"""Opens dataclass instances among inputs and outputs into their fields, and closes them again."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from momentprop.moments import Moments, is_moments

PACKED = (
    "The sizes of a packed sequence follow from the lengths of its sequences, which no static graph can "
    "hold. Let the model take padded sequences: run the recurrent layer on them, and take each last step by "
    "its length, h[torch.arange(len(h)), lengths - 1], or multiply with a mask. (The backward direction of a "
    "bidirectional layer would begin in the padding: give it batches of one length.)"
)
_VALUES = (Tensor, bool, int, float, complex, str, torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class _Kind:
    """Says what a record is an instance of; any class with the same fields will do in its place."""

    names: tuple[str, ...]
    type: Any = field(compare=False)


@dataclass
class _Record:
    """A dataclass instance opened into its fields, so that its tensors can be traced."""

    kind: _Kind
    values: list[Any]


pytree.register_pytree_node(
    _Record,
    lambda r: (r.values, r.kind),
    lambda values, kind: _Record(kind, list(values)),
    flatten_with_keys_fn=lambda r: (
        [(pytree.GetAttrKey(name), value) for name, value in zip(r.kind.names, r.values, strict=True)],
        r.kind,
    ),
)


class Fields(dict[str, Any]):
    """A dictionary whose entries are attributes too: `out["logits"]` and `out.logits`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def is_record(value: Any) -> bool:
    """Say whether a value is an instance of a dataclass, or `Fields` in its place."""
    return isinstance(value, Fields) or (
        dataclasses.is_dataclass(value)
        and not isinstance(value, (type, Moments, _Record))
        and type(value) not in pytree.SUPPORTED_NODES
    )


def opened(tree: Any) -> Any:
    """The same with dataclass instances as nodes of the tree."""

    def open_one(value: Any) -> Any:
        if not is_record(value):
            return value
        if isinstance(value, Fields):
            return _Record(_Kind(tuple(value), Fields), [opened(part) for part in value.values()])
        names = [one.name for one in dataclasses.fields(value)]
        return _Record(_Kind(tuple(names), type(value)), [opened(getattr(value, name)) for name in names])

    return pytree.tree_map(open_one, tree, is_leaf=lambda v: is_record(v) or is_moments(v))


def closed(tree: Any) -> Any:
    """The inverse of `opened`."""

    def close_one(value: Any) -> Any:
        if not isinstance(value, _Record):
            return value
        parts = dict(zip(value.kind.names, map(closed, value.values), strict=True))
        if value.kind.type is Fields:
            return Fields(parts)
        # not by its __init__, which may compute with what are Moments now
        instance: Any = object.__new__(value.kind.type)
        for name, part in parts.items():
            object.__setattr__(instance, name, part)
        return instance

    return pytree.tree_map(close_one, tree, is_leaf=lambda v: isinstance(v, _Record) or is_moments(v))


def flatten_output(output: Any, left_out: list[type] | None = None) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves and structure of a model's output; dataclasses count as structure.

    Objects of other kinds, such as the caches of decoders, become None, and their types are listed.
    """
    leaves, spec = pytree.tree_flatten(opened(output))
    opaque = [leaf is not None and not isinstance(leaf, _VALUES) for leaf in leaves]
    if left_out is not None:
        left_out.extend(type(leaf) for leaf, is_opaque in zip(leaves, opaque, strict=True) if is_opaque)
    return [None if is_opaque else leaf for leaf, is_opaque in zip(leaves, opaque, strict=True)], spec


def rebuild_output(leaves: list[Any], spec: pytree.TreeSpec) -> Any:
    """The inverse of `flatten_output`, with any leaves."""
    output = pytree.tree_unflatten(leaves, spec)
    return closed(output) if "_Record" in str(spec) else output
