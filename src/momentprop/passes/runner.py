"""Runs passes over a graph until none of them finds anything to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from momentprop.graph.edit import Editor

Rewrite = Callable[[fx.Node, Editor], fx.Node | None]


@dataclass(frozen=True)
class Pass:
    """Puts another node in the place of one that it recognises.

    `rewrite(node, edit)` returns it (the node itself, if that was changed), or None to leave the node alone.
    New nodes stand before the one that is looked at. What nothing uses any more is erased by the runner.
    """

    looks_at: Callable[[Any], bool]  # operators that the last node of a match may have
    rewrite: Rewrite
    exact: bool = True  # the same function of the inputs, whatever the noise is

    def __str__(self) -> str:
        return self.rewrite.__name__


def run(graph: fx.Graph, passes: Sequence[Pass], inputs: Sequence[fx.Node] = ()) -> None:
    """Apply passes in their order to all nodes, again and again, until nothing changes.

    So every pass sees what the others have made. `inputs` are the placeholders whose values vary from call to
    call.
    """
    edit, changed = Editor(graph, inputs), True
    while changed:
        changed = False
        for one in passes:
            for node in list(graph.nodes):
                if node.op == "call_function" and node not in edit.erased and one.looks_at(node.target):
                    changed |= _apply(one, node, edit)
    graph.lint()


def _apply(one: Pass, node: fx.Node, edit: Editor) -> bool:
    with edit.at(node):
        new = one.rewrite(node, edit)
    if new is not None and new is not node:
        edit.replace(node, new)
    return new is not None
