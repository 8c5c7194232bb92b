"""A converted network as constants: whatever depends on weights alone is computed once.

Squared weights, folded batch norm, flipped weights of the sweep back: a converted network computes them in
every call, because the model may be trained meanwhile. Frozen, they are buffers: the graph is exported with
any batch size, and every operator whose inputs are constants gives way to its result.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from momentprop.capture.records import rebuild_output
from momentprop.capture.signature import Signature
from momentprop.errors import MomentpropError
from momentprop.graph.private import OpOverload
from momentprop.lowering.flat_export import quiet
from momentprop.lowering.inductor import Compiled
from momentprop.lowering.lower import lower
from momentprop.moments import as_output, is_moments

_COMPUTED = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)  # not constants: they follow from inputs
_CHECK = torch.ops.aten._assert_tensor_metadata.default  # a check of metadata, useless on constants
_GROWTH = 2  # of a constant over what it is computed from; what grows more is computed when it is needed


class FrozenNetwork(Compiled):
    """Holds a converted network whose weights are its own: later training of the model does not change it.

    It is called like the network it was made of. Calls write nothing, so threads may share it.
    """

    def __init__(
        self,
        program: fx.GraphModule,
        outputs: _Outputs,
        signature: Signature,
        uncertain: tuple[bool, ...],
        out_spec: pytree.TreeSpec,
        fidelity: str,
    ) -> None:
        super().__init__()
        self.program = program
        self.signature = signature
        self.uncertain = uncertain  # which of the inputs, flattened, may be given as `Moments`
        self._outputs, self._out_spec, self._fidelity = outputs, out_spec, fidelity
        self.training = False

    @property
    def fidelity(self) -> str:
        """The tier of rules in use."""
        return self._fidelity

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves = self.signature.flatten(args, kwargs)
        for leaf, uncertain in zip(leaves, self.uncertain, strict=True):
            if is_moments(leaf) and not uncertain:
                raise MomentpropError(
                    "this input was not uncertain when the network was frozen; call it with Moments before"
                )
        found = self.program(*self.signature.split(leaves, self.uncertain))
        return rebuild_output(self._outputs.rebuilt(found), self._out_spec)

    def train(self, mode: bool = True) -> FrozenNetwork:
        """Do nothing: there is one mode."""
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FrozenNetwork:
        for tensor in self.buffers():
            moved = fn(tensor)
            if moved.dtype != tensor.dtype or moved.device != tensor.device:
                raise MomentpropError(
                    "a frozen network stays where it is: move the converted one, and freeze that"
                )
        return self


class _Outputs:
    """Keeps constant outputs apart from those computed (tensors, and sizes that follow from the batch)."""

    def __init__(self, moments: list[Any]) -> None:
        leaves, self.spec = pytree.tree_flatten(moments)
        self.leaves = [None if isinstance(v, _COMPUTED) else (v,) for v in leaves]
        self.computed = [v for v in leaves if isinstance(v, _COMPUTED)]

    def rebuilt(self, computed: Sequence[Any]) -> list[Any]:
        rest = list(computed)[::-1]
        leaves = [rest.pop() if constant is None else constant[0] for constant in self.leaves]
        found: list[Any] = pytree.tree_unflatten(leaves, self.spec)
        return found


class _Stateful(nn.Module):
    """A program with copies of its state inside, called like the network; it returns all outputs, flat."""

    def __init__(self, program: nn.Module, state: Sequence[Tensor]) -> None:
        super().__init__()
        self.inner, self.n_state = program, len(state)
        copies: dict[int, Tensor] = {}
        for i, tensor in enumerate(state):
            self.register_buffer(f"state_{i}", copies.setdefault(id(tensor), tensor.detach().clone()))

    def forward(self, *args: Any, **kwargs: Any) -> list[Any]:
        state = [getattr(self, f"state_{i}") for i in range(self.n_state)]
        found = self.inner(*state, *pytree.tree_leaves((args, kwargs), is_leaf=is_moments))
        return [as_output(v) for v in found]


def freeze(
    program: nn.Module,
    state: Sequence[Tensor],
    signature: Signature,
    uncertain: tuple[bool, ...],
    out_spec: pytree.TreeSpec,
    fidelity: str,
) -> FrozenNetwork:
    """program(*state, *inputs) -> flat outputs, with this state for good."""
    kept: list[_Outputs] = []

    def head(moments: list[Any]) -> list[Any]:
        outputs = _Outputs(moments)
        computed, outputs.computed = outputs.computed, []
        kept.append(outputs)
        return computed

    exported = lower(_Stateful(program, state), signature, uncertain, head).exported
    with quiet(), torch.no_grad():
        constants = folded(exported.module(check_guards=False))
    return FrozenNetwork(constants, kept[-1], signature, uncertain, out_spec, fidelity)


def folded(module: fx.GraphModule) -> fx.GraphModule:
    """The module with operators on constants replaced by their results; a function of flat tensors."""
    graph = module.graph
    graph.set_codegen(fx.graph.CodeGen())
    known: dict[fx.Node, Any] = {}
    kept: dict[str, Any] = {}
    for node in list(graph.nodes):
        if node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(module)
            kept[str(node.target)] = value
            if isinstance(value, Tensor):
                known[node] = value
        elif _is_constant(node, known):
            args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
            value = node.target(*args, **kwargs)
            if node.target is _CHECK:
                graph.erase_node(node)
            elif _size(value) <= _GROWTH * sum(_size(known[n]) for n in node.all_input_nodes):
                known[node] = value
    for node in list(known):
        users = [user for user in node.users if user not in known]
        if node.op != "get_attr" and users and isinstance(known[node], Tensor):
            name = f"constant_{len(kept)}"
            kept[name] = known[node].detach()
            module.register_buffer(name, kept[name])
            with graph.inserting_before(node):
                constant = graph.get_attr(name)
            constant.meta = dict(node.meta)
            for user in users:
                user.replace_input_with(node, constant)
    graph.eliminate_dead_code()
    return fx.GraphModule(kept, graph, "Frozen")  # what is read in it


def _is_constant(node: fx.Node, known: dict[fx.Node, Any]) -> bool:
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    if isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    return all(n in known for n in node.all_input_nodes)


def _size(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(map(_size, value))
    return math.prod(value.shape) if isinstance(value, Tensor) else 0
