"""Reduces the many ways to write random numbers to a small vocabulary, so that few rules cover them.

What is left for noise in a traced graph: dropouts, `bernoulli.p(like, p)` with `like` a plain tensor of the
shape, `bernoulli.default` of probabilities that vary, normal and uniform numbers, and layers with a drop
probability among their arguments. Rewritten to Bernoulli variables are

    floor(keep + rand(shape)),    rand(shape) < keep  (and <=, >, >=),    bernoulli(full(shape, keep)).

A comparison is a mask of booleans, and so is a variable that is cast to them. With B its Bernoulli variable
as a number, what is done with it becomes arithmetic, for which there are rules:

    x * mask = x B,    where(mask, x, y) = x B + y (1 - B),    x.masked_fill(mask, c) = x (1 - B) + c B.

Everything here is exact, for every outcome and not only in distribution, given B.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from momentprop.graph.edit import emit, remove_unused
from momentprop.graph.ops import (
    ABOVE,
    ARRANGEMENTS,
    BELOW,
    BERNOULLIS,
    CASTS,
    CHOICES,
    DIFFERENCES,
    FILLS,
    PRODUCTS,
    QUOTIENTS,
    SUMS,
)

aten = torch.ops.aten


def normalize_noise(graph: fx.Graph) -> None:
    """Rewrite the functional graph in place."""
    for node in list(graph.nodes):
        with graph.inserting_before(node):
            variable = _bernoulli(graph, node)
        if variable is None:
            continue
        if node.meta["val"].is_floating_point():
            node.replace_all_uses_with(variable)
            _spell_out_casts(graph, variable)
        else:
            _spell_out_mask(graph, node, variable)
    remove_unused(graph)


def _bernoulli(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """The Bernoulli variable, a floating-point 0 or 1, that this node is, if it is one."""
    if node.target in BERNOULLIS:
        like: Any = node.args[0]
        probability = _probability(node)
        if probability is None:
            return None if node.target is aten.bernoulli.default else _of_tensor(graph, node)
    else:
        uniform, probability = _uniform_chance(node)
        if uniform is None or probability is None or not 0 <= probability <= 1:
            return None
        like = uniform
    value = like.meta["val"]
    dtype = value.dtype if value.is_floating_point() else torch.get_default_dtype()
    blank = _blank(graph, like, dtype)
    if probability in (0, 1):
        return emit(graph, aten.full_like.default, (blank, float(probability)), node)
    return emit(graph, aten.bernoulli.p, (blank, float(probability)), node)


def _probability(node: fx.Node) -> float | None:
    """Return the probability of a Bernoulli operator, where it is one number."""
    if node.target is aten.bernoulli.p:
        return node.args[1] if len(node.args) > 1 else 0.5  # type: ignore[return-value]
    return constant(node.args[-1])


def _of_tensor(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Rewrite tensor.bernoulli_(probabilities)."""
    like, probabilities = node.args[:2]
    wide = emit(graph, aten.expand_as.default, (probabilities, like), node)
    return emit(graph, aten.bernoulli.default, (wide,), node)


def _uniform_chance(node: fx.Node) -> tuple[fx.Node | None, float | None]:
    """A uniform variable and the probability that this node, made of it alone, is 1 or True."""
    if node.target is aten.floor.default:
        total = node.args[0]
        if isinstance(total, fx.Node) and total.target is aten.add.Tensor and not total.kwargs:
            a, b = total.args[:2]
            uniform, number = (a, b) if _is_uniform(a) else (b, a)
            if _is_uniform(uniform) and len(total.users) == 1:
                return uniform, constant(number)  # type: ignore[return-value]
    elif node.target in (*BELOW, *ABOVE):
        a, b = node.args[:2]
        threshold, below = (b, node.target in BELOW) if _is_uniform(a) else (a, node.target in ABOVE)
        uniform, number = (a if _is_uniform(a) else b), constant(threshold)
        if _is_uniform(uniform) and number is not None:
            return uniform, number if below else 1 - number  # type: ignore[return-value]
    return None, None


def _is_uniform(node: Any) -> bool:
    """Say whether a node draws numbers from [0, 1) that are used once."""
    if not isinstance(node, fx.Node) or len(node.users) != 1:
        return False
    if node.target is aten.uniform.default:
        return tuple(node.args[1:3]) in ((), (0,), (0, 1))
    return node.target in (aten.rand.default, aten.rand_like.default)


def _blank(graph: fx.Graph, like: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Make zeros of the same shape: what lends a noise its shape must not be random or uninitialised."""
    device = like.meta["val"].device
    options: Any = {"dtype": dtype, "device": device}
    if like.target in (aten.rand.default, aten.empty.memory_format):
        return emit(graph, aten.zeros.default, (like.args[0],), like, options)
    if like.target in (aten.rand_like.default, aten.empty_like.default, aten.uniform.default):
        inner: Any = like.args[0]
        return _blank(graph, inner, dtype)
    if like.target is aten.new_empty.default:
        return emit(graph, aten.new_zeros.default, like.args[:2], like, options)
    if like.meta["val"].dtype == dtype and constant(like) is not None:
        return like
    return emit(graph, aten.zeros_like.default, (like,), like, {"dtype": dtype})


def _spell_out_casts(graph: fx.Graph, variable: fx.Node) -> None:
    """Spell out the masks that a Bernoulli variable is cast to."""
    for user in list(variable.users):
        if user.target in ARRANGEMENTS:
            _spell_out_casts(graph, user)
        elif user.target in CASTS and not user.meta["val"].is_floating_point():
            _spell_out_mask(graph, user, variable)


def _spell_out_mask(graph: fx.Graph, mask: fx.Node, variable: fx.Node) -> None:
    """Do with the Bernoulli variable everything that is done with its mask of booleans (or integers)."""
    pending = [(mask, variable)]
    while pending:
        mask, variable = pending.pop()
        for user in list(mask.users):
            with graph.inserting_before(user):
                new = _with_variable(graph, user, mask, variable)
                if new is None:  # no arithmetic form: leave it a mask, for coverage to report if need be
                    new = emit(graph, aten.to.dtype, (variable, mask.meta["val"].dtype), mask)
                    user.replace_input_with(mask, new)
                elif user.meta["val"].is_floating_point():
                    user.replace_all_uses_with(_cast(graph, new, user.meta["val"].dtype))
                else:
                    pending.append((user, new))


def _with_variable(graph: fx.Graph, user: fx.Node, mask: fx.Node, variable: fx.Node) -> fx.Node | None:
    """Write what `user` makes of the mask as arithmetic of its variable; None if there is no such form."""
    op, args = user.target, user.args
    value = user.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    if op in CASTS or op is aten.type_as.default:
        return variable if args[0] is mask else None
    if op in ARRANGEMENTS and args[0] is mask:
        return emit(graph, op, (variable, *args[1:]), user)
    if op in (aten.logical_not.default, aten.bitwise_not.default) and mask.meta["val"].dtype == torch.bool:
        return _complement(graph, variable, user)
    return _in_arithmetic(graph, user, mask, variable) if value.is_floating_point() else None


def _in_arithmetic(graph: fx.Graph, user: fx.Node, mask: fx.Node, variable: fx.Node) -> fx.Node | None:
    """Write what becomes a real number of the mask as arithmetic of its variable."""
    op, args = user.target, user.args
    number = _cast(graph, variable, user.meta["val"].dtype)
    if op is aten.mul.Tensor and args[0] is not args[1]:
        return emit(graph, op, tuple(number if a is mask else a for a in args), user)
    if op in QUOTIENTS and args[0] is mask and args[1] is not mask:
        return emit(graph, op, (number, *args[1:]), user)
    if op in CHOICES and args[0] is mask:
        return _mixture(graph, user, number, args[1], args[2])
    if op in FILLS and args[1] is mask:
        return _mixture(graph, user, number, args[2], args[0])
    if op is aten.index_put.default and args[1] == [mask] and not (len(args) > 3 and args[3]):
        return _written(graph, user, number)
    return None


def _written(graph: fx.Graph, user: fx.Node, number: fx.Node) -> fx.Node | None:
    """Write x[mask] = fill, for a number as fill."""
    x, fill = user.args[0], user.args[2]
    if not isinstance(fill, fx.Node) or fill.meta["val"].dim() != 0 or not isinstance(x, fx.Node):
        return None
    for _ in range(x.meta["val"].dim() - number.meta["val"].dim()):
        number = emit(graph, aten.unsqueeze.default, (number, -1), user)
    return _mixture(graph, user, number, fill, x)


def _mixture(graph: fx.Graph, place: fx.Node, variable: fx.Node, one: Any, zero: Any) -> fx.Node | None:
    """`one` where the variable is 1, `zero` where it is 0: one B + zero (1 - B)."""
    terms = []
    for value, weight in ((one, variable), (zero, None)):
        number = constant(value)
        if number == 0:
            continue
        if number is not None and not math.isfinite(number):
            return None  # infinity times 0 is not 0
        weight = _complement(graph, variable, place) if weight is None else weight
        value = value if number is None else number
        terms.append(emit(graph, aten.mul.Tensor, (weight, value), place))
    if not terms:
        return emit(graph, aten.zeros_like.default, (variable,), place)
    return terms[0] if len(terms) == 1 else emit(graph, aten.add.Tensor, tuple(terms), place)


def _complement(graph: fx.Graph, variable: fx.Node, place: fx.Node) -> fx.Node:
    return emit(graph, aten.rsub.Scalar, (variable, 1), place)


def _cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    return node if node.meta["val"].dtype == dtype else emit(graph, aten.to.dtype, (node, dtype), node)


def constant(value: Any) -> float | None:
    """The number that all elements of a value are, where the graph says so."""
    if isinstance(value, (int, float)):
        return value
    if not isinstance(value, fx.Node) or not value.args:
        return None
    op, args = value.target, value.args
    if op in _FILLED:
        index, number = _FILLED[op]
        return number if index is None else constant(args[index])
    if op in _UNCHANGED:
        return constant(args[0])
    if op in _ARITHMETIC and len(args) == 2 and not value.kwargs:
        a, b = constant(args[0]), constant(args[1])
        return None if a is None or b is None else _ARITHMETIC[op](a, b)
    return None


_FILLED: dict[Any, tuple[int | None, float]] = {  # where the number stands among the arguments, or itself
    aten.full.default: (1, 0),
    aten.full_like.default: (1, 0),
    aten.new_full.default: (2, 0),
    aten.fill.Scalar: (1, 0),
    aten.scalar_tensor.default: (0, 0),
    aten.zeros.default: (None, 0),
    aten.zeros_like.default: (None, 0),
    aten.new_zeros.default: (None, 0),
    aten.zero.default: (None, 0),
    aten.ones.default: (None, 1),
    aten.ones_like.default: (None, 1),
    aten.new_ones.default: (None, 1),
}
_UNCHANGED = (*ARRANGEMENTS, *CASTS, aten.lift_fresh_copy.default)
_ARITHMETIC: dict[Any, Any] = {
    **dict.fromkeys(SUMS, lambda a, b: a + b),
    **dict.fromkeys(DIFFERENCES, lambda a, b: a - b),
    **dict.fromkeys((aten.rsub.Tensor, aten.rsub.Scalar), lambda a, b: b - a),
    **dict.fromkeys(PRODUCTS, lambda a, b: a * b),
    **dict.fromkeys(QUOTIENTS, lambda a, b: a / b if b else None),
}
