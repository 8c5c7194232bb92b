"""@rule(op, ...): one rule per operator overload; lookup; duplicates refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeVar

from momentprop.errors import RuleError
from momentprop.graph.private import OpOverload, OpOverloadPacket
from momentprop.moments import Moments
from momentprop.rules.linearization import Propagated, moments_of, propagated

Function = TypeVar("Function", bound=Callable[..., Any])
Refusal = Callable[[Mapping[str, Any], frozenset[str]], str | None]

EXACT = "exact"
EXACT_IF_UNCORRELATED = "exact for uncorrelated inputs"
EXACT_IF_GAUSSIAN = "exact for Gaussian inputs"
MOVES_VALUES = "moves values"  # the reference of rules for operators that only do that


class Variant(Enum):
    """A rule of an operator beside its default one. Tiers say which variants they use."""

    PAPER = auto()  # as the paper has it
    CONTRAST = auto()  # with one correlation for all elements of a window


class Role(Enum):
    """Says what an operator has to do with noise."""

    MAP = auto()  # takes it from its inputs to its output
    SOURCE = auto()  # brings in noise of its own
    MASK = auto()  # a source that keeps or drops
    SHAPE = auto()  # its output depends on its input's shape alone, and is known

    @property
    def creates_noise(self) -> bool:
        return self in (Role.SOURCE, Role.MASK)


@dataclass(frozen=True, eq=False)
class Rule:
    """Maps the moments of one operator's inputs to those of its output.

    Calling a rule with plain tensors runs the operator itself, so that whatever no dropout reaches
    costs what it costs in the plain network. Only rules that create noise always run.
    """

    op: OpOverload
    function: Callable[..., Any]
    exactness: str
    reference: str
    variant: Variant | None = None  # None: the default
    role: Role = Role.MAP
    refuses: Refusal | None = None  # (arguments, names of random ones) -> reason, or None
    elementwise: bool = False  # one random input, and each output element depends on one of its elements

    @property
    def __name__(self) -> str:
        return str(self).replace(".", "_")

    def __str__(self) -> str:
        return (
            str(self.op) if isinstance(self.op, OpOverload) else getattr(self.op, "__name__", "composition")
        )

    def propagate(self, *args: Any, **kwargs: Any) -> Propagated:
        """Moments of the output and how the operator linearises, for arguments of which some are random."""
        return propagated(self.function(*args, **kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output, without how the operator linearises."""
        if self.role.creates_noise or _any_random(args) or _any_random(tuple(kwargs.values())):
            return moments_of(self.function(*args, **kwargs))
        return self.op(*args, **kwargs)


def _any_random(values: tuple[Any, ...] | list[Any]) -> bool:
    for value in values:
        if isinstance(value, Moments):
            return True
        if isinstance(value, (list, tuple)) and _any_random(value):
            return True
    return False


class Registry:
    """Rules by operator overload and variant."""

    def __init__(self) -> None:
        self._rules: dict[tuple[OpOverload, Variant | None], Rule] = {}

    def add(self, rule: Rule, override: bool = False) -> None:
        """A rule that overrides the default one takes the place of all variants."""
        _check_operator(rule.op)
        _check_signature(rule)
        key = (rule.op, rule.variant)
        if key in self._rules and not override:
            raise RuleError(f"{rule.op} already has a rule; pass override=True to replace it")
        if override and rule.variant is None:
            for variant in Variant:
                self._rules.pop((rule.op, variant), None)
        self._rules[key] = rule

    def find(self, op: object, variants: tuple[Variant, ...] = ()) -> Rule | None:
        """The first of these variants that the operator has, else its default rule, else None.

        A `Rule` in place of an operator is returned unchanged.
        """
        if isinstance(op, Rule):
            return op
        if not isinstance(op, OpOverload):
            return None
        known = (self._rules.get((op, variant)) for variant in (*variants, None))
        return next((rule for rule in known if rule is not None), None)

    def remove(self, op: OpOverload, variant: Variant | None = None) -> None:
        self._rules.pop((op, variant), None)

    def __iter__(self) -> Iterator[Rule]:
        return iter(sorted(self._rules.values(), key=lambda r: (str(r.op), str(r.variant))))


RULES = Registry()


@dataclass(frozen=True)
class Lookup:
    """Finds the rules that a tier uses."""

    variants: tuple[Variant, ...] = ()  # in this order, else the default
    linear: bool = False  # only rules that say how their operator acts on deviations will do

    def find(self, op: object) -> Rule | None:
        return RULES.find(op, self.variants)


def rule(
    *ops: OpOverload,
    variant: Variant | None = None,
    exactness: str = "user-defined",
    reference: str = "",
    role: Role = Role.MAP,
    refuses: Refusal | None = None,
    elementwise: bool = False,
    override: bool = False,
) -> Callable[[Function], Function]:
    """Register the decorated function as the rule of one or more operators.

    The function takes the arguments of the operator's ATen schema. Those that are random arrive as
    `Moments`, the others as they are; it returns `Moments`, a list of them, or `Propagated`.

    >>> import torch, momentprop as mp
    >>> @mp.rule(torch.ops.aten.exp.default, elementwise=True, override=True)
    ... def exp(x):
    ...     mean = torch.exp(x.mean + x.variance / 2)
    ...     return mp.Moments(mean, mean**2 * torch.expm1(x.variance))

    `refuses` may look at the arguments (by schema name) and the set of names of random ones, and
    return a reason why the rule does not apply; conversion then reports it with its place.

    The accurate tier also needs to know how the operator acts on deviations. `elementwise=True` says that
    it has one random input and that each output element depends on one element of it; the gain is then
    found by differentiation. Any other rule returns `Propagated`: the moments, and a function that gives the
    operator's linear part, made by `scaled`, `mapped` or `source`.
    """
    if variant is not None and not isinstance(variant, Variant):
        raise RuleError(f"variant must be one of {', '.join(map(str, Variant))}, not {variant!r}")
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
                    variant,
                    role,
                    refuses,
                    elementwise,
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
