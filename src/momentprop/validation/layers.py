"""Layer by layer: mean and variance at every node behind a dropout, ours beside MC dropout's.

Compared is the forward sweep: what a tier takes the mean and the variance of each element to be where it
stands. MC dropout is run on the tier's own graph, whose rewrites are exact, so that every value has its
counterpart. Inside, the accurate tier's variances are those of single elements too; its outputs, where the
sweep back gives the covariance, are the last row. Values that a tier never forms, since one rule stands for
several operators, have no row. Samples are streamed, and of large values evenly spaced elements are taken.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from momentprop.capture.trace import Trace
from momentprop.engine.per_sample import PerSample
from momentprop.engine.program import Program
from momentprop.graph.place import place_of
from momentprop.moments import Moments, is_moments
from momentprop.network import BayesianNetwork, inside
from momentprop.sample import Collector, SampledMoments, draws
from momentprop.sampling.sampler import Sampler
from momentprop.validation.inputs import Inputs
from momentprop.validation.outputs import evenly

_MOST_ELEMENTS = 256  # of one input, at one node
_AT_ONCE = 2**22  # elements of all activations of the samples that run as one batch


@dataclass(frozen=True)
class LayerRow:
    """Holds one node; ratio, correlation and shift are over all elements that vary, of all inputs."""

    depth: int
    node: str
    module: str
    operator: str
    source: str
    std_ratio: float  # root of the summed variances, ours over MC's
    std_correlation: float
    mean_shift: float  # typical (by the median), in units of MC's std, MC's own error taken off
    introduced: float  # its error less the largest among its inputs

    @property
    def where(self) -> str:
        """Return the module's name, which the model itself does not have."""
        return self.module or "(model)"

    @property
    def short_operator(self) -> str:
        """Return the operator's short name: `aten.linear.default` is read as linear."""
        return self.operator.removeprefix("aten.").split(".")[0]

    @property
    def error(self) -> float:
        """Relative error of the std plus shift of the mean."""
        return abs(math.log(self.std_ratio)) + self.mean_shift if self.std_ratio > 0 else math.inf


def sampled_nodes(
    network: BayesianNetwork,
    inputs: Inputs,
    n_samples: int,
    seed: int,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, SampledMoments]:
    """MC dropout's moments at the chosen elements [n, elements] of every random node of the tier's graph."""
    traced = inside(network).graph
    sampler, names = _observing(traced)
    leaves = traced.signature.flatten(inputs.tensors, {})
    collectors = [Collector(n_samples, keep=False) for _ in names]
    with torch.no_grad():
        run = sampler.start(inside(network).state, leaves)
        values = [n.meta["val"] for n in sampler.sampled if isinstance(n.meta.get("val"), Tensor)]
        size = sum(math.prod(run._shape(v)) for v in values if run._is_known(v))
        for drawn in draws(run, n_samples, seed, max(1, _AT_ONCE // max(1, size))):
            for collector, samples in zip(collectors, drawn, strict=True):
                collector.add(_chosen(samples, 1))
            progress(max((collector.count for collector in collectors), default=n_samples))
    return {name: collector.result() for name, collector in zip(names, collectors, strict=True)}


def propagated_nodes(network: BayesianNetwork, inputs: Inputs) -> dict[str, Moments]:
    """The tier's own moments at the same elements."""
    found: dict[str, Moments] = {}

    def observe(name: str, value: Any) -> None:
        if is_moments(value):
            found[name] = Moments(_chosen(value.mean, 0).double(), _chosen(value.variance, 0).double())

    parts = inside(network)
    leaves = parts.trace.signature.flatten(inputs.tensors, {})
    program = parts.built.program
    assert isinstance(program, Program)  # as the caller has seen to
    with torch.no_grad():
        outputs = program.run([*parts.state, *leaves], observe)
    for node, value in zip(_returned(parts.graph.graph), outputs, strict=True):
        if isinstance(node, fx.Node):
            observe(node.name, value)
    return found


def layer_rows(
    network: BayesianNetwork, sampled: dict[str, SampledMoments], ours: dict[str, Moments]
) -> list[LayerRow]:
    """Every node that both know, in the order of the graph."""
    rows: list[LayerRow] = []
    errors: dict[str, float] = {}
    for node in inside(network).graph.graph.nodes:
        before = max((errors.get(n.name, 0.0) for n in node.all_input_nodes), default=0.0)
        errors[node.name] = before
        if node.name not in sampled or node.name not in ours:
            continue
        figures = _compared(sampled[node.name], ours[node.name])
        if figures is None:
            continue
        place = place_of(node)
        row = LayerRow(len(rows), node.name, place.module, place.operator, place.source, *figures, 0.0)
        errors[node.name] = row.error
        rows.append(dataclasses.replace(row, introduced=row.error - before))
    return rows


def compare_layers(
    networks: dict[str, nn.Module],
    inputs: Inputs,
    n_samples: int,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[dict[str, list[LayerRow]], dict[str, str]]:
    """Rows by their tier, and why others have none. Tiers with the same graph share its samples."""
    known: dict[Any, dict[str, SampledMoments]] = {}
    found: dict[str, list[LayerRow]] = {}
    missing: dict[str, str] = {}
    total = len(networks) * n_samples
    for number, (tier, network) in enumerate(networks.items()):
        if not isinstance(network, BayesianNetwork) or isinstance(inside(network).built.program, PerSample):
            missing[tier] = "samples of the batch share noise, and each is computed by itself"
            continue
        graph = tuple((n.name, str(n.target), str(n.args)) for n in inside(network).graph.graph.nodes)
        try:
            if graph not in known:
                known[graph] = sampled_nodes(
                    network, inputs, n_samples, seed, partial(_add, progress, number * n_samples, total)
                )
            rows = layer_rows(network, known[graph], propagated_nodes(network, inputs))
        except (RuntimeError, NotImplementedError, TypeError, AssertionError) as error:
            missing[tier] = (
                f"its graph cannot be sampled node by node: {(str(error).splitlines() or [''])[0]}"
            )
            continue
        if rows:
            found[tier] = rows
        else:
            missing[tier] = "no node behind a dropout varies"
    return found, missing


def _add(progress: Callable[[int, int], None], before: int, total: int, done: int) -> None:
    progress(before + done, total)


def _compared(mc: SampledMoments, ours: Moments) -> tuple[float, float, float] | None:
    varies = mc.variance > 0
    if mc.mean.shape != ours.mean.shape or not bool(varies.any()):
        return None
    true, own = mc.variance.double()[varies], ours.variance[varies]
    shift = (ours.mean - mc.mean.double())[varies].square() / true
    ratio = (own.sum() / true.sum()).sqrt().item()
    spread = torch.stack([own.sqrt(), true.sqrt()])
    flat = bool((spread.std(1) <= 1e-6 * spread.mean(1)).any()) if spread.shape[1] > 1 else True
    correlation = math.nan if flat else torch.corrcoef(spread)[0, 1].item()
    # the median, as a single element that hardly ever varies must not decide; MC's own error is 1 / T
    mean_shift = math.sqrt(max(0.0, shift.median().item() / 0.4549 - 1 / mc.n_samples))
    return ratio, correlation, mean_shift


def _observing(traced: Trace) -> tuple[Sampler, list[str]]:
    """A sampler that returns every random number inside, and the names of those nodes."""
    certain = (False,) * len(traced.input_nodes)
    random = {n.name for n in Sampler(traced, certain).sampled}
    graph = traced.copy_graph()
    wanted = [n for n in graph.nodes if n.name in random and _is_number(n)]
    last = next(reversed(graph.nodes))
    last.args = (wanted,)
    sampler = Sampler(dataclasses.replace(traced, graph=graph), certain)
    return sampler, [n.name for n, is_random in zip(wanted, sampler.is_random, strict=True) if is_random]


def _is_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0


def _chosen(value: Tensor, lead: int) -> Tensor:
    """[..., n, *shape] -> [..., n, elements]; values without a shape have one element."""
    flat = value.flatten(lead + 1) if value.dim() > lead + 1 else value.unsqueeze(-1)
    return flat[..., evenly(flat.shape[-1], _MOST_ELEMENTS)]


def _returned(graph: fx.Graph) -> Any:
    return next(reversed(graph.nodes)).args[0]
