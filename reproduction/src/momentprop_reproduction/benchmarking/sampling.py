"""MC dropout outside PyTorch, as fast as it can be made there: what `monte_carlo` does, in two programs.

The first computes what no dropout reaches, once; the second takes that and random bits, and returns many
samples as one batch. Bits are drawn by torch: no runtime draws them faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim

from momentprop.network import BayesianNetwork, inside
from momentprop.sample import WORKING_SET
from momentprop.sampling.sampler import Run, Sampler
from momentprop_reproduction.benchmarking.programs import Program

# (module, inputs, dynamic, name) -> what runs it
Make = Callable[[nn.Module, Sequence[Tensor], Sequence[Any], str], Program]
_COUNT = 3  # samples of the example


class _Prefix(nn.Module):
    """Computes the part that depends on the inputs and that no dropout reaches."""

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
    """Computes the part behind `_Prefix` for many samples as one batch.

    Weights are inside, not among the inputs. Samples are rows of a larger batch, whichever dimension that
    is of a value. (`torch.vmap`, which `monte_carlo` uses, does not keep sizes free.)
    """

    def __init__(self, sampler: Sampler, given: Sequence[Any], varying: Sequence[int]) -> None:
        super().__init__()
        self.graph, self.varying, self.constants = sampler.one, tuple(varying), {}
        self.sizes = {i: _rows(n) for i, n in enumerate(sampler.boundary) if _is_size(n)}
        self.dims = {i: _batch_dim(sampler.boundary[i]) for i in self.varying}
        self.noise_dims = [_batch_dim(node) for node in sampler.noise]
        self.output_dims = [_batch_dim(node) for node in sampler._random]
        for i, value in enumerate(given):
            if i in self.varying or i in self.sizes:
                continue
            if isinstance(value, Tensor):
                self.register_buffer(f"given_{i}", value.detach())
            else:
                self.constants[i] = value
        self.n_given = len(given)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        values, noise = tensors[: len(self.varying)], tensors[len(self.varying) :]
        count, batch = noise[0].shape[0], noise[0].shape[1 + self.noise_dims[0]]
        given: list[Any] = []
        for i in range(self.n_given):
            if i in self.varying:
                value = values[self.varying.index(i)]
                given.append(_as_rows(value.unsqueeze(0).expand(count, *value.shape), self.dims[i]))
            elif i in self.sizes:
                given.append(self.sizes[i] * count * batch)
            else:
                given.append(self.constants[i] if i in self.constants else getattr(self, f"given_{i}"))
        found = self.graph(*given, *map(_as_rows, noise, self.noise_dims))
        pairs = zip(found, self.output_dims, strict=True)
        return tuple(value.unflatten(d, (count, batch)).movedim(d, 0) for value, d in pairs)


def sample_with(bnn: BayesianNetwork, make: Make, inputs: tuple[Tensor, ...], n_samples: int) -> Any:
    """inputs -> (mean, variance) of every random output, with both parts run by what `make` gives."""
    trace = inside(bnn).trace
    sampler = Sampler(trace, (False,) * len(trace.input_nodes))
    if sampler.has_other_noise:
        raise NotImplementedError("noise that is drawn inside an operator cannot be fed to a program")
    state = inside(bnn).state
    with torch.no_grad():
        run = sampler.start(state, list(inputs))
    varying = [
        i
        for i, node in enumerate(sampler.boundary)
        if node in sampler.input_nodes or (node.op != "placeholder" and not _is_size(node))
    ]
    batched = [{0: Dim.DYNAMIC}] * len(inputs)
    prefix = make(_Prefix(sampler, state, varying), inputs, batched, "prefix")
    noise = [source(_COUNT) for source in _sources(run)]
    given = [run.given[i] for i in varying]
    module = _Suffix(sampler, run.given, varying)
    with torch.no_grad():
        apart = [sampler.one(*run.given, *(n[i] for n in noise)) for i in range(_COUNT)]
        together = module(*given, *noise)
    for one, other in zip(together, map(torch.stack, zip(*apart, strict=True)), strict=True):
        if not torch.allclose(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max())):
            raise NotImplementedError("samples cannot be rows of a batch: rows influence each other")
    dynamic = [{d: Dim.DYNAMIC} for d in module.dims.values()]
    dynamic += [{0: Dim.DYNAMIC, 1 + d: Dim.DYNAMIC} for d in module.noise_dims]
    suffix = make(module, [*given, *noise], dynamic, "suffix")

    def sample(x: tuple[Tensor, ...]) -> Any:
        sizes = {symbol: len(x[0]) for symbol in run.sizes}
        now = Run(sampler, run.given, [], run.certain, sizes)
        at_once = min(now.samples_at_once(WORKING_SET), n_samples)
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


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def _rows(node: fx.Node) -> int:
    """Return how many times the batch size fits into a size."""
    size = node.meta["val"].node.expr
    [symbol] = size.free_symbols
    if not (size / symbol).is_Integer:
        raise NotImplementedError(f"samples cannot be rows of a batch: there is a size of {size}")
    return int(size / symbol)


def _batch_dim(node: fx.Node) -> int:
    """Return the one dimension whose size is free."""
    free = [d for d, size in enumerate(node.meta["val"].shape) if isinstance(size, torch.SymInt)]
    if len(free) != 1:
        raise NotImplementedError("samples cannot be rows of a batch: not every random value has one")
    return free[0]


def _as_rows(samples: Tensor, dim: int) -> Tensor:
    """[count, *shape] -> values whose batch, in this dimension, holds all samples one behind the other."""
    return samples.movedim(0, dim).flatten(dim, dim + 1)
