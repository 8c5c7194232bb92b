"""The backward sweep: the outputs' covariance, as a sum over all sources of noise.

To first order (local.py) the network is made of linear maps, gains and independent sources of noise. With
J_s = d(outputs) / d(source s),

    Cov(outputs) = sum over s of  J_s diag(noise_s) J_s^T.

The forward sweep computes moments and remembers, for every operator, its transposed map and its noise. The
backward sweep carries one cotangent per output from the outputs to the sources, all of them at once as
a tensor [K, *shape], and adds up. Two paths from one source add in J_s before it is squared: residual
connections, concatenation, shared weights and overlapping windows need no care.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from momentprop.capture.trace import HEADS, Trace, place_of
from momentprop.engine.calls import Call, Ref, calls, filled, forget, with_last_uses
from momentprop.engine.jumps import Sources
from momentprop.engine.layouts import Layout
from momentprop.engine.paths import Paths, path_sources
from momentprop.engine.selection import Selection
from momentprop.engine.sketch import Sketch, pays, signs
from momentprop.engine.tape import Tape, scattered, times
from momentprop.engine.tracking import Tracked
from momentprop.errors import CovarianceError
from momentprop.moments import Logits, Moments, is_moments, mean_of
from momentprop.rules.local import Elementwise, Linear, Local


@dataclass
class Swept:
    """What the sweep back found out about an output."""

    covariance: Tensor
    indices: Tensor | None
    sources: Sources | None = None


class TwoSweeps(nn.Module):
    """A program like that of propagate.py, program(*state, *inputs) -> flat outputs, with covariances.

    With `jumps`, so many of the largest single causes of each output's variance too.
    """

    def __init__(
        self,
        trace: Trace,
        random: set[fx.Node],
        layouts: Mapping[str, Layout],
        selection: Selection,
        jumps: int = 0,
    ) -> None:
        super().__init__()
        mixed = [node for node in trace.graph.nodes if node in random and node.name not in layouts]
        if mixed:
            raise CovarianceError(
                "the covariance of one sample's outputs is not defined where samples of the batch share "
                f"noise or influence each other, or where the batch size is fixed:\n  {place_of(mixed[0])}"
            )
        self.layouts = dict(layouts)
        self.selection = selection
        self.jumps = jumps
        self.observe: Callable[[str, Any], None] | None = None  # told every random value inside
        nodes = list(trace.graph.nodes)
        self.placeholders = [n.name for n in nodes if n.op == "placeholder"]
        self.shapes = {n.name: _fixed_sizes(n) for n in nodes if n.op == "placeholder"}
        self.outputs = [Ref(v.name) if isinstance(v, fx.Node) else v for v in nodes[-1].args[0]]
        uncertain = [v for v in nodes[-1].args[0] if isinstance(v, fx.Node) and v in random]
        self.heads: dict[str, str] = {v.name: str(v.args[0]) for v in uncertain if v.target in HEADS}
        self.n_outputs = sum(selection.count(layouts[v.name].size) for v in uncertain)
        wanted = [v.name for v in self.outputs if isinstance(v, Ref)] + list(self.heads.values())
        sources = path_sources(trace.graph, random, layouts)
        self.paths = Paths(trace, sources, random, wanted) if sources else None
        if self.paths is not None:
            wanted = [*wanted, *self.paths.boundary, *self.paths.sources]
        self.calls = with_last_uses(calls(trace, random), set(wanted))
        self.signs = signs(layouts) if pays(trace.graph, random) else None

    def forward(self, *values: Any) -> list[Any]:
        env = dict(zip(self.placeholders, values, strict=True))
        for name, sizes in self.shapes.items():
            for dim, size in sizes.items():
                if env[name].shape[dim] != size:  # compilers that compare a size do not take it for variable
                    break
        tape = Tape(self.jumps > 0)
        sketch = None if self.signs is None else Sketch(self.signs, self.layouts)
        for name, value in env.items():
            if is_moments(value):
                source = Elementwise(noise=value.variance)
                tape.only_masks = False
                tape.record(name, [], source, True, None)
                if sketch is not None:
                    sketch.follow(name, [], value, source, lambda j: None)
        directions: dict[str, Tensor] = {}
        heads: dict[str, Local] = {}
        for call in self.calls:
            args, kwargs = filled(call.args, env), filled(call.kwargs, env)
            out: Any
            if isinstance(call.target, Tracked) and is_moments(args[0]):
                x, weight, bias = args
                out, directions[call.name] = call.target(x, weight, bias, directions.get(call.inputs[0]))
            elif isinstance(call.target, Tracked):  # random for other inputs than these
                out = call.plain(*args)
            else:
                out = call.target(*args, **kwargs)
            if self.paths is not None and call.name in self.paths.sources:
                out = mean_of(out)  # no noise of the sweeps
            env[call.name] = out
            if not _is_random(out):
                forget(call.last_use_of, env, {} if sketch is None else sketch.deviations)
                continue
            inputs = [name for name in call.inputs if _is_random(env[name])]
            local = self._linearize(call, out, args, kwargs)
            if getattr(call.target, "creates_noise", False) and not _is_mask(local):
                tape.only_masks = False
            if sketch is not None:
                local = sketch.bent(inputs, local)
            if isinstance(local, Elementwise) and inputs and inputs[0] in directions:
                directions[call.name] = times(directions[inputs[0]], local.gain)
            if call.name in self.heads:
                heads[call.name] = local
            length = len(out) if isinstance(out, (list, tuple)) else None
            tape.record(call.name, inputs, local, call.shared, length)
            if sketch is not None:
                env[call.name] = sketch.follow(call.name, inputs, out, local, _on_means(call, env, sketch))
            if self.observe is not None:
                self.observe(call.name, env[call.name])
            forget(call.last_use_of, env, {} if sketch is None else sketch.deviations)
        names = [v.name for v in self.outputs if isinstance(v, Ref)]
        answers = {} if self.paths is None else self.paths(env)
        random = {name: env[name] for name in names if is_moments(env[name])}
        done = self._with_covariance(random, env, tape, heads, answers)
        for name in answers.keys() & set(names) - random.keys():  # paths are all there is
            done[name] = self._of_paths(env[name], answers[name], name)
        outputs = [env[v.name] if isinstance(v, Ref) else v for v in self.outputs]
        return [
            done[v.name] if isinstance(v, Ref) and v.name in done else out
            for v, out in zip(self.outputs, outputs, strict=True)
        ]

    def _with_covariance(
        self,
        random: dict[str, Moments],
        env: Mapping[str, Any],
        tape: Tape,
        heads: Mapping[str, Local],
        answers: Mapping[str, tuple[Tensor, Tensor]],
    ) -> dict[str, Moments]:
        """The outputs completed. For probabilities it is the logits' covariance that is swept back to."""
        if not random:
            return {}
        logits = {n: self.heads[n] for n, out in random.items() if n in self.heads and out.logits is not None}
        through = logits if self.selection.takes_all else {}
        swept = {name: out for name, out in random.items() if name not in through}
        swept |= {name: env[name] for name in logits.values()}
        sources = Sources(self.jumps) if self.jumps else None
        found = _covariances(swept, tape, self.layouts, self.selection, sources)
        without_paths = {name: one.covariance for name, one in found.items()}
        for name in answers.keys() & swept.keys():
            jumps, shift = answers[name]
            found[name] = self._with_paths(found[name], jumps, name)
            swept[name] = Moments(swept[name].mean + shift, swept[name].variance)
        done = {
            name: _completed(out, found[name], self.layouts[name], tape.only_masks)
            for name, out in swept.items()
        }
        for name, inner in logits.items():
            out = random[name]
            if name in through:
                covariance = self._behind(heads[name], without_paths[inner], out, name, inner)
                if name in answers:  # how probabilities themselves jump, not their logits
                    jumps, shift = answers[name]
                    covariance = covariance + self._of_jumps(jumps, None, name)
                    out = Moments(out.mean + shift, out.variance, logits=out.logits)
                done[name] = _completed(out, Swept(covariance, None), self.layouts[name])
            assert out.logits is not None  # as chosen above
            done[name].logits = Logits(done[inner], out.logits.dim)
        return done

    def _of_jumps(self, jumps: Tensor, indices: Tensor | None, name: str) -> Tensor:
        """The covariance of the chosen outputs that jumps [paths, *shape] give."""
        rows = self._chosen(jumps, indices, name)
        return rows.mT @ rows

    def _chosen(self, jumps: Tensor, indices: Tensor | None, name: str) -> Tensor:
        """Jumps of the chosen outputs, [batch, paths, K]."""
        layout = self.layouts[name]
        rows = layout.split(jumps, layout.batch_of(jumps[0]))
        if indices is not None:
            rows = rows.gather(2, indices[:, None].expand(-1, rows.shape[1], -1))
        return rows

    def _with_paths(self, found: Swept, jumps: Tensor, name: str) -> Swept:
        rows = self._chosen(jumps, found.indices, name)
        if found.sources is not None:
            assert self.paths is not None
            for keep, row in zip(self.paths.keep, rows.unbind(1), strict=True):
                found.sources.add(row[..., None], 1 - keep)
        return Swept(found.covariance + rows.mT @ rows, found.indices, found.sources)

    def _of_paths(self, value: Tensor, answer: tuple[Tensor, Tensor], name: str) -> Moments:
        """An output that nothing else makes random."""
        layout = self.layouts[name]
        jumps, shift = answer
        out = Moments(value + shift, jumps.square().sum(0))
        _, indices = self.selection.of(out, layout)
        count = layout.size if indices is None else indices.shape[1]
        nothing = jumps.new_zeros(layout.batch_of(value), count, count)
        swept = Swept(nothing, indices, Sources(self.jumps) if self.jumps else None)
        return _completed(out, self._with_paths(swept, jumps, name), layout, True)

    def _behind(self, head: Local, logits: Tensor, out: Moments, name: str, inner: str) -> Tensor:
        """The covariance J C J^T + noise of probabilities, from that of their logits."""
        layout = self.layouts[name]
        seeds, _ = self.selection.of(out, layout)
        batch = layout.batch_of(out.mean)
        pulled = times(seeds, head.gain) if isinstance(head, Elementwise) else head.pull(seeds)[0]
        rows = self.layouts[inner].split(pulled, batch)
        if isinstance(head, Linear) and out.mean.dim() == 2:
            # softmax does not see what all logits have in common, and rounding shall not either
            common = logits.mean(-1, keepdim=True)
            logits = logits - common - common.mT + common.mean(-2, keepdim=True)
        covariance = rows @ logits @ rows.mT
        if head.noise is not None:
            covariance = covariance + scattered(seeds, head.noise, layout, batch)
        return (covariance + covariance.mT) / 2

    def _linearize(self, call: Call, out: Any, args: Any, kwargs: Any) -> Local:
        if call.gain is not None:
            return call.gain(out, args, kwargs)
        if call.target is operator.getitem:
            # one of several results may bring noise of its own
            return Linear(lambda cotangent: [{args[1]: cotangent}], getattr(out, "noise", None))
        linear_part: Any = call.target.local
        return linear_part(out, *args, **kwargs)


def _fixed_sizes(placeholder: fx.Node) -> dict[int, int]:
    """The dimensions of an input that do not vary with the batch, and their sizes."""
    value = placeholder.meta.get("val")
    shape = value.shape if isinstance(value, Tensor) else ()
    return {dim: size for dim, size in enumerate(shape) if isinstance(size, int)}


def _on_means(call: Call, env: Mapping[str, Any], sketch: Sketch) -> Callable[[int], Any]:
    """The operator itself at the means of its inputs plus a deviation."""

    def evaluate(j: int) -> Any:
        values = {name: _shifted(env[name], sketch.deviations.get(name), j) for name in call.inputs}
        return call.plain(*filled(call.args, values), **filled(call.kwargs, values))

    return evaluate


def _shifted(value: Any, deviations: Any, j: int) -> Any:
    if isinstance(value, (list, tuple)):
        return [_shifted(v, d, j) for v, d in zip(value, deviations or [None] * len(value), strict=True)]
    if not is_moments(value):
        return value
    return value.mean if deviations is None else value.mean + deviations[j]


def _is_random(value: Any) -> bool:
    return is_moments(value) or (isinstance(value, (list, tuple)) and any(map(is_moments, value)))


def _is_mask(local: Local) -> bool:
    return (local.masked if isinstance(local, Elementwise) else local.drops) is not None


def _covariances(
    random: dict[str, Moments],
    tape: Tape,
    layouts: Mapping[str, Layout],
    selection: Selection,
    sources: Sources | None,
) -> dict[str, Swept]:
    """Covariance and chosen indices of every value; all of them are swept together."""
    chosen = {name: selection.of(out, layouts[name]) for name, out in random.items()}
    rows = [seeds.shape[0] for seeds, _ in chosen.values()]
    seeds, start = {}, 0
    for (name, (block, _)), count in zip(chosen.items(), rows, strict=True):
        tape.settle(name)
        seeds[name] = block
        if len(rows) > 1:
            above, below = (
                block.new_zeros(start, *block.shape[1:]),
                block.new_zeros(sum(rows) - start - count, *block.shape[1:]),
            )
            seeds[name] = torch.cat([above, block, below])
        start += count
    first = next(iter(random))
    total = tape.covariance(seeds, layouts, layouts[first].batch_of(random[first].mean), sources)
    found, start = {}, 0
    for (name, (_, indices)), count in zip(chosen.items(), rows, strict=True):
        covariance = total[:, start : start + count, start : start + count]
        found[name] = Swept(covariance, indices, None if sources is None else sources.of(start, count))
        start += count
    return found


def _completed(out: Moments, swept: Swept, layout: Layout, only_masks: bool = False) -> Moments:
    """The forward sweep's variance gives way to the covariance's diagonal."""
    covariance, indices, jumps = swept.covariance, swept.indices, None
    diagonal = covariance.flatten(1)[:, :: covariance.shape[1] + 1].clamp_min(0)
    if swept.sources is not None:
        jumps = swept.sources.jumps(out.mean, layout, diagonal if only_masks else None)
    if indices is not None:
        diagonal = layout.samples(out.variance).scatter(1, indices, diagonal)
    return Moments(out.mean, layout.restored(diagonal, out.mean), covariance, indices, jumps=jumps)
