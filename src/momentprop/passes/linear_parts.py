"""Whether a rule says how its operator acts on deviations: it is asked, on tensors without values."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from momentprop.moments import Moments
from momentprop.rules.registry import Role, Rule

_KNOWN: WeakKeyDictionary[Rule, bool] = WeakKeyDictionary()  # a rule answers alike wherever it is used


def is_linearized(node: fx.Node, rule: Rule) -> bool:
    """Say whether the rule's answer for this node comes with a linear part."""
    if rule.role is Role.SHAPE:
        return True
    if rule not in _KNOWN:
        _KNOWN[rule] = _asked(node, rule)
    return _KNOWN[rule]


def _asked(node: fx.Node, rule: Rule) -> bool:
    def value(n: fx.Node) -> Any:
        return pytree.tree_map_only((Tensor, torch.SymInt), _example, n.meta.get("val"))

    def moments(n: fx.Node) -> Any:
        return pytree.tree_map_only(Tensor, _random, value(n))

    try:
        with torch.no_grad():
            first = fx.map_arg(node.args[:1], moments)
            rest, kwargs = fx.map_arg((node.args[1:], node.kwargs), value)
            return rule.propagate(*first, *rest, **kwargs).linearize is not None
    except Exception:  # whatever is wrong shows when its gain is derived, or when the network runs
        return not (rule.elementwise and node.args and isinstance(node.args[0], fx.Node))


def _example(value: Any) -> Any:
    """Stand in for what was traced, with the sizes of the example inputs and without values."""
    if isinstance(value, Tensor):
        return torch.empty([_size(n) for n in value.shape], dtype=value.dtype, device="meta")
    return _size(value)


def _size(size: Any) -> int:
    hint = size if isinstance(size, int) else size.node.hint
    return 2 if hint is None else int(hint)


def _random(value: Tensor) -> Any:
    return Moments(value, torch.ones_like(value)) if value.is_floating_point() else value
