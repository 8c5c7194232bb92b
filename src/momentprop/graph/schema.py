"""Reads the arguments of operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from momentprop.graph.private import OpOverload


def bind(op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Call arguments by their names in the operator's schema, defaults filled in."""
    bound = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    bound.update(zip((a.name for a in op._schema.arguments), args, strict=False))
    bound.update(kwargs)
    return bound


def inputs_of(node: fx.Node) -> list[fx.Node]:
    """The nodes among the arguments, in order, with repetitions."""
    return [n for n in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(n, fx.Node)]


def has_running_statistics(norm: fx.Node) -> bool:
    """Say whether a batch norm is a function of one value, rather than of all the batch."""
    mean, variance, training = norm.args[3:6]
    return not training and mean is not None and variance is not None


def pass_by_position(node: fx.Node) -> None:
    """Pass by position all arguments that the schema allows so: readers need to look in one place only."""
    if not isinstance(node.target, OpOverload):
        return
    args, kwargs = list(node.args), dict(node.kwargs)
    for argument in node.target._schema.arguments[len(args) :]:
        if argument.kwarg_only or not kwargs:
            break
        args.append(kwargs.pop(argument.name, argument.default_value))
    node.args, node.kwargs = tuple(args), kwargs
