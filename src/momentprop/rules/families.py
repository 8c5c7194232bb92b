"""Rule families: most operators are one line that names its family.

Every family registers its operators and applies the operator itself to means and, suitably changed, to
variances; so a rule inherits all argument variants (strides, dimensions, keepdim, ...) of its operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from momentprop.gaussian.quadrature import NODES, Nodes, expectation
from momentprop.graph.private import OpOverload
from momentprop.moments import Fact, Logits, Moments, is_moments, mean_of, variance_of
from momentprop.rules.facts import alone, carried, direction_of, knowing, reshaped
from momentprop.rules.linearization import Linearization, Propagated, Pull, gathered, mapped, residual, scaled
from momentprop.rules.registry import (
    EXACT,
    EXACT_IF_GAUSSIAN,
    EXACT_IF_UNCORRELATED,
    MOVES_VALUES,
    Refusal,
    Role,
    rule,
)

BY_QUADRATURE = "approximate: 13-point quadrature, if Gaussian"


def only_random(*names: str) -> Refusal:
    """Refuse when any argument but these is random."""

    def refuses(_: Mapping[str, Any], random: frozenset[str]) -> str | None:
        others = sorted(random - set(names))
        return f"its argument {', '.join(others)} is random, which has no rule" if others else None

    return refuses


def rearrangement(
    *ops: OpOverload,
    values: int = 1,
    refuses: Refusal | None = None,
    pull: Callable[..., Pull] | None = None,
) -> None:
    """Operators that only move values (view, cat, slice, ...): applied to mean and variance alike.

    The first `values` arguments hold the values; a deterministic one among them has variance zero.
    A tensor called `other` only lends its shape or type (`view_as`, `type_as`), so it may be random.
    `pull(out, *arguments)` is the transposed map; without it, elements go back to where they came from.
    """

    def make(op: OpOverload) -> Callable[..., Propagated]:
        transposed = pull or by_position(op, values)

        def rearrange(*args: Any, **kwargs: Any) -> Propagated:
            moved, rest = args[:values], [mean_of(a) for a in args[values:]]
            mean = op(*[_map(mean_of, v) for v in moved], *rest, **kwargs)
            variance = op(*[_map(variance_of, v) for v in moved], *rest, **kwargs)
            out = pack(mean, variance)
            lent = [None for a in args[values:] if is_moments(a)]  # their shape or type, and nothing else
            if not any(map(_is_random, moved)):
                return Propagated(out, lambda: mapped(lambda cotangent: lent))

            def linearize() -> Linearization:
                pull = transposed(out, *args, **kwargs)
                return mapped((lambda cotangent: [*pull(cotangent), *lent]) if lent else pull)

            return Propagated(out, linearize)

        return rearrange

    for op in ops:
        names = [a.name for a in op._schema.arguments[:values]]
        refusal = refuses or only_random(*names, "other")
        rule(op, exactness=EXACT, reference=MOVES_VALUES, refuses=refusal)(make(op))


def by_position(op: OpOverload, values: int) -> Callable[..., Pull]:
    """The transposed map of any operator that moves values.

    The operator itself, given the elements' numbers instead of their values, tells where each went; the
    cotangent goes back there. Number 0 stands for what comes from no random element.
    """

    def transposed(out: Any, *args: Any, **kwargs: Any) -> Pull:
        def pull(cotangent: Any) -> list[Tensor]:
            total: Any = 1
            shapes = []

            def number(value: Any) -> Tensor:
                nonlocal total
                if not is_moments(value):
                    return torch.zeros_like(value, dtype=torch.float64)
                count = value.mean.numel()
                shapes.append((total, count, value.shape))
                total = total + count
                # not integers, which some operators do not take; exact up to 2^53
                numbers = torch.arange(total - count, total, dtype=torch.float64, device=value.device)
                return numbers.reshape(value.shape)

            moved = [_map(number, v) for v in args[:values]]
            places = op(*moved, *[mean_of(a) for a in args[values:]], **kwargs)
            pairs = (
                [(cotangent, places)] if isinstance(places, Tensor) else zip(cotangent, places, strict=True)
            )
            known = [(c.flatten(1), place.flatten().long()) for c, place in pairs if c is not None]
            flat, index = torch.cat([c for c, _ in known], 1), torch.cat([place for _, place in known])
            gathered = flat.new_zeros(flat.shape[0], total).index_add(1, index, flat)
            return [gathered.narrow(1, a, n).reshape(flat.shape[0], *shape) for a, n, shape in shapes]

        return pull

    return transposed


def reshape(*ops: OpOverload) -> None:
    """Operators that keep the elements in row-major order: their transposed map is a reshape."""

    def make(op: OpOverload) -> Callable[..., Propagated]:
        def propagate(x: Any, *args: Any, **kwargs: Any) -> Propagated:
            rest = [mean_of(a) for a in args]
            mean, variance = op(mean_of(x), *rest, **kwargs), op(variance_of(x), *rest, **kwargs)
            return in_same_order(Moments(mean, variance), x, *args)

        return propagate

    for op in ops:
        refusal = only_random(op._schema.arguments[0].name, "other")
        rule(op, exactness=EXACT, reference=MOVES_VALUES, refuses=refusal)(make(op))


def in_same_order(out: Moments, x: Any, *others: Any) -> Propagated:
    """A rule's answer for an output that has the elements of x in the same order; others lend their shape."""
    lent = [None for other in others if is_moments(other)]
    if not is_moments(x):
        return Propagated(out, lambda: mapped(lambda cotangent: lent))
    shape = x.shape
    if out.shape == shape and not lent:
        return Propagated(carried(out, x), scaled)

    def pull(cotangent: Tensor) -> list[Tensor | None]:
        return [cotangent.reshape(cotangent.shape[0], *shape), *lent]

    return Propagated(reshaped(out, x), lambda: mapped(pull))


def linear_map(
    *ops: OpOverload,
    pull: Callable[..., Pull],
    facts: Callable[..., Sequence[Fact]] | None = None,
    together: Callable[..., Tensor | None] | None = None,
    weight: int = 1,
    bias: int = 2,
) -> None:
    """y = W x + b: mean `W E + b`, variance `(W*W) V`; the arguments at `weight` and `bias` are W, b.

    `pull(x, W, b, ...)` is the transposed map. `facts` makes of V and the other arguments what the output
    knows beyond its moments; `together(x, direction, W, b, ...)`, the variance of what elements of a channel
    share.
    """

    def make(op: OpOverload) -> Callable[..., Propagated]:
        def propagate(x: Moments, *args: Any, **kwargs: Any) -> Propagated:
            squared = [
                a * a if i == weight else None if i == bias else a for i, a in enumerate(args, start=1)
            ]
            direction, variance, common = direction_of(x), x.variance, None
            if together is not None and direction is not None:
                common = together(x, direction, *args, **kwargs)
                variance = alone(x) if common is not None else variance
            variance = op(variance, *squared, **kwargs)
            mean = op(x.mean, *args, **kwargs)
            out = Moments(mean, variance if common is None else variance + common)
            if facts is not None:
                out = knowing(out, *facts(x.variance, *args))
            center = x.mean
            return Propagated(out, lambda: mapped(pull(center, *args, **kwargs)))

        return propagate

    for op in ops:
        rule(
            op,
            exactness=EXACT_IF_UNCORRELATED,
            reference="paper, dense / convolution",
            refuses=only_random(op._schema.arguments[0].name),
        )(make(op))


def elementwise(
    op: OpOverload,
    moments: Callable[..., tuple[Tensor, Tensor]] | None = None,
    gain: Callable[..., Tensor] | None = None,
    response: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None,
    exactness: str | None = None,
    reference: str = "",
    is_head: bool = False,
    override: bool = False,
) -> None:
    """An activation: each element of the output depends on one element of the operator's first argument.

    It is given by `moments(mean, variance, ...)` -> mean, variance, the operator's further arguments behind,
    and by `gain(mean, variance, ...)`, the derivative of the output's mean by the input's, without which
    that is found by differentiation; or by `response(mean, variance, ...)` -> mean, variance, gain where they
    share work. With none of them the operator itself is averaged over a few points (quadrature.py).

    `is_head` says that networks end in it to give probabilities: the output then keeps its input as logits.
    """
    if moments is None and response is None:
        response, exactness = averaged(op), exactness or BY_QUADRATURE
        reference = reference or "Gauss-Hermite quadrature"

    @rule(
        op,
        exactness=exactness or EXACT_IF_GAUSSIAN,
        reference=reference,
        refuses=only_random(op._schema.arguments[0].name),
        elementwise=True,
        override=override,
    )
    def propagate(x: Moments, *args: Any, **kwargs: Any) -> Propagated | Moments:
        logits = Logits(x, None) if is_head else None
        center, spread = x.mean, x.variance
        if response is not None:
            mean, variance, known = response(center, spread, *args, **kwargs)
            return _responded(Moments(mean, variance, logits=logits), x, lambda: known)
        assert moments is not None
        out = Moments(*moments(center, spread, *args, **kwargs), logits=logits)
        if gain is None:
            return out
        slope = gain
        return _responded(out, x, once(lambda: slope(center, spread, *args, **kwargs)))


def _responded(out: Moments, x: Moments, gain: Callable[[], Tensor]) -> Propagated:
    """An activation's answer; its gain may be computed later."""
    shape, variance, spread = x.shape, out.variance, x.variance

    def linearize() -> Linearization:
        g = gain()
        noise = residual(variance, g, spread)
        if variance.shape == shape:
            return scaled(g, noise)
        return mapped(lambda cotangent: [gathered(cotangent * g, shape)], noise)

    return Propagated(carried(out, x, gain, linear=False, noisy=True), linearize)


def once(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The function, which computes its value when it is first asked."""
    known: list[Tensor] = []

    def value() -> Tensor:
        if not known:
            known.append(function())
        return known[0]

    return value


def averaged(op: Callable[..., Tensor], nodes: Nodes = NODES) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Mean, variance and gain of an activation by quadrature, from the activation itself."""

    def response(mean: Tensor, variance: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        return expectation(lambda x: op(x, *args, **kwargs), mean, variance, nodes)

    return response


def affine(out: Moments, x: Moments, gain: Any = None) -> Propagated:
    """The answer of a rule with out = gain * x + constant; x may be broadcast."""
    if out.shape == x.shape:
        return Propagated(carried(out, x, gain), lambda: scaled(gain))
    shape = x.shape
    if gain is None:
        return Propagated(out, lambda: mapped(lambda cotangent: [gathered(cotangent, shape)]))
    return Propagated(out, lambda: mapped(lambda cotangent: [gathered(cotangent * gain, shape)]))


def shape_query(*ops: OpOverload) -> None:
    """Operators that look at shape, dtype and device only: their result is deterministic."""

    def make(op: OpOverload) -> Callable[..., Any]:
        def query(x: Any, *args: Any, **kwargs: Any) -> Any:
            return op(mean_of(x), *args, **kwargs)

        return query

    for op in ops:
        rule(op, exactness=EXACT, reference="deterministic", role=Role.SHAPE)(make(op))


def pack(mean: Any, variance: Any) -> Any:
    """Moments from a pair of tensors, or a list of Moments from a pair of lists."""
    if isinstance(mean, Tensor):
        return Moments(mean, variance)
    return [Moments(m, v) for m, v in zip(mean, variance, strict=True)]


def broadcast(variance: Any, mean: Tensor) -> Tensor:
    """A variance (a tensor, or the number 0) in the shape and type of its mean."""
    if not isinstance(variance, Tensor):
        return torch.full_like(mean, variance)
    return variance.to(mean.dtype).expand_as(mean)


def per_dimension(value: Any, n: int) -> list[int]:
    """One number for all n dimensions, or one for each."""
    values = [value] if isinstance(value, int) else list(value)
    return values * n if len(values) == 1 else values


def squared(constant: Any, dtype: torch.dtype) -> Any:
    """The square of a tensor or number, in the type of the result: integer tensors would overflow."""
    constant = constant.to(dtype) if isinstance(constant, Tensor) else constant
    return constant * constant


def _is_random(value: Any) -> bool:
    return any(map(is_moments, value)) if isinstance(value, (list, tuple)) else is_moments(value)


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    return [function(v) for v in value] if isinstance(value, (list, tuple)) else function(value)
