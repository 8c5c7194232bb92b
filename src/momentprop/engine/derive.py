"""The gain of an element-by-element rule that does not give one, derived once, at conversion.

It is the derivative of the output's mean by the input's, the variance held fixed. It is taken symbolically
on the traced shapes, and what is left are plain operators: nothing is differentiated at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from momentprop.errors import CovarianceError
from momentprop.graph.edit import fake_mode
from momentprop.graph.place import place_of
from momentprop.moments import Moments, is_moments, mean_of
from momentprop.passes.coverage import is_linearized
from momentprop.rules.facts import carried
from momentprop.rules.families import once
from momentprop.rules.linearization import Linearization, Propagated, residual, scaled
from momentprop.rules.registry import Role, Rule

_VALUES = (Tensor, torch.SymInt)


@dataclass(frozen=True, eq=False)
class Derived:
    """A rule at one node, with its gain as a program of plain operators."""

    rule: Rule
    gain: Callable[..., Tensor]

    @property
    def role(self) -> Role:
        return self.rule.role

    def propagate(self, *args: Any, **kwargs: Any) -> Propagated:
        out = self.rule(*args, **kwargs)
        leaves = pytree.tree_leaves((args, kwargs), is_leaf=is_moments)
        (x,) = [v for v in leaves if is_moments(v)]
        given = [mean_of(v) for v in leaves if isinstance(v, (Moments, *_VALUES))]
        gain = once(lambda: self.gain(x.variance, *given))

        def linearize() -> Linearization:
            return scaled(gain(), residual(out.variance, gain(), x.variance))

        return Propagated(carried(out, x, gain, linear=False, noisy=True), linearize)


def derived(node: fx.Node, rule: Rule, random: Collection[fx.Node]) -> Rule | Derived:
    """The rule as it is where it says how its operator acts on deviations, else with its gain derived."""
    if not rule.elementwise or is_linearized(node, rule):
        return rule
    return Derived(rule, derive_gain(node, rule, random))


def derive_gain(node: fx.Node, rule: Rule, random: Collection[fx.Node]) -> Callable[..., Tensor]:
    """The gain of a rule at a node of the graph."""
    leaves, spec = pytree.tree_flatten(fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val")))
    nodes = [n for n in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(n, fx.Node)]
    given: list[Any] = [v for v in leaves if isinstance(v, _VALUES)]
    index = next(i for i, n in enumerate(nodes) if n in random)
    mode = fake_mode(given)

    def gain(variance: Tensor, *values: Any) -> Tensor:
        def mean(x: Tensor) -> Tensor:
            rest = iter([*values[:index], Moments(x, variance), *values[index + 1 :]])
            filled = [next(rest) if isinstance(leaf, _VALUES) else leaf for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(filled, spec)
            return mean_of(rule(*args, **kwargs))

        out, vjp = torch.func.vjp(mean, values[index])  # type: ignore[misc]
        return vjp(torch.ones_like(out))[0]

    try:
        with mode:
            if given[index].shape != node.meta["val"].shape:
                raise ValueError("its random input is broadcast")
            # a tensor of its own: the same one twice would be one input of the program
            program = make_fx(gain)(torch.empty_like(given[index]), *given)
    except Exception as error:
        raise CovarianceError(
            f"the gain of a rule could not be derived: {error}\n  {place_of(node)}"
        ) from error
    program.graph.eliminate_dead_code()
    program.recompile()
    return program
