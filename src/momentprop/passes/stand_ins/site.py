"""Takes an operator at its place in the graph as a function of its values, with derivatives.

Derivatives are traced once, on the shapes of the graph (make_fx), and what is left are plain operators:
nothing is differentiated at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from momentprop.graph.edit import fake_mode
from momentprop.graph.private import OpOverload
from momentprop.graph.schema import inputs_of
from momentprop.moments import is_moments, variance_of
from momentprop.rules.linearization import Propagated

_VALUES = (Tensor, torch.SymInt)
Program = Callable[..., Sequence[Tensor]]
Propagate = Callable[..., Propagated]


class StandIn(NamedTuple):
    """Holds what makes the rule of one node, made from its operator alone."""

    propagate: Propagate
    exactness: str


@dataclass(frozen=True, eq=False)
class Site:
    """`values` are the tensors and sizes among the arguments, in order, with repetitions."""

    op: OpOverload
    template: tuple[Any, ...]  # the flat arguments
    spec: pytree.TreeSpec
    positions: tuple[int, ...]  # of the values among them
    examples: tuple[Any, ...]  # of the values: fake
    inputs: tuple[tuple[int, ...], ...]  # of every random input, where it stands among the values
    results: tuple[bool, ...]  # of every result, whether it holds real numbers
    is_list: bool

    @staticmethod
    def of(node: fx.Node, random: set[fx.Node]) -> Site:
        """Make the site of a node; raise ValueError with a reason if it cannot be taken by itself."""
        assert isinstance(node.target, OpOverload)
        flat, spec = pytree.tree_flatten(fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val")))
        nodes = inputs_of(node)
        positions = [i for i, v in enumerate(flat) if isinstance(v, _VALUES)]
        if len(positions) != len(nodes):
            raise ValueError("its arguments are not plain tensors")
        uncertain = [n for n in dict.fromkeys(nodes) if n in random and is_real(n.meta["val"])]
        inputs = [tuple(i for i, other in enumerate(nodes) if other is n) for n in uncertain]
        value = node.meta["val"]
        results = list(value) if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(v, Tensor) and v.is_complex() for v in [*results, *flat]):
            raise ValueError("it computes with complex numbers")
        return Site(
            node.target,
            tuple(flat),
            spec,
            tuple(positions),
            tuple(flat[i] for i in positions),
            tuple(inputs),
            tuple(is_real(v) for v in results),
            isinstance(value, (list, tuple)),
        )

    @property
    def shapes(self) -> list[Any]:
        """Return the shapes of the random inputs."""
        return [self.examples[places[0]].shape for places in self.inputs]

    def values(self, args: Any, kwargs: Any) -> list[Any]:
        """Return the values of a call."""
        leaves = pytree.tree_leaves((args, kwargs), is_leaf=is_moments)
        return [leaves[i] for i in self.positions]

    def variances(self, values: Sequence[Any]) -> list[Tensor]:
        """Return the variances of the random inputs."""
        return [variance_of(v) for v in self.random(values)]

    def in_order(self, values: list[Any], pulled: Sequence[Any]) -> list[Any]:
        """Cotangents of inputs, each where its input is first used. Only random ones are asked for."""
        first = {places[0]: c for places, c in zip(self.inputs, pulled, strict=True)}
        return [first.get(i) for i, v in enumerate(values) if is_moments(v)]

    def run(self, values: Sequence[Any]) -> list[Any]:
        """All results of the operator."""
        flat = list(self.template)
        for i, value in zip(self.positions, values, strict=True):
            flat[i] = value
        args, kwargs = pytree.tree_unflatten(flat, self.spec)
        return self.as_list(self.op(*args, **kwargs))

    def as_list(self, out: Any) -> list[Any]:
        """All results of a call, or what belongs to them."""
        return list(out) if self.is_list else [out]

    def packed(self, results: list[Any]) -> Any:
        """Results as the operator returns them."""
        return results if self.is_list else results[0]

    def at(self, values: Sequence[Any], x: Sequence[Tensor]) -> list[Any]:
        """The values with these in place of the random inputs."""
        filled = list(values)
        for places, value in zip(self.inputs, x, strict=True):
            for i in places:
                filled[i] = value
        return filled

    def shifted(self, values: Sequence[Any], deviations: Sequence[Tensor]) -> list[Any]:
        """The values with deviations added to the random inputs."""
        return self.at(values, [x + d for x, d in zip(self.random(values), deviations, strict=True)])

    def real(self, results: Sequence[Any]) -> list[Any]:
        """Select from all results those that are real numbers."""
        return [v for v, real in zip(results, self.results, strict=True) if real]

    def pull(self) -> Program:
        """(*cotangents of the real results, *values) -> the transposed map's, one for every random input."""
        count = sum(self.results)
        with fake_mode(self.examples):
            results = self.real(self.run(self.examples))
        return self._traced(lambda *given: self._pulled(given[count:], given[:count]), results)

    def push(self) -> Program | None:
        """(*deviations of the random inputs, *values) -> the linear map's, of the real results.

        None where PyTorch knows neither the forward derivative nor how to transpose the backward one.
        """
        count = len(self.inputs)

        def forward(*given: Any) -> Sequence[Tensor]:
            values = given[count:]
            if self.op.namespace != "aten":
                raise NotImplementedError("the forward derivative of an operator without one would be 0")
            return torch.func.jvp(
                lambda *x: tuple(self.real(self.run(self.at(values, x)))),
                tuple(self.random(values)),
                tuple(given[:count]),
            )[1]

        def transposed(*given: Any) -> Sequence[Tensor]:
            results = self.real(self.run(given[count:]))
            with torch.enable_grad():
                zeros = [torch.zeros_like(r).requires_grad_() for r in results]
                pulled = self._pulled(given[count:], zeros, create_graph=True)
                return torch.autograd.grad(pulled, zeros, given[:count])

        examples = self.random(self.examples)
        for program in (forward, transposed):
            try:
                return self._traced(program, examples)
            except Exception:
                continue
        return None

    def random(self, values: Sequence[Any]) -> list[Any]:
        """Select those of the random inputs."""
        return [values[places[0]] for places in self.inputs]

    def _pulled(
        self, values: Sequence[Any], cotangents: Sequence[Tensor], create_graph: bool = False
    ) -> Sequence[Tensor]:
        """The transposed map of cotangents of the real results."""
        with torch.enable_grad():
            x = [v.detach().requires_grad_() for v in self.random(values)]
            results = self.real(self.run(self.at(values, x)))
            kept = [(r, c) for r, c in zip(results, cotangents, strict=True) if r.requires_grad]
            if not kept:
                raise ValueError("it has no derivative")
            reached, seeds = zip(*kept, strict=True)
            return torch.autograd.grad(
                reached, x, seeds, create_graph=create_graph, allow_unused=True, materialize_grads=True
            )

    def _traced(self, function: Program, first: Sequence[Tensor]) -> Program:
        with torch.inference_mode(False), fake_mode(self.examples):
            # tensors of their own: the same one twice would be one input of the program
            given = [*first, *self.examples]
            own = [v.new_empty(v.shape) if isinstance(v, Tensor) else v for v in given]
            program = make_fx(function)(*own)
        for node in program.graph.nodes:
            if node.target is torch.ops.aten.detach.default:  # gradients shall pass a derivative too
                node.replace_all_uses_with(node.args[0])
        program.graph.eliminate_dead_code()
        program.recompile()
        # some derivatives depend on strides
        return lambda *given: program(*[v.contiguous() if isinstance(v, Tensor) else v for v in given])


def is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
