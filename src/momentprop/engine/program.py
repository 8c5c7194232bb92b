"""The forward sweep, and with a cut the backward sweep behind it: one engine for all tiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from momentprop.capture.trace import Trace
from momentprop.engine.cut import Cut
from momentprop.engine.fused import Finder
from momentprop.engine.layouts import Layout
from momentprop.engine.outputs import Outputs, heads_of
from momentprop.engine.paths import Paths, path_sources
from momentprop.engine.plan import Plan, Ref, Step, make_plan
from momentprop.engine.selection import ALL_OUTPUTS, Selection
from momentprop.engine.tape import Tape
from momentprop.errors import CovarianceError, RuleError
from momentprop.graph.ops import HEADS
from momentprop.graph.place import place_of
from momentprop.moments import as_moments, is_moments, mean_of
from momentprop.rules.linearization import Linearization, Propagated
from momentprop.rules.registry import Lookup

Observer = Callable[[str, Any], None]  # is told every random value by the name of its node


@dataclass(frozen=True, eq=False)
class Wanted:
    """Holds what a backward sweep is asked for."""

    cut: Cut
    fusions: tuple[Finder, ...]
    layouts: Mapping[str, Layout]
    selection: Selection = ALL_OUTPUTS
    jumps: int = 0  # the largest single causes of each output's variance, so many


class Program(nn.Module):
    """program(*state, *inputs) -> flat outputs, `Moments` where they are random. It never changes.

    Run on fakes, compiled or exported, it unrolls into straight-line code: what is random is known
    beforehand.
    """

    def __init__(
        self,
        trace: Trace,
        random: set[fx.Node],
        rules: Lookup,
        wanted: Wanted | None = None,
        heads: bool = True,
    ) -> None:
        super().__init__()
        self.shapes = {n.name: _fixed_sizes(n) for n in trace.graph.nodes if n.op == "placeholder"}
        self.paths: Paths | None = None
        self.outputs: Outputs | None = None
        self.n_outputs = 0  # per sample, that get a covariance
        self.plan: Plan
        if wanted is None:
            self.plan = make_plan(trace, random, rules, heads=heads)
            return
        self.paths = _paths(trace, random, wanted.layouts)
        sources = [] if self.paths is None else self.paths.nodes
        kept = set() if self.paths is None else {*self.paths.boundary, *self.paths.sources}
        self.plan = make_plan(
            trace, random, rules, cut=wanted.cut, fusions=wanted.fusions, conditioned=sources, kept=kept
        )
        self.outputs = Outputs(self.plan, wanted.layouts, wanted.selection, wanted.jumps)
        self.n_outputs = self.outputs.count  # an index out of range is found here

    def forward(self, *values: Any) -> list[Any]:
        return self.run(values)

    def run(self, values: Sequence[Any], observe: Observer | None = None) -> list[Any]:
        """The outputs for state and inputs."""
        env = dict(zip(self.plan.placeholders, values, strict=True))
        tape = None if self.outputs is None else self._tape(env, self.outputs)
        for step in self.plan.steps:
            if step.operator is None:
                args, kwargs = step.filled(env)
                env[step.name] = step.plain(*args, **kwargs)
            elif not step.random:
                env[step.name] = mean_of(_answer(step, env).moments)
            else:
                found = _answer(step, env)
                env[step.name] = found.moments
                if tape is not None:
                    self._record(tape, step, found)
                if observe is not None:
                    observe(step.name, found.moments)
            for name in step.last_use_of:
                env.pop(name, None)
        if tape is None or self.outputs is None:
            heads = heads_of(self.plan, env).items()
            found_outputs = env | {name: head.applied(env[head.logits]) for name, head in heads}
        else:
            answers = {} if self.paths is None else self.paths(env)
            found_outputs = env | self.outputs.completed(env, tape, answers)
        return [found_outputs[v.name] if isinstance(v, Ref) else v for v in self.plan.outputs]

    def _record(self, tape: Tape, step: Step, found: Propagated) -> None:
        if step.at_frontier and is_moments(found.moments):
            tape.source(step.name, found.moments.variance, step)
        elif step.swept:
            tape.record(step, _linearized(step, found))

    def _tape(self, env: Mapping[str, Any], outputs: Outputs) -> Tape:
        for name, sizes in self.shapes.items():
            for dim, size in sizes.items():
                if env[name].shape[dim] != size:  # compilers that compare a size do not take it for variable
                    break
        tape = Tape(masks=outputs.jumps > 0)
        for name in self.plan.uncertain:
            tape.source(name, env[name].variance)
        return tape


def _answer(step: Step, env: Mapping[str, Any]) -> Propagated:
    assert step.operator is not None
    args, kwargs = step.filled(env)
    found = step.operator.propagate(*args, **kwargs)
    if step.random and isinstance(found.moments, Tensor):  # a rule may find its output constant
        return Propagated(as_moments(found.moments), found.linearize)
    return found


def _linearized(step: Step, found: Propagated) -> Linearization:
    if found.linearize is None:
        raise RuleError(
            "a rule that returns moments alone does not say how its operator acts on deviations, which the "
            f"backward sweep needs; let it return Propagated:\n  {step.place}"
        )
    return found.linearize()


def _paths(trace: Trace, random: set[fx.Node], layouts: Mapping[str, Layout]) -> Paths | None:
    mixed = [node for node in trace.graph.nodes if node in random and node.name not in layouts]
    if mixed:
        raise CovarianceError(
            "the covariance of one sample's outputs is not defined where samples of the batch share noise or "
            "influence each other, or where the batch size is fixed. The assumption here: "
            f"{trace.signature.batch}. Say batch_dim= for another dimension, and batch_dim=None if the "
            f"inputs together are one sample (such as a graph):\n  {place_of(mixed[0])}"
        )
    sources = path_sources(trace.graph, random, layouts)
    if not sources:
        return None
    outputs: Any = next(reversed(trace.graph.nodes)).args[0]
    returned = [v for v in outputs if isinstance(v, fx.Node)]
    logits: list[Any] = [v.args[0] for v in returned if v in random and v.target in HEADS]
    return Paths(trace, sources, random, [n.name for n in (*returned, *logits)])


def _fixed_sizes(placeholder: fx.Node) -> dict[int, int]:
    """The dimensions of an input that do not vary with the batch, and their sizes."""
    value = placeholder.meta.get("val")
    shape = value.shape if isinstance(value, Tensor) else ()
    return {dim: size for dim, size in enumerate(shape) if isinstance(size, int)}
