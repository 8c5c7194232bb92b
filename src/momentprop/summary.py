"""Lists what a converted network consists of: every operator with its rule, exactness and shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from momentprop.capture.batch import Batch
from momentprop.engine.derive import Derived
from momentprop.engine.plan import Plan
from momentprop.graph.place import DECOMPOSED, place_of
from momentprop.passes.coverage import FALLBACK, QUADRATURE, RULE, rule_of
from momentprop.passes.prepare import Prepared
from momentprop.rules.registry import EXACT, Lookup, Rule
from momentprop.tiers import Request


@dataclass(frozen=True)
class Row:
    """One operator of the graph."""

    name: str  # of the node
    operator: str
    module: str  # path in the model; empty for the model itself
    rule: str  # where it is written, or "plain" where nothing is random
    exactness: str  # empty where the operator is part of another row's
    shape: str
    random: bool
    fallback: str = ""  # "linearize" or "sample", where that stands in for a rule

    @property
    def is_approximate(self) -> bool:
        return bool(self.exactness) and not self.exactness.startswith(EXACT)


@dataclass(frozen=True, repr=False)
class Summary:
    """A table of operators. Printed as text; iterating gives its rows.

    >>> import torch, momentprop as mp
    >>> model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 2))
    >>> summary = mp.convert(model, torch.zeros(1, 4)).summary()
    >>> print(summary.head)
    accurate: 2 of 2 operators random, 0 approximate, no fallbacks
    >>> [(row.module, row.operator) for row in summary]
    [('0', 'aten.dropout.default'), ('1', 'aten.linear.default')]
    """

    fidelity: str
    rows: tuple[Row, ...]
    n_operators: int
    samples: str  # which dimension of the inputs is the batch
    selection: str = ""  # of outputs, where not all get a covariance

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def fallbacks(self) -> tuple[Row, ...]:
        """Operators without a rule, as allowed by `unsupported=`."""
        return tuple(row for row in self.rows if row.fallback)

    @property
    def head(self) -> str:
        """The table in one line."""
        random = [row for row in self.rows if row.random]
        approximate = sum(row.is_approximate for row in random)
        places = [
            f"{r.fallback} for {r.operator} in {r.module or 'the model itself'}" for r in self.fallbacks
        ]
        where = ", ".join(dict.fromkeys(places)) if places else "no fallbacks"
        counts = f"{len(random)} of {self.n_operators} operators random, {approximate} approximate"
        chosen = f"; {self.selection}" if self.selection else ""
        return f"{self.fidelity}: {counts}, {where}{chosen}"

    def __str__(self) -> str:
        titles = ("node", "operator", "module", "rule", "exactness", "shape", "random")
        cells = [
            (r.name, r.operator, r.module, r.rule, r.exactness, r.shape, "yes" if r.random else "no")
            for r in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
        table = [titles, tuple("-" * w for w in widths), *cells]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in table]
        return "\n".join([self.head, self.samples, *lines])

    __repr__ = __str__


def summarize(prepared: Prepared, request: Request, plan: Plan, random_only: bool) -> Summary:
    """The summary of a network: of the graph it was made of, and of the plan of its program."""
    nodes = [node for node in prepared.trace.graph.nodes if node.op == "call_function"]
    used = {step.name: step.operator for step in plan.steps}
    tier, batch = request.tier, prepared.trace.signature.batch
    rows = [_row(node, node in prepared.random, tier.rules, used, batch) for node in nodes]
    chosen = [row for row in rows if row.random or row.fallback or not random_only]
    selection = "" if request.selection.takes_all else str(request.selection)
    return Summary(tier.name, tuple(chosen), len(rows), str(batch), selection)


def _row(node: fx.Node, random: bool, rules: Lookup, used: Mapping[str, Any], free: Batch) -> Row:
    place = place_of(node)
    operator = getattr(node.target, "__name__", "") if " " in place.operator else place.operator
    rule = rule_of(node, rules)
    fallback = node.meta[FALLBACK] if RULE in node.meta else ""
    name, exactness = "plain", EXACT
    if fallback:
        assert rule is not None
        name, exactness = fallback, rule.exactness
        fallback = "" if fallback == QUADRATURE else fallback
    elif random and node.name not in used:
        name, exactness = f"part of {_stands_for(node, used)}", ""
    elif random and isinstance(rule, Rule):
        special = used[node.name]
        name, exactness = _written_at(rule.function), rule.exactness
        if not isinstance(special, (Rule, Derived)):
            name = _written_at(type(special))
            exactness = f"approximate: see {name.split('.')[-2]}.py"
    elif random:
        name = operator  # picks one of several results
    if DECOMPOSED in node.meta and name != "plain":
        name = f"{name} (decomposed from {node.meta[DECOMPOSED]})"
    return Row(node.name, operator, place.module, name, exactness, _shape(node, free), random, fallback)


def _stands_for(node: fx.Node, used: Mapping[str, Any]) -> str:
    """The last of the operators in a row that one stands for."""
    while node.name not in used:
        node = next(iter(node.users))
    return node.name


def _written_at(function: Any) -> str:
    """File and function: `families.elementwise` for a rule that a family made."""
    function = function if hasattr(function, "__qualname__") else type(function)
    module = str(function.__module__).removeprefix("momentprop.").removeprefix("rules.")
    return f"{module}.{function.__qualname__.split('.<locals>')[0]}"


def _shape(node: fx.Node, free: Batch) -> str:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return ", ".join(f"[{', '.join(free.names(v.shape))}]" if isinstance(v, Tensor) else "-" for v in values)
