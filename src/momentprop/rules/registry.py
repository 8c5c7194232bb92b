"""@rule(op, ...): one rule per operator overload; lookup; duplicates refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from momentprop.errors import RuleError
from momentprop.graph.private import OpOverload, OpOverloadPacket
from momentprop.moments import Moments
from momentprop.rules.local import Local

Function = TypeVar("Function", bound=Callable[..., Any])
Refusal = Callable[[Mapping[str, Any], frozenset[str]], str | None]

EXACT = "exact"
EXACT_IF_UNCORRELATED = "exact for uncorrelated inputs"
EXACT_IF_GAUSSIAN = "exact for Gaussian inputs"
MOVES_VALUES = "moves values"  # the reference of rules for operators that only do that


@dataclass(frozen=True, eq=False)
class Rule:
    """How one operator maps the moments of its inputs to those of its output.

    Calling a rule with plain tensors runs the operator itself, so that whatever no dropout reaches
    costs what it costs in the plain network. Only `creates_noise` rules always run.
    """

    op: OpOverload
    function: Callable[..., Any]
    exactness: str
    reference: str
    fidelity: str | None = None  # None: every tier that has no rule of its own
    creates_noise: bool = False
    ignores_values: bool = False  # the output depends on the input's shape alone
    refuses: Refusal | None = None  # (arguments, names of random ones) -> reason, or None
    elementwise: bool = False  # one random input, and each output element depends on one of its elements
    local: Callable[..., Local] | None = None  # (out, *arguments) -> gain or transposed map, and noise

    @property
    def has_local(self) -> bool:
        return self.local is not None or self.elementwise or self.ignores_values

    @property
    def __name__(self) -> str:
        return str(self).replace(".", "_")

    def __str__(self) -> str:
        return str(self.op) if isinstance(self.op, OpOverload) else "composition"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.creates_noise or _any_random(args) or _any_random(tuple(kwargs.values())):
            return self.function(*args, **kwargs)
        return self.op(*args, **kwargs)


def _any_random(values: tuple[Any, ...] | list[Any]) -> bool:
    for value in values:
        if isinstance(value, Moments):
            return True
        if isinstance(value, (list, tuple)) and _any_random(value):
            return True
    return False


class Registry:
    """Rules by operator overload and tier."""

    def __init__(self) -> None:
        self._rules: dict[tuple[OpOverload, str | None], Rule] = {}

    def add(self, rule: Rule, override: bool = False) -> None:
        _check_operator(rule.op)
        _check_signature(rule)
        key = (rule.op, rule.fidelity)
        if key in self._rules and not override:
            raise RuleError(f"{rule.op} already has a rule; pass override=True to replace it")
        self._rules[key] = rule

    def find(self, op: object, fidelity: str) -> Rule | None:
        """The rule of this tier, else the one for all tiers, else None; a rule itself is its own."""
        if isinstance(op, Rule):
            return op
        if not isinstance(op, OpOverload):
            return None
        return self._rules.get((op, fidelity)) or self._rules.get((op, None))

    def remove(self, op: OpOverload, fidelity: str | None = None) -> None:
        self._rules.pop((op, fidelity), None)

    def __iter__(self) -> Iterator[Rule]:
        return iter(sorted(self._rules.values(), key=lambda r: (str(r.op), r.fidelity or "")))


RULES = Registry()


def rule(
    *ops: OpOverload,
    fidelity: str | None = None,
    exactness: str = "user-defined",
    reference: str = "",
    creates_noise: bool = False,
    ignores_values: bool = False,
    refuses: Refusal | None = None,
    elementwise: bool = False,
    local: Callable[..., Local] | None = None,
    override: bool = False,
) -> Callable[[Function], Function]:
    """Register the decorated function as the rule of one or more operators.

    The function takes the arguments of the operator's ATen schema. Those that are random arrive as
    `Moments`, the others as they are; it returns `Moments` (or a list of them).

    >>> import torch, momentprop as mp
    >>> @mp.rule(torch.ops.aten.exp.default, elementwise=True, override=True)
    ... def exp(x):
    ...     mean = torch.exp(x.mean + x.variance / 2)
    ...     return mp.Moments(mean, mean**2 * torch.expm1(x.variance))

    `refuses` may look at the arguments (by schema name) and the set of names of random ones, and
    return a reason why the rule does not apply; conversion then reports it with its place.

    The accurate tier also needs to know how the operator acts on deviations. `elementwise=True` says that
    it has one random input and that each output element depends on one element of it; the gain is then
    found by differentiation. Anything else gives `local`, a function (out, *arguments) -> `Elementwise` or
    `Linear` of momentprop.rules.local.
    """
    if not ops:
        raise RuleError("name at least one operator: @rule(torch.ops.aten.relu.default)")

    def register(function: Function) -> Function:
        for op in ops:
            RULES.add(
                Rule(
                    op,
                    function,
                    exactness,
                    reference,
                    fidelity,
                    creates_noise,
                    ignores_values,
                    refuses,
                    elementwise,
                    local,
                ),
                override,
            )
        return function

    return register


def _check_operator(op: object) -> None:
    if isinstance(op, OpOverloadPacket):
        overloads = ", ".join(f"{op}.{name}" for name in op.overloads())
        raise RuleError(f"{op} has several overloads; name one of: {overloads}")
    if not isinstance(op, OpOverload):
        raise RuleError(f"a rule belongs to an operator such as torch.ops.aten.relu.default, not {op!r}")
    if op._schema.is_mutable:
        raise RuleError(
            f"{op} changes its argument; in-place operators are rewritten while tracing, "
            "so register the rule for the operator without the underscore"
        )


def _check_signature(rule: Rule) -> None:
    """The function must take the schema's positional arguments, keyword-only ones by name."""
    arguments = rule.op._schema.arguments
    positional = [a.name for a in arguments if not a.kwarg_only]
    required = [a.name for a in arguments if not a.kwarg_only and not a.has_default_value()]
    keywords = {a.name: a for a in arguments if a.kwarg_only}
    signature = inspect.signature(rule.function)
    for names in (positional, required):
        try:
            signature.bind(*names, **keywords)
        except TypeError as error:
            raise RuleError(
                f"the rule for {rule.op} must take {len(required)} to {len(positional)} positional "
                f"arguments ({', '.join(positional)}) and the keywords {list(keywords)}: {error}"
            ) from None
