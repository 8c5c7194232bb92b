"""Parameters of an exported program under names that are Python's.

Modules may be called anything (`conv 1`, `class`), and torch writes their names into source code as they are.
"""

from __future__ import annotations

import keyword
import re

from torch.export import ExportedProgram

from momentprop.exports.interface import unique


def use_plain_names(exported: ExportedProgram) -> None:
    """Rename what is no name: `conv 1.weight` is `conv_1.weight` then."""
    old = sorted([*exported.state_dict, *exported.constants], key=lambda name: plain(name) != name)
    new = dict(zip(old, unique([plain(name) for name in old]), strict=True))
    signature = exported.graph_signature
    for spec in (*signature.input_specs, *signature.output_specs):
        if spec.target is not None:
            spec.target = new.get(spec.target, spec.target)
    exported._state_dict = {new[name]: value for name, value in exported.state_dict.items()}
    exported._constants = {new[name]: value for name, value in exported.constants.items()}
    for entry in exported.module_call_graph:
        entry.fqn = plain(entry.fqn)


def plain(name: str) -> str:
    """The name with every part made of letters, digits and underscores.

    >>> plain("conv 1.class.0.weight")
    'conv_1.class_.0.weight'
    """
    parts = [re.sub(r"\W", "_", part, flags=re.ASCII) for part in name.split(".")]
    return ".".join(f"{part}_" if keyword.iskeyword(part) else part for part in parts)
