"""Cuts a traced network in two: what no dropout reaches, run once, and the rest, a function of noise.

The second part is pure: masks enter as raw random bits, an input like any other. So `torch.vmap` maps it over
many samples at once, whatever the network does with its batch dimension; it compiles; and no global random
state is involved.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from momentprop.capture.attention import ATTENTION, spell_out_attention
from momentprop.capture.draws import DRAWS, standard_normal
from momentprop.capture.quiet import silent
from momentprop.capture.randomness import OwnNumbers
from momentprop.capture.trace import Trace
from momentprop.graph.reach import creates_noise, reach
from momentprop.moments import Moments
from momentprop.passes.canonical.recurrent import split_recurrent


class Sampler:
    """Draws samples of a traced network's random outputs."""

    def __init__(self, trace: Trace, uncertain: Sequence[bool], compile: bool = False) -> None:
        trace = _attention_spelled_out(split_recurrent(trace, uncertain), uncertain)
        graph = trace.graph
        self.inputs = [n for n, u in zip(trace.input_nodes, uncertain, strict=True) if u]
        self.noise = [n for n in graph.nodes if n.target in DRAWS and creates_noise(n)]
        self.sampled = _downstream(graph, self.inputs)
        self.boundary = [
            n for n in graph.nodes if n not in self.sampled and any(u in self.sampled for u in n.users)
        ]
        outputs = next(n for n in graph.nodes if n.op == "output").args[0]
        self.is_random = [isinstance(o, fx.Node) and o in self.sampled for o in outputs]
        self._random = [o for o, random in zip(outputs, self.is_random, strict=True) if random]
        self._certain = [o for o, random in zip(outputs, self.is_random, strict=True) if not random]
        # other noise is drawn inside the operator: one sample at a time
        self.has_other_noise = any(creates_noise(n) and n.target not in DRAWS for n in self.sampled)
        self.input_nodes = trace.input_nodes  # of the graph that is cut, which may be a copy
        self._prefix = fx.GraphModule(trace.root, self._prefix_graph(graph), "Prefix")
        suffix = fx.GraphModule(trace.root, self._suffix_graph(graph), "Suffix")
        given = (None,) * (len(self.boundary) + 2 * len(self.inputs))
        drawn = (0,) * (len(self.inputs) + len(self.noise))
        self.vectorizes = True  # until it turns out not to
        self.one: Callable[..., Any] = suffix
        self.many: Callable[..., Any] = torch.vmap(suffix, in_dims=given + drawn)
        if compile:
            self.one, self.many = torch.compile(self.one), torch.compile(self.many)

    def start(self, state: list[Any], leaves: list[Any]) -> Run:
        """Compute everything deterministic, once."""
        values = list(self._prefix(*state, *leaves))
        uncertain = [leaf for leaf in leaves if isinstance(leaf, Moments)]
        sizes: dict[Any, int] = {}
        for node, leaf in zip(self.input_nodes, leaves, strict=True):
            if isinstance(leaf, (Tensor, Moments)):
                for symbolic, size in zip(node.meta["val"].shape, leaf.shape, strict=True):
                    free = symbolic.node.expr.free_symbols if isinstance(symbolic, torch.SymInt) else ()
                    for symbol in free:  # one, of which the size is a multiple
                        sizes[symbol] = size // int(symbolic.node.expr.subs(symbol, 1))
        return Run(
            sampler=self,
            given=[*values[: len(self.boundary)], *(u.mean for u in uncertain), *(u.std for u in uncertain)],
            uncertain=uncertain,
            certain=values[len(self.boundary) :],
            sizes=sizes,
        )

    def _prefix_graph(self, graph: fx.Graph) -> fx.Graph:
        prefix = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            if node.op == "placeholder" or (node not in self.sampled and node.op != "output"):
                env[node] = prefix.node_copy(node, env.__getitem__)
        prefix.output(fx.map_arg([*self.boundary, *self._certain], env.__getitem__))
        prefix.eliminate_dead_code()
        return prefix

    def _suffix_graph(self, graph: fx.Graph) -> fx.Graph:
        suffix = fx.Graph()
        env = {n: suffix.placeholder(n.name) for n in self.boundary}
        means, stds, normals = (
            [suffix.placeholder(f"{n.name}_{kind}") for n in self.inputs] for kind in ("mean", "std", "noise")
        )
        drawn = {n: suffix.placeholder(f"{n.name}_drawn") for n in self.noise}
        for node, mean, std, normal in zip(self.inputs, means, stds, normals, strict=True):
            env[node] = suffix.call_function(torch.addcmul, (mean, std, normal))
        for node in graph.nodes:
            if node in drawn:
                args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
                env[node] = suffix.call_function(DRAWS[node.target].apply, (drawn[node], *args), kwargs)
            elif node in self.sampled and node not in env:
                env[node] = suffix.node_copy(node, env.__getitem__)
                if node.target is torch.ops.aten.sym_size.int:  # which vmap does not know
                    env[node].target = _size
        suffix.output([env[o] for o in self._random])
        return suffix


def _attention_spelled_out(trace: Trace, uncertain: Sequence[bool]) -> Trace:
    """Spell attention out: vmap would loop over the fused operator, sample by sample."""
    if all(node.target is not ATTENTION for node in trace.graph.nodes):
        return trace
    copy = dataclasses.replace(trace, graph=trace.copy_graph())
    inputs = [n for n, u in zip(copy.input_nodes, uncertain, strict=True) if u]
    for node in [n for n in _downstream(copy.graph, inputs) if n.target is ATTENTION]:
        spell_out_attention(copy.graph, node)
    return copy


def _size(x: Tensor, dim: int) -> int:
    return x.shape[dim]


@dataclass
class Run:
    """One batch of inputs, its deterministic part computed, ready to be sampled."""

    sampler: Sampler
    given: list[Any]  # what the sampled part takes beside noise
    uncertain: list[Moments]
    certain: list[Any]  # the outputs no noise reaches
    sizes: dict[Any, int]  # of the symbols in the trace's shapes

    @property
    def device(self) -> torch.device:
        return next((v.device for v in self.given if isinstance(v, Tensor)), torch.device("cpu"))

    def samples_at_once(self, working_set: int) -> int:
        """Count how many samples run as one batch, with at most `working_set` elements per activation."""
        values = [n.meta.get("val") for n in self.sampler.sampled]
        sizes = [math.prod(self._shape(v)) for v in values if isinstance(v, Tensor) and self._is_known(v)]
        return max(1, working_set // max([1, *sizes]))

    @contextlib.contextmanager
    def seeded(self, seed: int) -> Iterator[Callable[[int], list[Tensor]]]:
        """Yields draw(count) -> one tensor [count, ...] per random output.

        Each source has a generator of its own, so its noise does not depend on how samples are batched.
        """
        noise, uncertain = self.sampler.noise, self.uncertain
        generators = [
            torch.Generator(self.device).manual_seed((seed * 1_000_003 + i) % 2**63)
            for i in range(1, len(noise) + len(uncertain) + 1)
        ]
        sources = [self._source(n, g) for n, g in zip(noise, generators, strict=False)]

        def draw(count: int) -> list[Tensor]:
            normals = [
                standard_normal(count, list(u.shape), u.dtype, g)
                for u, g in zip(uncertain, generators[len(noise) :], strict=True)
            ]
            noises = [*normals, *[source(count) for source in sources]]
            if count > 1 and self.sampler.vectorizes:
                try:
                    return list(self.sampler.many(*self.given, *noises))
                except (RuntimeError, NotImplementedError):
                    self.sampler.vectorizes = False  # vmap does not know all operators
            rows = [self.sampler.one(*self.given, *(v[i] for v in noises)) for i in range(count)]
            return [torch.stack(outputs) for outputs in zip(*rows, strict=True)]

        with contextlib.ExitStack() as stack:
            # vmap says so where it loops over samples by itself: slower, and just as right
            stack.enter_context(silent("There is a performance drop"))
            if self.sampler.has_other_noise:
                stack.enter_context(OwnNumbers(seed))
            yield draw

    def _is_known(self, value: Tensor) -> bool:
        """Say whether its size follows from those of the inputs, not from values."""
        sizes: list[Any] = [size for size in value.shape if isinstance(size, torch.SymInt)]
        return all(symbol in self.sizes for size in sizes for symbol in size.node.expr.free_symbols)

    def _shape(self, value: Tensor) -> list[int]:
        return [
            int(size.node.expr.subs(self.sizes)) if isinstance(size, torch.SymInt) else int(size)
            for size in value.shape
        ]

    def _source(self, node: fx.Node, generator: torch.Generator) -> Callable[[int], Tensor]:
        """count -> what the node needs for so many samples."""
        draw, value = DRAWS[node.target], node.meta["val"]
        shape = self._shape(value)
        if draw.per_channel:
            shape = [*shape[:2], *[1] * (len(shape) - 2)]
        return lambda count: draw.generate(count, shape, value.dtype, generator)


def _downstream(graph: fx.Graph, inputs: list[fx.Node]) -> set[fx.Node]:
    """Noise sources, uncertain inputs and everything computed from them."""
    return reach(graph, inputs, begins=creates_noise)
