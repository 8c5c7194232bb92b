"""MC dropout over all inputs, streamed: moments, probabilities, and how fast they converge.

Inputs come in batches, and the samples of a batch in chunks, of which only sums are kept. The error of MC
dropout with T samples is measured on disjoint blocks of T samples, each against all the other samples: so
nothing is sampled twice, and no sample is compared with itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from momentprop.capture.trace import Trace
from momentprop.errors import InputError
from momentprop.sample import WORKING_SET, Collector, draws, lookup
from momentprop.sampling.sampler import Sampler
from momentprop.validation.equivalence import MOST_BLOCKS, SIZES, Classes, Gaussian, Predictive
from momentprop.validation.inputs import BATCH, Inputs
from momentprop.validation.interruption import between_steps
from momentprop.validation.outputs import Head, Layout
from momentprop.validation.tiers import Predicted, joined

Progress = Callable[[int, int], None]

_BLOCK_SUMS = 2**21  # elements of the sums kept for one size of blocks
_KEPT, _MOST_KEPT = 2**23, 1000  # elements of samples kept of all inputs, and samples, for mixtures
_FEWEST_KEPT = 50  # a mixture of less is no predictive distribution: then it is the Gaussian
_ROWS = 2**20  # numbers that the rows of one batch of inputs have
_LEAST = 20  # samples that make a report of an interrupted first batch


@dataclass(frozen=True, kw_only=True)
class Sampled(Predicted):
    """Holds what MC dropout gives, as rows (outputs.py)."""

    n_samples: int
    mean_error: Tensor
    variance_error: Tensor
    divergence: dict[int, Tensor]  # size -> [n], of that many samples from all
    samples: Tensor | None = None  # [some, n, elements]
    interrupted: bool = False

    @property
    def is_known(self) -> Tensor:
        """Say of which outputs the std is known to 25 %; of all that vary, where there is none of these.

        Saturated probabilities hardly vary but for rare samples, which tell nothing of their spread.
        """
        known = self.variance > 2 * self.variance_error
        return known if bool(known.any()) else self.variance > 0

    @property
    def curve(self) -> dict[int, float]:
        """Return the mean divergence by size of blocks."""
        return {size: values.nanmean().item() for size, values in self.divergence.items()}


def kind_of(layout: Layout) -> Predictive:
    return Classes() if layout.is_classes else Gaussian()


def output_of(traced: Trace, output: int) -> tuple[int, Head]:
    """The position of the output-th tensor among what the graph returns, and its softmax, if any."""
    returned: Any = next(reversed(traced.graph.nodes)).args[0]
    tensors = [
        i for i, v in enumerate(returned) if isinstance(v, fx.Node) and isinstance(v.meta.get("val"), Tensor)
    ]
    return tensors[output], traced.heads.get(tensors[output])


def sample(
    model: nn.Module,
    traced: Trace,
    inputs: Inputs,
    layout: Layout,
    n_samples: int,
    seed: int,
    *,
    output: int = 0,
    progress: Progress | None = None,
) -> Sampled:
    """Sample all inputs; after Ctrl-C, return those that are done."""
    sampler = Sampler(traced, (False,) * len(traced.input_nodes))
    position, _ = output_of(traced, output)
    if not sampler.is_random[position]:
        raise InputError(f"no dropout reaches output {output} of the model: there is nothing to compare")
    place = sum(sampler.is_random[:position])
    state = [lookup(model, name, traced.constants) for name in traced.state]
    done: list[Sampled] = []
    total, before = len(inputs) * n_samples, 0
    keep = min(n_samples, _MOST_KEPT, _KEPT // (len(inputs) * layout.size))
    with torch.no_grad(), between_steps() as check:
        for number, given in enumerate(inputs.batches(max(1, min(BATCH, _ROWS // layout.size)))):
            stream = _Stream(layout, n_samples, keep if keep >= min(n_samples, _FEWEST_KEPT) else 0)
            try:
                run = sampler.start(state, traced.signature.flatten(given, {}))
                at_once = run.samples_at_once(WORKING_SET)
                for drawn in draws(run, n_samples, seed * 65_537 + number, at_once):
                    stream.add(drawn[place])
                    if progress is not None:
                        progress(before + stream.count * len(given[0]), total)
                    check()
            except KeyboardInterrupt:
                if not done and stream.count < _LEAST:
                    raise
                return replace(joined(done or [stream.result()], samples=1), interrupted=True)
            done.append(stream.result())
            before += n_samples * len(given[0])
    return joined(done, samples=1)


class _Stream:
    """Sums up the samples of one batch of inputs."""

    def __init__(self, layout: Layout, n_samples: int, keep: int) -> None:
        self.layout, self.n_samples, self.keep = layout, n_samples, keep
        self.kind = kind_of(layout)
        self.count = 0
        self.moments = Collector(n_samples, keep=False)
        self.sizes = [s for s in SIZES if self.kind.smallest <= s <= n_samples // 2]
        self.blocks: dict[int, Tensor] = {}
        self.kept: list[Tensor] = []

    def add(self, samples: Tensor) -> None:
        values = self.layout.values(samples)
        self.moments.add(values)
        if self.layout.is_classes:
            numbers = self.layout.probabilities(samples)
        else:
            if self.count == 0:
                self.shift = values[0].double()  # or squares of large values cancel
            centred = values.double() - self.shift
            numbers = torch.stack([centred, centred * centred], -1)
            if self.count < self.keep:
                self.kept.append(values[: self.keep - self.count].float())
        if self.count == 0:
            self.total = torch.zeros_like(numbers[0])
            for size in self.sizes:
                most = min(MOST_BLOCKS, self.n_samples // size, _BLOCK_SUMS // max(1, numbers[0].numel()))
                self.blocks[size] = numbers.new_zeros(max(2, most), *numbers.shape[1:])
        self.total += numbers.sum(0)
        places = torch.arange(self.count, self.count + len(samples))
        for size, sums in self.blocks.items():
            block = places // size
            if int(block[0]) < len(sums):
                wanted = block < len(sums)
                sums.index_add_(0, block[wanted], numbers[wanted])
        self.count += len(samples)

    def result(self) -> Sampled:
        found = self.moments.result()
        assert found.mean_error is not None
        assert found.variance_error is not None
        return Sampled(
            n_samples=self.count,
            mean=found.mean.double(),
            variance=found.variance.double(),
            mean_error=found.mean_error.double(),
            variance_error=found.variance_error.double(),
            divergence=self._divergence(),
            probs=self.total / self.count if self.layout.is_classes else None,
            samples=torch.cat(self.kept) if self.kept else None,
        )

    def _divergence(self) -> dict[int, Tensor]:
        """Measure the divergence of blocks from all other samples: [n] for every size."""
        found = {}
        for size, sums in self.blocks.items():
            full = min(len(sums), self.count // size)
            rest = self.count - size
            if full == 0 or rest < size:
                continue
            own = self._predictive(sums[:full], size)
            kl = self.kind.kl(self._predictive(self.total - sums[:full], rest), own)
            kl = kl.mean(0) if kl.dim() == 2 else kl.mean((0, 2))
            # to first order the two errors add, 1/size + 1/rest; ours are taken against all samples
            found[size] = kl * (1 / size + 1 / self.count) / (1 / size + 1 / rest)
        return found

    def _predictive(self, sums: Tensor, count: int) -> Tensor:
        if self.layout.is_classes:
            return sums / count
        mean, square = (sums / count).unbind(-1)
        variance = (square - mean * mean).clamp_min(0) * (count / max(1, count - 1))
        return torch.stack([mean + self.shift, variance], -1)
