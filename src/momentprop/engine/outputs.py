"""Completes the outputs with what the backward sweep finds: covariance, variance, jumps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from momentprop.engine.accumulators import Accumulator, Covariance, Largest
from momentprop.engine.backward import sweep
from momentprop.engine.heads import Head
from momentprop.engine.layouts import Layout
from momentprop.engine.paths import Answer
from momentprop.engine.plan import Plan, Ref
from momentprop.engine.selection import Selection
from momentprop.engine.tape import Tape
from momentprop.moments import Logits, Moments, is_moments


@dataclass(frozen=True, eq=False)
class Swept:
    """Holds what the backward sweep found out about a value."""

    covariance: Tensor
    indices: Tensor | None
    jumps: Largest | None = None


def heads_of(plan: Plan, values: Mapping[str, Any]) -> dict[str, Head]:
    """Final operators to integrate: those whose rule keeps the logits, as a rule of one's own need not."""
    known = {name: head for name, head in plan.heads.items() if is_moments(values.get(name))}
    return {name: head for name, head in known.items() if values[name].logits is not None}


@dataclass(frozen=True, eq=False)
class Outputs:
    """Completes a network's outputs."""

    plan: Plan
    layouts: Mapping[str, Layout]
    selection: Selection
    jumps: int

    @property
    def names(self) -> list[str]:
        return [v.name for v in self.plan.outputs if isinstance(v, Ref)]

    @property
    def count(self) -> int:
        """Count the outputs per sample that get a covariance."""
        random = [name for name in self.names if name in self.plan.random]
        return sum(self.selection.count(self.layouts[name].size) for name in random)

    def completed(
        self,
        env: Mapping[str, Any],
        tape: Tape,
        answers: Mapping[str, Answer],
    ) -> dict[str, Moments]:
        """Outputs by name, with covariance; `answers` are those to paths that are kept or dropped."""
        random = {name: env[name] for name in self.names if is_moments(env[name])}
        done = self._swept(random, env, tape, answers) if random else {}
        for name in answers.keys() & set(self.names) - random.keys():  # paths are all there is
            done[name] = self._of_paths(env[name], answers[name], name)
        return done

    def _swept(
        self,
        random: Mapping[str, Moments],
        env: Mapping[str, Any],
        tape: Tape,
        answers: Mapping[str, Answer],
    ) -> dict[str, Moments]:
        """Complete outputs that are random; of probabilities the logits are swept, and integrated."""
        heads = heads_of(self.plan, random)
        swept = {name: out for name, out in random.items() if name not in heads}
        swept |= {head.logits: env[head.logits] for head in heads.values()}
        found = self._sweep(swept, tape)
        without_paths = {
            head.logits: self._completed(env[head.logits], found[head.logits], head.logits)
            for head in heads.values()
        }
        for name in answers.keys() & swept.keys():
            found[name] = self._with_paths(found[name], answers[name], name)
            swept[name] = Moments(swept[name].mean + answers[name].shift, swept[name].variance)
        done = {name: self._completed(out, found[name], name) for name, out in swept.items()}
        for name, head in heads.items():
            out = head.applied(without_paths[head.logits], self.layouts[name])
            if name in answers:  # how probabilities themselves jump, not their logits
                out = self._jumping(out, answers[name], name)
            done[name] = dataclasses.replace(out, logits=Logits(done[head.logits], head.dim))
        return done

    def _jumping(self, out: Moments, answer: Answer, name: str) -> Moments:
        assert out.covariance is not None
        swept = self._with_paths(Swept(out.covariance, out.indices), answer, name)
        shifted = Moments(out.mean + answer.shift, out.variance + answer.jumps.square().sum(0))
        return self._completed(shifted, swept, name)

    def _sweep(self, random: Mapping[str, Moments], tape: Tape) -> dict[str, Swept]:
        """Covariance and chosen indices of every value; all of them are swept together."""
        chosen = {name: self.selection.of(out, self.layouts[name]) for name, out in random.items()}
        counts = [seeds.shape[0] for seeds, _ in chosen.values()]
        seeds, start = {}, 0
        for (name, (block, _)), count in zip(chosen.items(), counts, strict=True):
            tape.settle(name)
            seeds[name] = block
            if len(counts) > 1:
                above = block.new_zeros(start, *block.shape[1:])
                below = block.new_zeros(sum(counts) - start - count, *block.shape[1:])
                seeds[name] = torch.cat([above, block, below])
            start += count
        first = next(iter(random))
        batch = self.layouts[first].batch_of(random[first].mean)
        covariance, largest = Covariance(), Largest(self.jumps) if self.jumps else None
        wanted: list[Accumulator] = [covariance] if largest is None else [covariance, largest]
        sweep(tape, seeds, self.layouts, batch, wanted)
        total = covariance.result(batch, seeds[first])
        found, start = {}, 0
        for (name, (_, indices)), count in zip(chosen.items(), counts, strict=True):
            stop = start + count
            block = total[:, start:stop, start:stop]
            found[name] = Swept(block, indices, None if largest is None else largest.of(start, count))
            start = stop
        return found

    def _chosen(self, jumps: Tensor, indices: Tensor | None, name: str) -> Tensor:
        """Jumps of the chosen outputs, [batch, paths, K]."""
        layout = self.layouts[name]
        rows = layout.split(jumps, layout.batch_of(jumps[0]))
        if indices is not None:
            rows = rows.gather(2, indices[:, None].expand(-1, rows.shape[1], -1))
        return rows

    def _with_paths(self, found: Swept, answer: Answer, name: str) -> Swept:
        rows = self._chosen(answer.jumps, found.indices, name)
        if found.jumps is not None:
            for keep, row in zip(answer.keep, rows.unbind(1), strict=True):
                found.jumps.keep(row[..., None], 1 - keep)
        return Swept(found.covariance + rows.mT @ rows, found.indices, found.jumps)

    def _of_paths(self, value: Tensor, answer: Answer, name: str) -> Moments:
        """An output that nothing else makes random."""
        layout = self.layouts[name]
        out = Moments(value + answer.shift, answer.jumps.square().sum(0))
        _, indices = self.selection.of(out, layout)
        count = layout.size_in(value) if indices is None else indices.shape[1]
        nothing = value.new_zeros(layout.batch_of(value), count, count)
        swept = Swept(nothing, indices, Largest(self.jumps) if self.jumps else None)
        return self._completed(out, self._with_paths(swept, answer, name), name)

    def _completed(self, out: Moments, swept: Swept, name: str) -> Moments:
        """The forward sweep's variance gives way to the covariance's diagonal."""
        layout, covariance, indices, jumps = self.layouts[name], swept.covariance, swept.indices, None
        diagonal = covariance.flatten(1)[:, :: covariance.shape[1] + 1].clamp_min(0)
        if swept.jumps is not None:
            jumps = swept.jumps.result(out.mean, layout, diagonal if self.plan.only_masks else None)
        if indices is not None:
            diagonal = self.selection.corrected(layout.samples(out.variance), diagonal, indices)
            asked = self.selection.count(layout.size_in(out.mean))
            covariance, indices = covariance[:, :asked, :asked], indices[:, :asked]
        return Moments(out.mean, layout.restored(diagonal, out.mean), covariance, indices, jumps=jumps)
