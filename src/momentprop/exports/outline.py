"""Nested values <-> JSON, so that a file says how a network is called without naming anybody's classes.

Leaves are what `leaf` makes of them; containers are told by their kind. Named tuples come back as named
tuples; dataclasses and dictionaries of other classes (such as the outputs of transformers) as `Fields`.
"""

from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Collection, Mapping
from typing import Any

from momentprop.capture.records import Fields
from momentprop.errors import ArchiveError, ExportError

Outline = dict[str, Any]
_CONSTANTS = (bool, int, float, str, type(None))


def outline(
    value: Any, leaf: Callable[[Any, tuple[str, ...]], Outline | None], path: tuple[str, ...] = ()
) -> Outline:
    """The structure of a value. `leaf` gives the outline of a leaf at a path, or None for anything else.

    >>> outline((1, {"x": None}), lambda value, path: None)
    {'tuple': [{'constant': 1}, {'dict': [['x', {'constant': None}]]}]}
    """

    def below(name: Any, part: Any) -> Outline:
        return outline(part, leaf, (*path, str(name)))

    if (found := leaf(value, path)) is not None:
        return found
    if isinstance(value, _CONSTANTS):
        return {"constant": value}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        items = [below(n, v) for n, v in zip(value._fields, value, strict=True)]
        return {"named": type(value).__name__, "fields": list(value._fields), "items": items}
    if type(value) in (tuple, list):
        return {type(value).__name__: [below(i, v) for i, v in enumerate(value)]}
    if isinstance(value, dict):
        kind = "dict" if type(value) in (dict, OrderedDict) else "record"
        return {kind: [[_key(k), below(k, v)] for k, v in value.items()]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {"record": [[name, below(name, getattr(value, name))] for name in names]}
    raise ExportError(
        f"a {type(value).__name__} among the inputs or outputs cannot be written to a file; wrap the model "
        "in a module that takes and returns tensors, tuples, lists and dictionaries"
    )


def rebuild(tree: Outline, leaf: Callable[[Outline], Any]) -> Any:
    """The inverse of `outline`; `leaf` makes a value of whatever is not a container or constant.

    >>> rebuild({"tuple": [{"constant": 1}, {"x": 0}]}, lambda tree: "leaf")
    (1, 'leaf')
    """
    match tree:
        case {"constant": value}:
            return value
        case {"tuple": items}:
            return tuple(rebuild(item, leaf) for item in items)
        case {"list": items}:
            return [rebuild(item, leaf) for item in items]
        case {"dict": items}:
            return {key: rebuild(item, leaf) for key, item in items}
        case {"record": items}:
            return Fields((key, rebuild(item, leaf)) for key, item in items)
        case {"named": name, "fields": fields, "items": items}:
            return namedtuple(name, fields)(*(rebuild(item, leaf) for item in items))
        case Mapping():
            return leaf(tree)
    raise ArchiveError(f"the file describes its inputs or outputs by {tree!r}, which is not known here")


def check_spec(text: str, types: Collection[str]) -> None:
    """Refuse a tree spec of torch's that holds more than containers of these types.

    Reading one imports any module that an enumeration among its contexts names, and keys of dictionaries
    become source code: a context is nothing, a number or an empty list.
    """
    try:
        _, tree = json.loads(text)
        waiting = [tree]
        while waiting:
            part = waiting.pop()
            kind, context, children = part["type"], part["context"], part["children_spec"]
            if kind is None:
                fits = context is None and children == []
            else:
                value = json.loads(context)
                fits = kind in tuple(types) and (value is None or value == [] or type(value) is int)
            if not fits:
                raise ValueError(f"{kind} of {context}")
            waiting.extend(children)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ArchiveError(f"the file uses structures that are not known here: {error}") from None


def _key(key: Any) -> str | int:
    if isinstance(key, (str, int)):
        return key
    raise ExportError(f"a dictionary key of type {type(key).__name__} cannot be written to a file")
