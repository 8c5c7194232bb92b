"""The sampling oracle: MC dropout, as fast as it can honestly be made.

Every claim of this library is measured against it, so it must be right first and then hard to beat:

- what no dropout reaches is computed once, not once per sample;
- many samples run as one batch, within a memory budget;
- masks are drawn as raw random bits, 32 per element: several times faster than `F.dropout`, exact to
  2^-32 in p, and the global generator is left alone;
- moments are streamed, so 10,000 samples need no memory.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from momentprop.capture.choice import Where
from momentprop.capture.records import rebuild_output
from momentprop.capture.signature import split_inputs
from momentprop.capture.trace import Trace, trace
from momentprop.errors import MissingExtraError, MomentpropError
from momentprop.moments import Moments, as_output, is_moments
from momentprop.network import BayesianNetwork, inside
from momentprop.sampling.sampler import Run, Sampler

_KEEP = 2**30  # samples up to this many bytes are kept by default
WORKING_SET = 2**20  # elements of the largest activation of one batch of samples: what caches hold, measured
_SAMPLERS: weakref.WeakKeyDictionary[Trace, dict[Any, Sampler]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False, repr=False)
class SampledMoments(Moments):
    """Moments estimated from samples, with their standard errors.

    `variance` is the unbiased estimate; `samples` has shape [n_samples, *mean.shape].
    """

    n_samples: int = 0
    mean_error: Tensor | None = None
    variance_error: Tensor | None = None
    kept: Tensor | None = None
    head: tuple[str, int | None] | None = None  # what made these of logits, and the dimension of classes

    def to(self, *args: Any, **kwargs: Any) -> SampledMoments:
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(*args, **kwargs), self)

    def _says(self) -> list[str]:
        return [*super()._says(), f"n_samples={self.n_samples}"]

    @property
    def samples(self) -> Tensor:
        """All samples; kept when they fit into 1 GiB, or on request."""
        if self.kept is None:
            raise MomentpropError(
                "the samples were streamed, not kept; call monte_carlo(..., keep_samples=True)"
            )
        return self.kept


torch.serialization.add_safe_globals([SampledMoments])
_TENSORS = ("mean", "variance", "mean_error", "variance_error", "kept")
pytree.register_pytree_node(
    SampledMoments,
    lambda m: ([getattr(m, name) for name in _TENSORS], (m.n_samples, m.head)),
    lambda values, known: SampledMoments(
        **dict(zip(_TENSORS, values, strict=True)), n_samples=known[0], head=known[1]
    ),
    serialized_type_name="momentprop.SampledMoments",
    flatten_with_keys_fn=lambda m: (
        [(pytree.GetAttrKey(name), getattr(m, name)) for name in _TENSORS],
        (m.n_samples, m.head),
    ),
)


def monte_carlo(
    model: nn.Module,
    inputs: Any,
    n_samples: int = 50,
    seed: int = 0,
    *,
    keep_samples: bool | None = None,
    samples_at_once: int | None = None,
    compile: bool = False,
    progress: bool = False,
    batch_dim: Any = 0,
    dropout: Where | None = None,
) -> Any:
    """Mean, variance and standard errors of the outputs over random dropout masks.

    Args:
        model: a dropout network, or a converted one (which saves tracing it again).
        inputs: as the example inputs of `mp.convert`; `Moments` among them are
            sampled as Gaussian noise.
        n_samples: number of forward passes with fresh masks.
        seed: fixes the masks, however samples are batched; the global random state is left alone.
        keep_samples: whether to keep `.samples`; by default when they fit into 1 GiB.
        samples_at_once: how many samples run as one batch; by default chosen for speed and memory.
        compile: run the sampled part through `torch.compile`.
        progress: show a progress bar on stderr (needs rich).
        batch_dim: as for `mp.convert`; a converted network knows it.
        dropout: which dropouts count, as for `mp.convert`; a converted network knows it.

    Returns:
        The model's output structure with `SampledMoments` in place of tensors.

    >>> import torch, momentprop as mp
    >>> model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(10, 2))
    >>> mc = mp.monte_carlo(model, torch.ones(3, 10), n_samples=200)
    >>> mc.samples.shape, mc.mean_error.shape
    (torch.Size([200, 3, 2]), torch.Size([3, 2]))
    """
    if n_samples < 2:
        raise ValueError(f"n_samples must be at least 2, not {n_samples}")
    inputs = args, kwargs = split_inputs(inputs)
    if not isinstance(model, BayesianNetwork):
        traced = trace(model, inputs, batch_dim, dropout)
    elif dropout is None:
        traced = inside(model).trace
    else:
        raise ValueError("the dropouts of a converted network were chosen when it was converted")
    leaves = traced.signature.flatten(args, kwargs)
    sampler = _sampler(traced, tuple(is_moments(leaf) for leaf in leaves), compile)
    state = [lookup(model, name, traced.constants) for name in traced.state]
    with torch.no_grad():
        run = sampler.start(state, leaves)
        collectors = [Collector(n_samples, keep_samples) for r in sampler.is_random if r]
        batches = draws(run, n_samples, seed, samples_at_once or run.samples_at_once(WORKING_SET))
        for outputs in _with_bar(batches, n_samples) if progress else batches:
            for collector, output in zip(collectors, outputs, strict=True):
                collector.add(output)
    certain = iter([_certain(value, n_samples) for value in run.certain])
    sampled = iter([collector.result() for collector in collectors])
    results = [next(sampled) if random else next(certain) for random in sampler.is_random]
    for position, head in traced.heads.items():
        results[position] = dataclasses.replace(results[position], head=head)
    return rebuild_output(results, traced.out_spec)


def _sampler(traced: Trace, uncertain: tuple[bool, ...], compile: bool) -> Sampler:
    """Kept with the trace, so that a converted network is cut and compiled once."""
    samplers = _SAMPLERS.setdefault(traced, {})
    if (uncertain, compile) not in samplers:
        samplers[uncertain, compile] = Sampler(traced, uncertain, compile)
    return samplers[uncertain, compile]


class Collector:
    """Streams the first four moments of samples that arrive in batches, as sums of powers.

    They are those of deviations from the first sample, in float64: near the mean, so that little cancels.
    """

    def __init__(self, n_samples: int, keep: bool | None) -> None:
        self.n_samples, self.keep = n_samples, keep
        self.count = 0
        self.kept: list[Tensor] = []

    def add(self, samples: Tensor) -> None:
        if self.count == 0:
            self.dtype = samples.dtype if samples.is_floating_point() else torch.get_default_dtype()
            size = samples[0].numel() * samples.element_size() * self.n_samples
            self.keep = size <= _KEEP if self.keep is None else self.keep
            self.first = samples[0].to(torch.float64)
            self.sums = [torch.zeros_like(self.first) for _ in range(4)]
        if self.keep:
            self.kept.append(samples)
        d = samples.to(torch.float64) - self.first
        for power, total in enumerate(self.sums, 1):
            total += (d**power).sum(0)
        self.count += samples.shape[0]

    def result(self) -> SampledMoments:
        n = self.count
        d, second, third, fourth = (total / n for total in self.sums)
        central = (second - d**2).clamp_min(0)
        m4 = fourth - 4 * d * third + 6 * d**2 * second - 3 * d**4
        variance = central * (n / (n - 1))
        # Var(s^2) = (mu_4 - (n-3)/(n-1) sigma^4) / n
        variance_error = ((m4 - (n - 3) / (n - 1) * variance**2).clamp_min(0) / n).sqrt()
        return SampledMoments(
            mean=(self.first + d).to(self.dtype),
            variance=variance.to(self.dtype),
            n_samples=n,
            mean_error=(variance / n).sqrt().to(self.dtype),
            variance_error=variance_error.to(self.dtype),
            kept=torch.cat(self.kept) if self.keep else None,
        )


def _certain(value: Any, n_samples: int) -> Any:
    """An output no noise reaches: the same in every sample."""
    if not is_moments(as_output(value)):  # integers, too
        return value
    zero = torch.zeros_like(value)
    repeated = value.expand(n_samples, *value.shape)
    return SampledMoments(
        value, zero, n_samples=n_samples, mean_error=zero, variance_error=zero, kept=repeated
    )


def lookup(model: nn.Module, name: str, constants: dict[str, Tensor]) -> Tensor:
    try:
        found: Any = functools.reduce(getattr, name.split("."), model)
        return found
    except AttributeError:
        return constants[name]


def draws(run: Run, n_samples: int, seed: int, at_once: int) -> Iterator[list[Tensor]]:
    """Yield samples of every random output, [count, ...] each, in batches of at most so many."""
    at_once = 1 if run.sampler.has_other_noise else at_once
    with run.seeded(seed) as draw:
        for begin in range(0, n_samples, at_once):
            yield draw(min(at_once, n_samples - begin))


def _with_bar(batches: Iterator[list[Tensor]], n_samples: int) -> Iterator[list[Tensor]]:
    """Yield these batches, and show a bar on stderr."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError as error:
        raise MissingExtraError("rich", "cli") from error
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("sampling", total=n_samples)
        for outputs in batches:
            yield outputs
            bar.advance(task, len(outputs[0]) if outputs else n_samples)
