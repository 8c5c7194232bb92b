"""Says where in the user's model a node comes from."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
from torch import fx

from momentprop.errors import Place

DECOMPOSED = "decomposed_from"  # what meta says of nodes that an operator was decomposed into: its name
_KEYS = ("nn_module_stack", "stack_trace", "torch_fn", "from_node", "source_fn_stack", DECOMPOSED)
TORCH = inspect.getfile(torch).removesuffix("__init__.py")  # the folder of its files


def place_of(node: fx.Node, reason: str = "") -> Place:
    """Operator, module path and source line of a node, for messages."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    frames = re.split(r'^\s*(?=File ")', str(node.meta.get("stack_trace") or ""), flags=re.MULTILINE)
    frames = [" ".join(frame.split()) for frame in frames if frame.strip()]
    own = [frame for frame in frames if TORCH not in frame]  # the user's, where there is one
    source = (own or frames or ["(no source line recorded)"])[-1]
    module = stack[-1][0] if stack else ""
    return Place(str(node.target), module.removeprefix("model").removeprefix("."), source, reason)


def place_meta(node: fx.Node) -> dict[str, Any]:
    """Return what the meta of a node says about its place, for nodes that come from the same line."""
    return {key: node.meta[key] for key in _KEYS if key in node.meta}
