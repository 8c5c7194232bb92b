"""Makes a trace ready for a tier: patterns, rewrites, and a rule for every operator that noise reaches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from momentprop.capture.trace import Trace
from momentprop.errors import MissingRuleError
from momentprop.passes.coverage import analyze
from momentprop.passes.decompose import decompose
from momentprop.passes.dropconnect import fold_random_weights
from momentprop.passes.patterns import recognise
from momentprop.passes.recurrent import expand_recurrent
from momentprop.passes.rewrite import rewrite
from momentprop.passes.stand_ins.unsupported import attach, mark
from momentprop.rules.registry import Lookup


@dataclass(frozen=True, eq=False)
class Prepared:
    """A trace whose random operators all have rules, and what noise reaches in it."""

    trace: Trace
    random: set[fx.Node]


def prepare(
    trace: Trace, rules: Lookup, uncertain: Sequence[bool], rewrites: bool, unsupported: str = "error"
) -> Prepared:
    """The trace with all passes of a tier applied; the one given is left alone."""
    trace = recognise(trace)
    if rewrites:
        trace = rewrite(trace)
    trace = cover(trace, rules, uncertain, unsupported)
    random = analyze(trace.graph, rules, _random_inputs(trace, uncertain)).random
    attach(trace.graph, random, rules.linear)
    return Prepared(trace, random)


def cover(traced: Trace, rules: Lookup, uncertain: Sequence[bool], unsupported: str = "error") -> Trace:
    """The trace with operators that have no rule decomposed, else marked; raises if any remains."""
    traced = fold_random_weights(expand_recurrent(traced, uncertain), rules)
    coverage = analyze(traced.graph, rules, _random_inputs(traced, uncertain))
    if coverage.missing:
        copy = dataclasses.replace(traced, graph=traced.copy_graph())
        copied = analyze(copy.graph, rules, _random_inputs(copy, uncertain))
        decompose(copy.graph, list(copied.missing), rules)
        missing = analyze(copy.graph, rules, _random_inputs(copy, uncertain))
        if missing.missing and unsupported != "error":
            mark(list(missing.missing), unsupported)
            missing = analyze(copy.graph, rules, _random_inputs(copy, uncertain))
        if missing.missing:
            raise MissingRuleError(missing.places)
        traced = copy
    return traced


def _random_inputs(trace: Trace, uncertain: Sequence[bool]) -> list[Any]:
    return [node for node, is_random in zip(trace.input_nodes, uncertain, strict=True) if is_random]
