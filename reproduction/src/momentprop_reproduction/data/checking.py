"""Reads what is there, and compares it with what was published."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from momentprop.errors import DataError
from momentprop_reproduction.data.batches import FOLDER
from momentprop_reproduction.data.catalogue import BATCH_MD5, CIFAR10, CIFAR10_FILE, SETS
from momentprop_reproduction.data.cifar10 import find_cifar10
from momentprop_reproduction.data.errors import MissingDataError
from momentprop_reproduction.data.uci import UciSet, find_uci, load_uci

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Finding:
    """Holds what is known of one set: where it is (None: nowhere), whether it is sound, and what was seen."""

    name: str
    path: Path | None
    sound: bool
    detail: str


def find(name: str, root: str | os.PathLike[str] | None = None) -> Path | None:
    """Find where a set is, without reading it."""
    try:
        return find_cifar10(root).path if name == CIFAR10 else find_uci(name, root)
    except MissingDataError:
        return None


def examine(name: str, root: str | os.PathLike[str] | None = None) -> Finding:
    """Read a set from its source, not from the cache, and verify numbers, counts and checksums."""
    path = find(name, root)
    if path is None:
        return Finding(name, None, True, f"download it with `momentprop data get {name}`")
    try:
        detail = _examine_cifar10(root) if name == CIFAR10 else _examine_uci(name, root)
    except DataError as error:
        return Finding(name, path, False, str(error))
    return Finding(name, path, True, detail)


def _examine_uci(name: str, root: str | os.PathLike[str] | None) -> str:
    content = load_uci(name, root)
    rows, columns = content.features.shape
    if checksum(content) != SETS[name].content:
        raise DataError(
            f"{find_uci(name, root)} can be read ({rows:,} rows, {columns} features, {len(content.splits)} "
            f"splits) but is not what was published ({SETS[name].about}), so results would not compare; "
            f"delete it and fetch it again with `momentprop data get {name}`"
        )
    return f"{SETS[name].about}, checksum agrees ({content.variant})"


def _examine_cifar10(root: str | os.PathLike[str] | None) -> str:
    copy = find_cifar10(root)
    decoded = copy.decode(copy.path)
    counts = " + ".join(f"{len(labels):,}" for _, labels in decoded.splits.values())
    seen = f"{counts} images ({decoded.variant})"
    if copy.path.name == FOLDER:
        wrong = [file for file, md5 in BATCH_MD5.items() if _hash(copy.path / file, "md5") != md5]
    elif copy.path.name == CIFAR10_FILE:
        wrong = [CIFAR10_FILE] if _hash(copy.path, "sha256") != SETS[CIFAR10].sha256 else []
    else:
        return f"{seen}, counts agree; nobody published a checksum of this copy"
    if wrong:
        raise DataError(
            f"{copy.path} can be read, but {', '.join(wrong)} is not what was published; "
            f"delete it and fetch it again with `momentprop data get {CIFAR10}`"
        )
    return f"{seen}, checksum agrees"


def checksum(content: UciSet) -> str:
    """SHA-256 of all numbers of a set, the same for every copy."""
    digest = hashlib.sha256()
    numbers = [content.n_hidden, content.n_epochs, *content.dropout_rates, *content.tau_values]
    arrays = [content.features.numpy(), content.target.numpy(), np.array(numbers, dtype=np.float64)]
    arrays += [rows.numpy() for split in content.splits for rows in split]
    for array in arrays:
        digest.update(str(array.shape).encode())
        digest.update(array.astype(array.dtype.newbyteorder("<")).tobytes())  # the same on every machine
    return digest.hexdigest()


def _hash(path: Path, kind: str) -> str:
    if not path.is_file():
        return ""
    digest = hashlib.new(kind, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
