"""Moves activations like ReLU in front of dropout."""

from __future__ import annotations

from torch import fx

from momentprop.graph.edit import Editor
from momentprop.graph.ops import HOMOGENEOUS, SCALING_DROPOUTS
from momentprop.passes.runner import Pass


def activate_before_dropout(activation: fx.Node, edit: Editor) -> fx.Node | None:
    """f(c x) = c f(x) for c >= 0 and f like ReLU: dropout may wait, which multiplies by 0 or 1/(1-p).

    The activation then sees x, which is close to Gaussian or not random at all, instead of a value that is
    often 0; and the noise of dropout is known exactly behind it.
    """
    dropout = activation.args[0]
    if not isinstance(dropout, fx.Node) or dropout.target not in SCALING_DROPOUTS or len(dropout.users) != 1:
        return None
    with edit.at(dropout):
        first = edit.op(
            activation.target,
            dropout.args[0],
            *activation.args[1:],
            place=activation,
            value=activation.meta["val"],
        )
    dropout.args = (first, *dropout.args[1:])
    return dropout


ACTIVATE_BEFORE_DROPOUT = Pass(HOMOGENEOUS.__contains__, activate_before_dropout)
