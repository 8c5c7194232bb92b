"""Checks that a file is whole and holds nothing that reading it would execute.

torch.export.load unpickles example inputs and objects, and makes source code of graphs (graph_check.py). A
file that asks for more than `save` writes is refused before torch sees it: checksums find damage, the rest
finds intent.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from typing import IO, Any

from momentprop.errors import ArchiveError
from momentprop.exports.graph_check import PARAMETER, check_graph, strings
from momentprop.exports.metadata import MEMBER, Metadata

_PICKLED = ("custom_obj_", "opaque_obj_")
_LARGEST_TEXT = 2**28  # bytes of a member that is JSON


def member_names(archive: zipfile.ZipFile) -> list[str]:
    """Names of all members: each once, and none compressed, which torch does not do and bombs are."""
    names = archive.namelist()
    if len({name.lower() for name in names}) != len(names):  # readers differ in which of them they take
        raise ArchiveError("the file holds two parts of one name")
    if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
        raise ArchiveError("the file is damaged, or was changed: it holds compressed parts")
    return names


def read_metadata(archive: zipfile.ZipFile) -> Metadata:
    """The description in an archive that is a zip file."""
    names = member_names(archive)
    found = [name for name in names if name.partition("/")[2] == MEMBER]
    if len(found) != 1:
        raise ArchiveError("the file holds no description by momentprop: it was not written by mp.save")
    return Metadata.from_json(_read(archive, found[0]))


def check_whole(archive: zipfile.ZipFile, metadata: Metadata) -> None:
    """Check that every member is there and has its checksum, and that no other is there."""
    names = {name for name in member_names(archive) if name.partition("/")[2] != MEMBER}
    missing, added = sorted(set(metadata.sha256) - names), sorted(names - set(metadata.sha256))
    if missing or added:
        what = [f"lacks {', '.join(missing)}"] if missing else []
        what += [f"has the unknown part {', '.join(added)}"] if added else []
        raise ArchiveError(f"the file was changed after it was written: it {' and '.join(what)}")
    changed = [name for name in sorted(names) if checksum(archive, name) != metadata.sha256[name]]
    if changed:
        raise ArchiveError(f"the file is damaged or was changed: wrong checksum of {', '.join(changed)}")


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
            check_graph(_json(archive, name))


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
    for _, text in strings(config):
        if not PARAMETER.fullmatch(text):
            raise ArchiveError(f"the file holds a parameter of the name {text!r}, which is not read")


def _json(archive: zipfile.ZipFile, name: str) -> Any:
    try:
        return json.loads(_read(archive, name).decode())  # as torch reads it: no other encoding
    except (ValueError, RecursionError) as error:
        raise ArchiveError(f"{name} inside the file cannot be read: {error}") from None


def _read(archive: zipfile.ZipFile, name: str) -> bytes:
    if archive.getinfo(name).file_size > _LARGEST_TEXT:
        raise ArchiveError(f"{name} inside the file is far too large")
    with _opened(archive, name) as member:
        return member.read()


def _opened(archive: zipfile.ZipFile, name: str) -> IO[bytes]:
    return archive.open(name)
