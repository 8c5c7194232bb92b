"""MC dropout outside PyTorch, as fast as it can be made there: what `monte_carlo` does, in two programs.

The first computes what no dropout reaches, once; the second takes that and random bits, and returns many
samples as one batch. Bits are drawn by torch: no runtime draws them faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from momentprop.benchmarking.programs import Program
from momentprop.convert import BayesianNetwork
from momentprop.montecarlo import _WORKING_SET
from momentprop.sampler import Run, Sampler

# (module, inputs, dynamic, name) -> what runs it
Make = Callable[[nn.Module, Sequence[Tensor], Sequence[Any], str], Program]
_COUNT = 3  # samples of the example


class _Prefix(nn.Module):
    """What no dropout reaches and inputs do."""

    def __init__(self, sampler: Sampler, state: Sequence[Tensor], varying: Sequence[int]) -> None:
        super().__init__()
        self.graph, self.varying = sampler._prefix, tuple(varying)
        for i, tensor in enumerate(state):
            self.register_buffer(f"state_{i}", tensor.detach())
        self.n_state = len(state)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        values = list(self.graph(*[getattr(self, f"state_{i}") for i in range(self.n_state)], *inputs))
        return tuple(values[i] for i in self.varying)


class _Suffix(nn.Module):
    """The rest, for a batch of samples: weights are inside, not among the inputs."""

    def __init__(self, sampler: Sampler, given: Sequence[Any], varying: Sequence[int]) -> None:
        super().__init__()
        self.run, self.varying, self.constants = sampler.many, tuple(varying), {}
        for i, value in enumerate(given):
            if i not in self.varying and isinstance(value, Tensor):
                self.register_buffer(f"given_{i}", value.detach())
            elif i not in self.varying:
                self.constants[i] = value
        self.n_given = len(given)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        rest = list(tensors)
        given: list[Any] = []
        for i in range(self.n_given):
            if i in self.varying:
                given.append(rest.pop(0))
            else:
                given.append(self.constants[i] if i in self.constants else getattr(self, f"given_{i}"))
        return tuple(self.run(*given, *rest))


def sample_with(bnn: BayesianNetwork, make: Make, inputs: tuple[Tensor, ...], n_samples: int) -> Any:
    """inputs -> (mean, variance) of every random output, with both parts run by what `make` gives."""
    trace = bnn._trace
    sampler = Sampler(trace, (False,) * len(trace.input_nodes))
    if sampler.has_other_noise:
        raise NotImplementedError("noise that is drawn inside an operator cannot be fed to a program")
    state = bnn._state()
    run = sampler.start(state, list(inputs))
    varying = [i for i, node in enumerate(sampler.boundary) if node.op != "placeholder"]
    varying += [i for i, node in enumerate(sampler.boundary) if node in trace.input_nodes]
    batched = [{0: Dim.DYNAMIC}] * len(inputs)
    prefix = make(_Prefix(sampler, state, varying), inputs, batched, "prefix")
    with run.seeded(0) as _:
        noise = [source(_COUNT) for source in _sources(run)]
    given = [run.given[i] for i in varying]
    dynamic = [_free(sampler.boundary[i].meta["val"], 0) for i in varying]
    dynamic += [_free(n.meta["val"], 1) for n in sampler.noise]
    suffix = make(_Suffix(sampler, run.given, varying), [*given, *noise], dynamic, "suffix")

    def sample(x: tuple[Tensor, ...]) -> Any:
        sizes = {symbol: len(x[0]) for symbol in run.sizes}
        now = Run(sampler, run.given, [], run.certain, sizes)
        at_once = min(now.samples_at_once(_WORKING_SET), n_samples)
        sources = _sources(now)
        values = [torch.as_tensor(v) for v in prefix(x)]
        found: list[list[Tensor]] = []
        for begin in range(0, n_samples, at_once):
            drawn = [source(min(at_once, n_samples - begin)) for source in sources]
            found.append([torch.as_tensor(v) for v in suffix([*values, *drawn])])
        samples = [torch.cat(parts) for parts in zip(*found, strict=True)]
        return [(s.mean(0), s.var(0)) for s in samples]

    return sample


def _sources(run: Run) -> list[Callable[[int], Tensor]]:
    return [run._source(n, torch.Generator().manual_seed(i)) for i, n in enumerate(run.sampler.noise)]


def _free(value: Tensor, shift: int) -> dict[int, Any]:
    """The free dimensions of a value, and with `shift` the number of samples before them."""
    found = {d + shift: Dim.DYNAMIC for d, n in enumerate(value.shape) if isinstance(n, torch.SymInt)}
    return ({0: Dim.DYNAMIC} if shift else {}) | found
