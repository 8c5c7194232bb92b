"""Factors that stem from one random tensor, as attention's q k^T: what they have in common.

With q = A x and k = B x, rows of elements of x that are independent, the product q k^T has the mean

    E[q_i . k_l] = E[q_i] . E[k_l] + [i = l] sum over c of V_ic sum over j of A_jc B_jc,

a term on the diagonal that the product of the means lacks. In the traced graph it is recognised whatever
rearrangements stand between the dense layers and the product (heads, packed projections, shared keys): they
are run on the elements' numbers, which tell what each factor is made of. The term itself costs little: the
inner sum is one number per head and element.

To first order, and so in the accurate tier's covariance, common sources need no care. The diagonal tiers'
variances take no account of them, here as in dense layers.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from momentprop.graph.nodes import emit, repeated
from momentprop.rules.registry import EXACT, MOVES_VALUES, RULES, Rule

aten = torch.ops.aten

_PRODUCTS = (aten.matmul.default, aten.bmm.default)
_SCALES = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
_CASTS = (
    aten._to_copy.default,
    aten.to.device,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.other,
    aten.type_as.default,
)
_SEEN = "related"  # in a node's meta: its common sources are taken care of


@dataclass(frozen=True)
class _Stem:
    """A value that is a dense layer's output, rearranged and multiplied by numbers."""

    source: fx.Node
    weight: fx.Node
    transposed: bool  # the weight is [in, out]
    output: fx.Node
    moves: list[fx.Node]


@dataclass(frozen=True)
class _Heads:
    """Rows of a weight: for each head h and repetition, `size` of them from `start + h * step` on."""

    start: int
    step: int
    count: int
    size: int
    repeats: int = 1

    def around(self, stem: _Stem) -> tuple[int, int]:
        """How many features of the dense layer stand before those of the heads, and behind them."""
        before = self.start if self.step == self.size else 0  # else between them
        return before, int(stem.output.meta["val"].shape[-1]) - before - self.count * self.step


def relate(graph: fx.Graph, random: set[fx.Node]) -> bool:
    """Add the common term behind matrix products of one random tensor's images; whether there was any."""
    found = False
    for node in list(graph.nodes):
        if node.target not in _PRODUCTS or _SEEN in node.meta or not random.issuperset(node.args[:2]):
            continue
        first, second = _stem(node.args[0]), _stem(node.args[1])
        if first is None or second is None or first.source not in random:
            continue
        heads = _common(first, second) if _same(first.source, second.source) else None
        if heads is not None:
            _add_term(graph, node, first, second, *heads)
            found = True
    return found


def _stem(node: Any) -> _Stem | None:
    moves: list[fx.Node] = []
    while isinstance(node, fx.Node):
        if node.target is aten.linear.default:
            x, weight = node.args[:2]
            return _Stem(x, weight, False, node, moves[::-1])  # type: ignore[arg-type]
        if node.target is aten.addmm.default and not node.kwargs:
            _, x, weight = node.args
            return _Stem(x, weight, True, node, moves[::-1])  # type: ignore[arg-type]
        if not (_moves(node) or _scales(node)):
            return None
        moves.append(node)
        node = node.args[0]
    return None


def _moves(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    rule = RULES.find(node.target, "fast")
    return rule is not None and rule.reference == MOVES_VALUES


def _scales(node: fx.Node) -> bool:
    return node.target in _SCALES and isinstance(node.args[1], (int, float))


def _same(first: Any, second: Any) -> bool:
    """Whether two values are the same one, or rearranged from it in the same way."""
    if not (isinstance(first, fx.Node) and isinstance(second, fx.Node)) or first is second:
        return first is second or (type(first) is type(second) and first == second)
    if first.target is not second.target or not _moves(first) or first.kwargs != second.kwargs:
        return False
    return len(first.args) == len(second.args) and all(map(_same, first.args, second.args))


def _common(first: _Stem, second: _Stem) -> tuple[_Heads, _Heads] | None:
    """Which rows of the two weights meet in the product, if the ith row and column come from one place."""
    a, b = _numbers(first), _numbers(second)
    if a is None or b is None or a.dim() < 2 or a.shape != b.mT.shape or not a.numel():
        return None
    b = b.mT
    found = []
    for numbers, stem in ((a, first), (b, second)):
        features = int(stem.output.meta["val"].shape[-1])
        place, feature = numbers // features, numbers % features
        start = feature[..., :1, :1]
        regular = feature == start + torch.arange(feature.shape[-1])
        if not (regular.all() and (place == place[..., :1]).all()):
            return None
        found.append((place[..., 0], start.flatten().tolist()))
    (rows, starts), (columns, others) = found
    ordered = rows.sort(-1).values
    if not torch.equal(rows, columns) or (ordered[..., 1:] == ordered[..., :-1]).any():
        return None
    pairs = sorted(set(zip(starts, others, strict=True)))
    queries, keys = (_heads([pair[i] for pair in pairs], a.shape[-1]) for i in (0, 1))
    if queries is None or keys is None or queries.repeats != 1:
        return None
    if any(n < 0 or n % queries.step for n in queries.around(first)):
        return None
    return queries, keys


def _numbers(stem: _Stem) -> Tensor | None:
    """The element of the dense layer's output that each element of the factor is; None if that is unknown."""
    value = stem.output.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    try:
        sizes = [_concrete(size) for size in value.shape]
        numbers: Any = torch.arange(math.prod(sizes)).reshape(sizes)
        for node in stem.moves:
            if node.target not in _CASTS and not _scales(node):
                args, kwargs = fx.map_arg((node.args[1:], node.kwargs), lambda n: _concrete(n.meta["val"]))
                numbers = node.target(numbers, *args, **kwargs)  # type: ignore[operator]
    except (TypeError, KeyError, AttributeError, RuntimeError):
        return None
    return numbers


def _concrete(size: Any) -> int:
    """A size as it was when the model was traced."""
    return size if isinstance(size, int) else int(size.node.hint)


def _heads(starts: list[int], size: int) -> _Heads | None:
    """First rows of heads in a regular order, each of them as often as the others, if they are."""
    distinct = list(dict.fromkeys(starts))
    repeats = len(starts) // len(distinct)
    step = distinct[1] - distinct[0] if len(distinct) > 1 else size
    regular = [distinct[0] + i // repeats * step for i in range(len(starts))]
    if starts != regular or step < size:
        return None
    return _Heads(distinct[0], step, len(distinct), size, repeats)


def _add_term(
    graph: fx.Graph, node: fx.Node, first: _Stem, second: _Stem, rows: _Heads, columns: _Heads
) -> None:
    def op(target: Any, *args: Any) -> fx.Node:
        return emit(graph, target, args, node)

    def weight_of(stem: _Stem, heads: _Heads) -> fx.Node:
        """[heads, in, size]"""
        weight = op(aten.t.default, stem.weight) if stem.transposed else stem.weight
        length = (heads.count - 1) * heads.step + heads.size
        weight = op(aten.slice.Tensor, weight, 0, heads.start, heads.start + length)
        weight = op(aten.unfold.default, weight, 0, heads.size, heads.step)
        return weight if heads.repeats == 1 else repeated(graph, weight, heads.repeats, -3, node)

    with graph.inserting_before(node):
        product = op(aten.mul.Tensor, weight_of(first, rows), weight_of(second, columns))
        heads = op(aten.sum.dim_IntList, product, [-1])
        before, after = rows.around(first)
        if before or after:
            heads = op(aten.constant_pad_nd.default, heads, [0, 0, before // rows.step, after // rows.step])
        term = op(aten.linear.default, op(_VARIANCE, first.source), heads)
        # to where the heads' features stand in the dense layer's output, and on from there as they went
        term = repeated(graph, term, rows.step, -1, node)
        for move in first.moves:
            term = emit(graph, move.target, (term, *move.args[1:]), node, dict(move.kwargs))
        term = op(aten.select.int, term, -1, 0)
        for move in second.moves:
            if _scales(move):
                term = op(move.target, term, move.args[1])
        term = op(aten.diag_embed.default, term)
    with graph.inserting_after(node):
        total = emit(graph, aten.add.Tensor, (node, term), node)
    node.meta[_SEEN] = True
    node.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)


_VARIANCE = Rule(
    aten.zeros_like.default,  # what it is of a value that is not random
    lambda x: x.variance,
    exactness=EXACT,
    reference="variance",
    ignores_values=True,
)
