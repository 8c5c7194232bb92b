"""The results page, made from the records that `momentprop reproduce` writes; nothing on it is typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from momentprop_reproduction.page import cifar, toy, uci
from momentprop_reproduction.page.markdown import seconds

Section = Callable[[dict[str, Any], str], str]

SECTIONS: dict[str, Section] = {
    "toy": toy.section,
    "uci": uci.section,
    "cifar": cifar.section,
}

_HEAD = """# Results: the paper's experiments

Made by `momentprop results` from the files in `results/`; do not edit. The paper: Brach, Sick & Duerr,
"Single-shot Bayesian approximation for neural networks" (arXiv 2308.12785). NN is the network with dropout
switched off, MC is MC dropout with T samples, MP is moment propagation in one pass: the paper tier follows
the paper's rules, the accurate tier is this library's default. All methods predict with the same trained
networks.
"""


def page(folder: Path, images: str = "images") -> str:
    """Markdown of every experiment that has a record in `folder`.

    Args:
        folder: with toy.json, uci.json, cifar.json; those that are missing are left out.
        images: where the figures lie, seen from the page.

    Raises:
        FileNotFoundError: there is no record at all.
    """
    files = [folder / f"{name}.json" for name in SECTIONS]
    found = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    if not found:
        names = ", ".join(file.name for file in files)
        raise FileNotFoundError(f"no {names} in {folder}; `momentprop reproduce` writes them")
    return "\n".join([_HEAD, *(section(record, images) for record in found)])


def section(record: dict[str, Any], images: str = "images") -> str:
    """Write the section of one experiment, and how its figures were made."""
    return SECTIONS[record["experiment"]](record, images) + "\n" + _origin(record)


def _origin(record: dict[str, Any]) -> str:
    """Write what stands with every figure: command, versions, data, seed."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    data = record["summary"].get("data")
    threads, cores = record["threads"], record["cores"]
    return (
        f"Made by `{record['command']}`, seed {record['seed']}"
        + (f"; data: {data}" if data else "")
        + f"; {versions}; {seconds(record['unit_seconds'])} of work, {threads} thread(s) a process, "
        f"on a machine of {cores} cores.\n"
    )
