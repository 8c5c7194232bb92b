"""A traced network cut in two: what no dropout reaches, run once, and the rest, a function of noise.

The second part is pure: masks enter as raw random bits, an input like any other. So it compiles, many
samples run as one batch, and no global random state is involved.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from momentprop.coverage import creates_noise
from momentprop.moments import Moments
from momentprop.trace import DROPOUTS, Trace

aten = torch.ops.aten


class Sampler:
    """Draws samples of a traced network's random outputs."""

    def __init__(self, trace: Trace, uncertain: tuple[bool, ...], compile: bool = False) -> None:
        self._symbols = {
            node.meta["val"].shape[0].node.expr
            for node, batched in zip(trace.input_nodes, trace.signature.batched, strict=True)
            if batched
        }
        inputs = {node for node, is_random in zip(trace.input_nodes, uncertain, strict=True) if is_random}
        sampled = _downstream(trace.graph, inputs)
        self.boundary = [
            n for n in trace.graph.nodes if n not in sampled and any(u in sampled for u in n.users)
        ]
        outputs = next(n for n in trace.graph.nodes if n.op == "output").args[0]
        self.is_random = [isinstance(o, fx.Node) and o in sampled for o in outputs]
        self.outputs = [o for o, random in zip(outputs, self.is_random, strict=True) if random]
        certain = [o for o, random in zip(outputs, self.is_random, strict=True) if not random]
        self._inputs = [n for n in trace.input_nodes if n in inputs]
        self.noise = [n for n in trace.graph.nodes if n.target in DROPOUTS]
        self.has_other_noise = any(creates_noise(n) and n.target not in DROPOUTS for n in sampled)
        self._prefix = _prefix(trace.graph, sampled, self.boundary, certain)
        self.suffix: Callable[..., Any] = self._make_suffix(trace.graph, sampled)
        if compile:
            self.suffix = torch.compile(self.suffix)
        nodes = [*self.outputs, *(n for n in sampled if isinstance(n.meta.get("val"), Tensor))]
        self.batchable = (
            bool(self._symbols)
            and all(self.batch_dims(n) for n in nodes)
            and all(self._clean(n) for n in (*self.boundary, *self.outputs))
        )

    def start(self, state: list[Any], leaves: list[Any]) -> Run:
        """Compute everything deterministic, once."""
        values = list(self._prefix(*state, *leaves))
        uncertain = [leaf for leaf in leaves if isinstance(leaf, Moments)]
        sizes = {v.shape[0] for v in leaves if isinstance(v, (Tensor, Moments)) and len(v.shape)}
        return Run(
            sampler=self,
            nodes=[*self.boundary, *self._inputs, *self._inputs],
            values=values[: len(self.boundary)] + [u.mean for u in uncertain] + [u.std for u in uncertain],
            certain=values[len(self.boundary) :],
            batch=sizes.pop() if len(sizes) == 1 else None,
        )

    def _make_suffix(self, graph: fx.Graph, sampled: set[fx.Node]) -> fx.GraphModule:
        suffix = fx.Graph()
        env = {n: suffix.placeholder(n.name) for n in self.boundary}
        means, stds, normals = (
            [suffix.placeholder(f"{n.name}_{kind}") for n in self._inputs]
            for kind in ("mean", "std", "noise")
        )
        bits = {n: suffix.placeholder(f"{n.name}_bits") for n in self.noise}
        for node, mean, std, normal in zip(self._inputs, means, stds, normals, strict=True):
            env[node] = suffix.call_function(torch.addcmul, (mean, std, normal))
        for node in graph.nodes:
            if node in bits:
                env[node] = suffix.call_function(drop, (env[node.args[0]], bits[node], node.args[1]))
            elif node in sampled and node not in env and node.op != "output":
                env[node] = suffix.node_copy(node, env.__getitem__)
        suffix.output([env[o] for o in self.outputs])
        return fx.GraphModule(nn.Module(), suffix, "Suffix")

    def batch_dims(self, node: fx.Node) -> list[int]:
        """Dimensions whose size depends on the batch size."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return []
        return [d for d, size in enumerate(value.shape) if self._depends(size)]

    def _depends(self, size: Any) -> bool:
        return isinstance(size, torch.SymInt) and bool(size.node.expr.free_symbols & self._symbols)

    def _clean(self, node: fx.Node) -> bool:
        """Whether the batch, if there is one, is a dimension of its own."""
        dims = self.batch_dims(node)
        return not dims or (len(dims) == 1 and node.meta["val"].shape[dims[0]].node.expr in self._symbols)

    def size(self, size: Any, batch: int) -> int:
        if isinstance(size, torch.SymInt):
            return int(size.node.expr.subs(dict.fromkeys(self._symbols, batch)))
        return int(size)

    def shape(self, node: fx.Node, batch: int) -> list[int]:
        return [self.size(size, batch) for size in node.meta["val"].shape]

    def mask_shape(self, node: fx.Node, batch: int) -> list[int]:
        shape = self.shape(node, batch)
        if node.target is aten.feature_dropout.default:  # one mask per channel
            return [*shape[:2], *[1] * (len(shape) - 2)]
        return shape


@dataclass
class Run:
    """One batch of inputs, its deterministic part computed, ready to be sampled."""

    sampler: Sampler
    nodes: list[fx.Node]
    values: list[Any]  # of the nodes, which the sampled part takes
    certain: list[Any]  # the outputs no noise reaches
    batch: int | None

    @property
    def device(self) -> torch.device:
        return next((v.device for v in self.values if isinstance(v, Tensor)), torch.device("cpu"))

    def samples_at_once(self, working_set: int) -> int:
        """How many samples run as one batch with masks of at most `working_set` elements each."""
        if not self.sampler.batchable or not self.batch:
            return 1
        shapes = [self.sampler.shape(n, self.batch) for n in self.sampler.noise]
        return max(1, working_set // max(map(math.prod, shapes), default=1))

    @contextlib.contextmanager
    def seeded(self, seed: int) -> Iterator[Callable[[int], list[Tensor]]]:
        """Yields draw(count) -> one tensor [count, ...] per random output."""
        generator = torch.Generator(self.device).manual_seed(seed)
        with contextlib.ExitStack() as stack:
            if self.sampler.has_other_noise:  # such operators know the global generator only
                devices = [self.device] if self.device.type == "cuda" else []
                stack.enter_context(torch.random.fork_rng(devices))
                torch.manual_seed(seed)
            repeated: dict[int, list[Any]] = {}

            def draw(count: int) -> list[Tensor]:
                if count not in repeated:
                    repeated.clear()
                    repeated[count] = [self._repeat(*item, count) for item in self._items()]
                outputs = self.sampler.suffix(*repeated[count], *self._noise(count, generator))
                nodes = self.sampler.outputs
                return [self._separate(n, o, count) for n, o in zip(nodes, outputs, strict=True)]

            yield draw

    def _items(self) -> Iterator[tuple[fx.Node, Any]]:
        return zip(self.nodes, self.values, strict=True)

    def _noise(self, count: int, generator: torch.Generator) -> list[Tensor]:
        """Standard normals for the uncertain inputs, random bits for the dropouts."""
        batch = (self.batch or 0) * count
        n_inputs = len(self.nodes) - len(self.sampler.boundary)
        means = self.values[len(self.sampler.boundary) :][: n_inputs // 2]
        normals = [
            torch.randn(m.shape[0] * count, *m.shape[1:], generator=generator, device=m.device, dtype=m.dtype)
            for m in means
        ]
        shapes = [self.sampler.mask_shape(n, batch) for n in self.sampler.noise]
        return normals + [_random_bits(shape, generator) for shape in shapes]

    def _repeat(self, node: fx.Node, value: Any, count: int) -> Any:
        if count == 1 or self.batch is None:
            return value
        if isinstance(node.meta.get("val"), torch.SymInt):
            return self.sampler.size(node.meta["val"], self.batch * count)
        dims = self.sampler.batch_dims(node)
        return value.repeat([count if d in dims else 1 for d in range(value.dim())]) if dims else value

    def _separate(self, node: fx.Node, output: Tensor, count: int) -> Tensor:
        if count == 1:
            return output[None]
        dim = self.sampler.batch_dims(node)[0]
        return output.unflatten(dim, (count, self.batch)).movedim(dim, 0)


def drop(x: Tensor, bits: Tensor, drop_probability: float) -> Tensor:
    """Inverted dropout with the mask given by uniform 32-bit integers."""
    threshold = min(round((1 - drop_probability) * 2**32) - 2**31, 2**31 - 1)
    return torch.where(bits < threshold, x * (1 / (1 - drop_probability)), 0.0)


def _random_bits(shape: list[int], generator: torch.Generator) -> Tensor:
    """Uniform int32 over its whole range, drawn two at a time."""
    n = math.prod(shape)
    pairs = torch.empty((n + 1) // 2, dtype=torch.int64, device=generator.device)
    return pairs.random_(-(2**63), None, generator=generator).view(torch.int32)[:n].view(shape)


def _downstream(graph: fx.Graph, inputs: set[fx.Node]) -> set[fx.Node]:
    """Noise sources, uncertain inputs and everything computed from them."""
    sampled = set(inputs)
    for node in graph.nodes:
        if node.op == "call_function" and (
            creates_noise(node) or any(n in sampled for n in node.all_input_nodes)
        ):
            sampled.add(node)
    return sampled


def _prefix(
    graph: fx.Graph, sampled: set[fx.Node], boundary: list[fx.Node], outputs: list[Any]
) -> fx.GraphModule:
    prefix = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder" or (node not in sampled and node.op != "output"):
            env[node] = prefix.node_copy(node, env.__getitem__)
    prefix.output(fx.map_arg([*boundary, *outputs], env.__getitem__))
    prefix.eliminate_dead_code()
    return fx.GraphModule(nn.Module(), prefix, "Prefix")
