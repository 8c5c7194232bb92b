"""Makes of a trace what an engine runs: in canonical form, rewritten, and covered by rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from momentprop.capture.trace import Trace
from momentprop.errors import MissingRuleError
from momentprop.passes.canonical.decompositions import decompose
from momentprop.passes.canonical.random_weights import fold_random_weights
from momentprop.passes.canonical.recurrent import split_recurrent
from momentprop.passes.coverage import Coverage, analyze
from momentprop.passes.integers import refuse_integers
from momentprop.passes.runner import Pass, run
from momentprop.passes.stand_ins.unsupported import attach, mark
from momentprop.rules.registry import Lookup


@dataclass(frozen=True, eq=False)
class Prepared:
    """Holds a trace in which every operator that noise reaches has a rule. It is never changed once made."""

    trace: Trace
    random: set[fx.Node]  # what noise reaches

    def __deepcopy__(self, memo: dict[int, Any]) -> Prepared:
        return self


def prepare(
    trace: Trace, rules: Lookup, passes: Sequence[Pass], uncertain: Sequence[bool], unsupported: str = "error"
) -> Prepared:
    """Apply the passes of a tier to a copy of the trace, for one pattern of uncertain inputs.

    Recurrent layers that noise reaches are taken apart first. Operators without a rule are decomposed once
    patterns had their chance, and patterns see what comes out of that. What still has no rule gets a stand-in
    where it works element by element, or where `unsupported` asks for one; else all such places are named in
    one error.
    """
    trace = split_recurrent(trace, uncertain)
    trace = dataclasses.replace(trace, graph=trace.copy_graph())
    graph, inputs = trace.graph, trace.input_nodes
    random_inputs = [node for node, is_random in zip(inputs, uncertain, strict=True) if is_random]

    def covered() -> Coverage:
        run(graph, passes, inputs)
        run(graph, (fold_random_weights(graph, inputs, rules),), inputs)
        return analyze(graph, rules, random_inputs)

    coverage = covered()
    if coverage.missing:
        decompose(graph, list(coverage.missing), rules)
        coverage = covered()
    if coverage.missing:
        mark(list(coverage.missing), unsupported)
        coverage = analyze(graph, rules, random_inputs)
    refuse_integers(graph, coverage.random)
    if coverage.missing:
        raise MissingRuleError(coverage.places)
    attach(graph, coverage.random, accurate=rules.linear)
    return Prepared(trace, coverage.random)
