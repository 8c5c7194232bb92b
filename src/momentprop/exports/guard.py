"""Checks that a file is whole, and is a network and nothing else.

torch.export.load unpickles example inputs and objects. It writes a graph out as Python source and runs that:
names of values become variables, those of parameters attributes. It looks up whatever a graph names as a
function, evaluates expressions for sizes, and imports modules for structures. So a file passes only where all
it holds is known: operators that compute, identifiers, sizes, plain bytes. What asks for more than `save`
writes is refused before torch sees it: checksums find damage, the rest finds intent.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from momentprop.errors import ArchiveError
from momentprop.exports.metadata import MEMBER, Metadata
from momentprop.exports.outline import check_spec
from momentprop.graph import private
from momentprop.graph.private import OpOverload

_PICKLED = ("custom_obj_", "opaque_obj_")
_LARGEST_TEXT = 2**28  # bytes of a member that is JSON

_PARAMETER = re.compile(r"[\w.]*", re.ASCII)
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


def member_names(archive: zipfile.ZipFile) -> list[str]:
    """Names of all members: each once, and none compressed, which torch does not do and bombs are."""
    names = archive.namelist()
    if len({name.lower() for name in names}) != len(names):  # readers differ in which of them they take
        raise ArchiveError("the file holds two parts of one name")
    if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
        raise ArchiveError("the file is damaged, or was changed: it holds compressed parts")
    return names


def read_metadata(archive: zipfile.ZipFile) -> Metadata:
    """The description in an archive that holds what the description says, and nothing else."""
    names = member_names(archive)
    found = [name for name in names if name.partition("/")[2] == MEMBER]
    if len(found) != 1:
        raise ArchiveError("the file holds no description by momentprop: it was not written by mp.save")
    metadata = Metadata.from_json(_read(archive, found[0]))
    told, there = metadata.sha256, checksums(archive)
    missing, added = sorted(set(told) - set(there)), sorted(set(there) - set(told))
    if missing or added:
        what = [f"lacks {', '.join(missing)}"] if missing else []
        what += [f"has the unknown part {', '.join(added)}"] if added else []
        raise ArchiveError(f"the file was changed after it was written: it {' and '.join(what)}")
    if changed := [name for name in sorted(there) if there[name] != told[name]]:
        raise ArchiveError(f"the file is damaged or was changed: wrong checksum of {', '.join(changed)}")
    return metadata


def checksums(archive: zipfile.ZipFile) -> dict[str, str]:
    """The SHA-256 of every member but the description."""
    found = {}
    for name in archive.namelist():
        if name.partition("/")[2] != MEMBER:
            with archive.open(name) as member:
                found[name] = hashlib.file_digest(member, "sha256").hexdigest()  # type: ignore[arg-type]
    return found


def check_harmless(archive: zipfile.ZipFile) -> None:
    """Check that torch.export.load would unpickle nothing, call only operators and evaluate only sizes."""
    names = member_names(archive)
    if len({name.partition("/")[0] for name in names}) != 1:  # torch takes the first name's for that of all
        raise ArchiveError("the file holds more than one folder")
    for name in names:
        path = name.partition("/")[2]
        if path.startswith("data/sample_inputs/") and archive.getinfo(name).file_size:
            raise ArchiveError("the file holds pickled example inputs, which are not read")
        if path.startswith(("data/weights/", "data/constants/")):
            if path.endswith(".json"):
                _check_payload(_json(archive, name))
            elif path.endswith(".pt"):
                raise ArchiveError("the file holds pickled weights, which are not read")
        elif path.startswith("data/aotinductor/"):
            raise ArchiveError("the file holds machine code among a network's graph")
        elif path.startswith("models/"):
            _check_graph(_json(archive, name))


def _check_payload(config: Any) -> None:
    for entry in config["config"].values():
        if entry["use_pickle"] or entry["path_name"].startswith(_PICKLED):
            raise ArchiveError(f"the file holds the pickled object {entry['path_name']}, which is not read")
    for _, text in _strings(config):
        if not _PARAMETER.fullmatch(text):
            raise ArchiveError(f"the file holds a parameter of the name {text!r}, which is not read")


def _json(archive: zipfile.ZipFile, name: str) -> Any:
    try:
        return json.loads(_read(archive, name).decode())  # as torch reads it: no other encoding
    except (ValueError, RecursionError) as error:
        raise ArchiveError(f"{name} inside the file cannot be read: {error}") from None


def _read(archive: zipfile.ZipFile, name: str) -> bytes:
    if archive.getinfo(name).file_size > _LARGEST_TEXT:
        raise ArchiveError(f"{name} inside the file is far too large")
    return archive.read(name)


def _check_graph(model: Any) -> None:
    """Refuse a graph that does anything but compute; `model` is the JSON that torch.export.save writes."""
    for key, value in _strings(model, _ABSENT):
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
            known = _PARAMETER if key in _PARAMETERS else _VERSION if key == "torch_version" else _IDENTIFIER
            if not known.fullmatch(value):
                raise ArchiveError(f"the file uses the name {value!r}, which is no name of a variable")


def _strings(value: Any, absent: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
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
