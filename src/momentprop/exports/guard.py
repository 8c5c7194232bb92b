"""Whether a file is whole, and holds nothing that reading it would execute.

torch.export.load unpickles example inputs and objects, looks up functions by their names, and evaluates
expressions for sizes. None of that is needed for what `save` writes, so a file that asks for it is refused
before torch sees it: checksums find damage, the rest finds intent.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from typing import IO, Any

from momentprop.errors import ArchiveError
from momentprop.exports.metadata import MEMBER, Metadata

# operators that compute, and arithmetic on sizes
_ARITHMETIC = "getitem|add|sub|mul|floordiv|truediv|mod|neg|pow|eq|ne|lt|le|gt|ge|and_|or_|not_"
_TARGET = re.compile(
    rf"torch\.ops\.(aten|prims|higher_order|momentprop)\.\w+(\.\w+)?|_operator\.({_ARITHMETIC})"
    r"|math\.(ceil|floor|trunc)|torch\.sym_\w+"
)
_REFUSED = ("torch.ops.aten.from_file",)
_EXPRESSION = re.compile(r"[\w\s+\-*/%(),.'<>=!&|~]*")
_WORD = re.compile(
    r"[su]\d+|Symbol|positive|nonnegative|integer|real|Add|Mul|Pow|int_oo|Max|Min|Eq|Ne|Lt|Le|Gt|Ge|And|Or|Not|Mod|PythonMod|FloorDiv|CleanDiv|CeilDiv"
    r"|Integer|ModularIndexing|IntTrueDiv|FloatTrueDiv|TruncToInt|ToFloat|Where|Rational|floor|ceiling|True|False"
)
_PICKLED = ("custom_obj_", "opaque_obj_")
_LARGEST_TEXT = 2**28  # bytes of a member that is JSON


def read_metadata(archive: zipfile.ZipFile) -> Metadata:
    """The description in an archive that is a zip file."""
    names = _names(archive)
    found = [name for name in names if name.partition("/")[2] == MEMBER]
    if len(found) != 1:
        raise ArchiveError("the file holds no description by momentprop: it was not written by mp.save")
    return Metadata.from_json(_read(archive, found[0]))


def check_whole(archive: zipfile.ZipFile, metadata: Metadata) -> None:
    """Every member is there, has its checksum, and no other is."""
    names = {name for name in _names(archive) if name.partition("/")[2] != MEMBER}
    missing, added = sorted(set(metadata.sha256) - names), sorted(names - set(metadata.sha256))
    if missing or added:
        what = [f"lacks {', '.join(missing)}"] if missing else []
        what += [f"has the unknown part {', '.join(added)}"] if added else []
        raise ArchiveError(f"the file was changed after it was written: it {' and '.join(what)}")
    changed = [name for name in sorted(names) if checksum(archive, name) != metadata.sha256[name]]
    if changed:
        raise ArchiveError(f"the file is damaged or was changed: wrong checksum of {', '.join(changed)}")


def check_harmless(archive: zipfile.ZipFile) -> None:
    """Reading it with torch.export.load unpickles nothing, calls operators only, evaluates sizes only."""
    for name in _names(archive):
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


def checksum(archive: zipfile.ZipFile, name: str) -> str:
    digest = hashlib.sha256()
    with _opened(archive, name) as member:
        while block := member.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _check_payload(config: Any) -> None:
    for entry in config["config"].values():
        if entry["use_pickle"] or entry["path_name"].startswith(_PICKLED):
            raise ArchiveError(f"the file holds the pickled object {entry['path_name']}, which is not read")


def _check_graph(model: Any) -> None:
    if model.get("guards_code"):
        raise ArchiveError("the file holds Python code, which is not run")
    for key, value in _entries(model):
        if key == "target" and isinstance(value, str):
            if not _TARGET.fullmatch(value) or value.startswith(_REFUSED):
                raise ArchiveError(
                    f"the network in the file calls {value!r}, which is no operator that computes"
                )
        elif key == "expr_str":
            words = re.findall(r"[A-Za-z_]\w*", str(value))
            if not _EXPRESSION.fullmatch(str(value)) or not all(map(_WORD.fullmatch, words)):
                raise ArchiveError(f"the file describes a size by {value!r}, which is no arithmetic")
        elif key in ("in_spec", "out_spec"):
            kinds = {v for k, v in _entries(json.loads(value)) if k == "type"}
            if "__" in value or not kinds <= {"builtins.tuple", "builtins.list", "builtins.dict", None}:
                raise ArchiveError("the file uses structures other than tuples, lists and dictionaries")
        elif key == "source_fn_stack":
            raise ArchiveError("the file names functions by their places, which are not looked up")


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """All key-value pairs, at any depth."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Mapping):
            yield from item.items()
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)


def _names(archive: zipfile.ZipFile) -> list[str]:
    names = archive.namelist()
    if len({name.lower() for name in names}) != len(names):  # readers differ in which of them they take
        raise ArchiveError("the file holds two parts of one name")
    return names


def _json(archive: zipfile.ZipFile, name: str) -> Any:
    try:
        return json.loads(_read(archive, name))
    except (ValueError, RecursionError) as error:
        raise ArchiveError(f"{name} inside the file cannot be read: {error}") from None


def _read(archive: zipfile.ZipFile, name: str) -> bytes:
    if archive.getinfo(name).file_size > _LARGEST_TEXT:
        raise ArchiveError(f"{name} inside the file is far too large")
    with _opened(archive, name) as member:
        return member.read()


def _opened(archive: zipfile.ZipFile, name: str) -> IO[bytes]:
    return archive.open(name)
