"""Finds whether a rule says how its operator acts on deviations, by running it on tensors without values."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from momentprop.graph.private import FakeTensor, enable_python_dispatcher
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
    def moments(n: fx.Node) -> Any:
        return pytree.tree_map_only(Tensor, _random, n.meta.get("val"))

    values = [v for n in (node, *node.all_input_nodes) for v in pytree.tree_leaves(n.meta.get("val"))]
    mode = next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)
    if mode is None:
        return True
    try:
        with mode, enable_python_dispatcher(), torch.no_grad():
            first = fx.map_arg(node.args[:1], moments)
            rest, kwargs = fx.map_arg((node.args[1:], node.kwargs), lambda n: n.meta.get("val"))
            return rule.propagate(*first, *rest, **kwargs).linearize is not None
    except Exception:  # whatever is wrong shows when its gain is derived, or when the network runs
        return not (rule.elementwise and node.args and isinstance(node.args[0], fx.Node))


def _random(value: Tensor) -> Any:
    return Moments(value, torch.ones_like(value)) if value.is_floating_point() else value
