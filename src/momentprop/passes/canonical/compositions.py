"""Recognises compositions of operators that work element by element on one value and use it several times.

x * sigmoid(x), tanh-GELU written out with powers and tanh, x * x * x. Rules of the parts would take factors
for independent that are functions of the same value. Such a composition becomes a single activation, whose
moments come by quadrature.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from momentprop.gaussian.quadrature import expectation
from momentprop.graph.edit import Editor, extracted
from momentprop.graph.ops import is_pointwise
from momentprop.graph.reach import upstream
from momentprop.graph.schema import inputs_of
from momentprop.moments import Moments
from momentprop.passes.runner import Pass
from momentprop.rules.linearization import Propagated, residual, scaled
from momentprop.rules.registry import Rule

aten = torch.ops.aten


def compose(last: fx.Node, edit: Editor) -> fx.Node | None:
    """The largest composition that ends here, or a part of a larger one that is used elsewhere too."""
    roots = _Roots(edit.varying)
    first = roots.of(last)
    if first is last or _dtype(first) != _dtype(last):
        return None
    outside = [user for user in last.users if roots.of(user) is not first]
    if not outside:
        return None
    inner = upstream(last, lambda n: n in edit.varying and n is not first)
    joins = any(sum(n in edit.varying for n in inputs_of(node)) > 1 for node in inner)
    if not joins or (len(inner) == 1 and last.target is aten.mul.Tensor):  # x * x has a rule
        return None
    if len(outside) < len(last.users):  # inside, a copy of it stays
        kept = edit.again(last)
        last.replace_all_uses_with(kept, delete_user_cb=lambda user: user not in outside)
    graph, given = extracted(inner, [first])
    return edit.op(_rule(graph), *given, value=last.meta["val"])


class _Roots:
    """Finds the one value from which a value of a graph is computed element by element."""

    def __init__(self, varying: set[fx.Node]) -> None:
        self.varying = varying
        self.known: dict[fx.Node, fx.Node] = {}

    def of(self, node: fx.Node) -> fx.Node:
        """Return that value; the node itself, where it is no such function of one value."""
        pending = [node]  # no recursion: chains may be long
        while pending:
            last = pending[-1]
            inputs = [n for n in last.all_input_nodes if n in self.varying]
            unknown = [n for n in inputs if n not in self.known]
            if last not in self.known and _is_pointwise(last) and unknown:
                pending += unknown
            elif pending.pop() not in self.known:
                self.known[last] = self._root(last, {self.known.get(n, n) for n in inputs})
        return self.known[node]

    def _root(self, node: fx.Node, roots: set[fx.Node]) -> fx.Node:
        if len(roots) != 1 or not _is_pointwise(node):
            return node
        (first,) = roots
        return first if _shape(first) == _shape(node) else node


def _is_pointwise(node: fx.Node) -> bool:
    value = node.meta.get("val")
    fits = isinstance(value, Tensor) and (value.is_floating_point() or value.dtype == torch.bool)
    return fits and is_pointwise(node.target)


def _shape(node: fx.Node) -> Any:
    """Return the shape in a form that compares without asking anything of symbolic sizes."""
    value = node.meta.get("val")
    return tuple(map(str, value.shape)) if isinstance(value, Tensor) else None


def _dtype(node: fx.Node) -> Any:
    return getattr(node.meta.get("val"), "dtype", None)


def _rule(graph: fx.Graph) -> Rule:
    """Moments of a composition by quadrature."""
    function = fx.GraphModule(torch.nn.Module(), graph, "Composed")

    def moments(x: Moments, *constants: Any) -> Propagated:
        center = function(x.mean, *constants)

        def inside(t: Tensor) -> Tensor:
            """Count points outside the function's domain as its center."""
            value = function(t, *constants)
            return torch.where(value.isfinite(), value, center)

        mean, variance, gain = expectation(inside, x.mean, x.variance)
        return Propagated(Moments(mean, variance), lambda: scaled(gain, residual(variance, gain, x.variance)))

    return Rule(
        function,  # type: ignore[arg-type]
        moments,
        exactness="approximate: quadrature with 13 points, if Gaussian",
        reference="Gauss-Hermite",
        elementwise=True,
    )


COMPOSE = Pass(is_pointwise, compose)
