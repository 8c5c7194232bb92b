"""Checks that a graph in a file is a network and nothing else.

torch writes a graph out as Python source and runs that: names of values become variables, those of
parameters attributes. It looks up whatever a graph names as a function, evaluates expressions for sizes, and
imports modules for structures. So a graph passes only where all it holds is known: operators that compute,
identifiers, sizes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from momentprop.errors import ArchiveError
from momentprop.exports.outline import check_spec
from momentprop.graph import private
from momentprop.graph.private import OpOverload

PARAMETER = re.compile(r"[\w.]*", re.ASCII)
_IDENTIFIER = re.compile(r"([A-Za-z_]\w*)?", re.ASCII)
_VERSION = re.compile(r"[\w.+-]*", re.ASCII)
_OPERATOR = re.compile(r"torch\.ops\.(aten|prims|momentprop)\.(\w+)\.(\w+)", re.ASCII)
_ARITHMETIC = re.compile(
    r"_operator\.(getitem|add|sub|mul|floordiv|truediv|mod|neg|pow|eq|ne|lt|le|gt|ge|and_|or_|not_)"
    r"|math\.(ceil|floor|trunc)|torch\.sym_(float|int|ite|max|min|not|sum)"
)
_WORDS = (
    r"[su]\d+|Symbol|positive|nonnegative|integer|real|Add|Mul|Pow|int_oo|Max|Min|Eq|Ne|Lt|Le|Gt|Ge|And|Or|Not|Mod"
    r"|PythonMod|FloorDiv|CleanDiv|CeilDiv|Integer|ModularIndexing|IntTrueDiv|FloatTrueDiv|TruncToInt|ToFloat"
    r"|Where|Rational|floor|ceiling|True|False"
)
_SIZE = re.compile(rf"(\d+(\.\d+)?(?!\w)|'[su]\d+'|({_WORDS})(?!\w)|[\s+\-*/(),<>=!&|~])*", re.ASCII)

_FILES = ("from_file",)  # computes, but from a file of this machine
_CHECKS = ("_assert_", "sym_constrain_range")  # operators that return nothing, and are for nothing else
_CALLS = ("builtins.tuple", "builtins.dict")  # of (args, kwargs), on flat tensors
_PARAMETERS = ("parameter_name", "buffer_name", "tensor_constant_name", "fqn")
_TEXTS = ("as_string", "as_strings")  # arguments of operators, which torch writes as literals
_ABSENT = ("guards_code", "metadata", "as_operator", "as_graph", "as_custom_obj", "custom_obj_values")


def check_graph(model: Any) -> None:
    """Refuse a graph that does anything but compute; `model` is the JSON that torch.export.save writes."""
    for key, value in strings(model, _ABSENT):
        if key == "target":
            if not is_operator(value):
                raise ArchiveError(
                    f"the network in the file calls {value!r}, which is no operator that computes"
                )
        elif key == "expr_str":
            if not _SIZE.fullmatch(value):
                raise ArchiveError(f"the file describes a size by {value!r}, which is no arithmetic")
        elif key in ("in_spec", "out_spec"):
            check_spec(value, _CALLS)
        elif key not in _TEXTS:
            known = PARAMETER if key in _PARAMETERS else _VERSION if key == "torch_version" else _IDENTIFIER
            if not known.fullmatch(value):
                raise ArchiveError(f"the file uses the name {value!r}, which is no name of a variable")


def strings(value: Any, absent: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """All strings at any depth, with the key they stand under; keys too, under ''."""
    waiting = [("", value)]
    while waiting:
        key, item = waiting.pop()
        if isinstance(item, Mapping):
            for name, part in item.items():
                if name in absent and part:
                    raise ArchiveError(f"the file holds {name}, which is not needed to compute, and not read")
                yield "", name
                waiting.append((name, part))
        elif isinstance(item, list):
            waiting.extend((key, part) for part in item)
        elif isinstance(item, str):
            yield key, item


def is_operator(target: str) -> bool:
    """Say whether the target is an operator of torch's dispatcher that computes, or arithmetic on sizes.

    What is in `torch.ops` besides, from TorchScript, also writes files and changes settings.
    """
    if _ARITHMETIC.fullmatch(target):
        return True
    if not (found := _OPERATOR.fullmatch(target)):
        return False
    namespace, name, overload = found.groups()
    try:
        full_name = f"{namespace}::{name}" + ("" if overload == "default" else f".{overload}")
        if name in _FILES or not private.has_kernel(full_name):
            return False
        operator = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except (RuntimeError, AttributeError):
        return False
    if not isinstance(operator, OpOverload):
        return False
    return bool(operator._schema.returns) or name.startswith(_CHECKS)
