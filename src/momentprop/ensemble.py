"""Several networks as one predictive distribution: a mixture with equal weights.

An ensemble gives the list of its members' outputs, which `mp.classify` and `mp.regress` take as a mixture:
probabilities are averaged, moments are mixed, and what members disagree about is epistemic.

Converted members of one architecture run as one graph over stacked parameters, so that small batches pay the
overhead of one network.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from momentprop.capture.records import rebuild_output
from momentprop.graph.ops import RECURRENT
from momentprop.graph.place import place_of
from momentprop.lowering.inductor import Compiled
from momentprop.moments import Moments, as_output, is_moments
from momentprop.network import BayesianNetwork, Inside, inside
from momentprop.sample import monte_carlo


class Ensemble(Compiled):
    """Networks of any kind, converted or plain, called together.

    Args:
        members: networks with the same inputs and outputs.
        stack: run converted members of one architecture as one graph, over copies of their parameters. A
            change of a member is noticed at the next call; a compiled ensemble needs `refresh()`. By default
            members are stacked where that is possible; True raises a ValueError where it is not. Members with
            a recurrent layer in front of all noise run one by one.

    >>> import torch, momentprop as mp
    >>> models = [torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.Linear(4, 3)) for _ in range(5)]
    >>> x = torch.randn(2, 4)
    >>> ensemble = mp.Ensemble([mp.convert(model, x) for model in models])
    >>> mp.classify(ensemble(x)).probs.shape
    torch.Size([2, 3])
    """

    def __init__(self, members: Sequence[nn.Module], *, stack: bool | None = None) -> None:
        super().__init__()
        if not members:
            raise ValueError("an ensemble needs at least one member")
        self.members = nn.ModuleList(members)
        difference = _difference(list(members))
        if stack and difference:
            raise ValueError(f"the members cannot run as one graph: {difference}")
        self.is_stacked = not difference if stack is None else stack
        self._taken: list[Any] = []
        self.register_load_state_dict_post_hook(lambda module, _: module.refresh())
        self.refresh()

    def refresh(self) -> None:
        """Take over the members' parameters as they are now."""
        if not self.is_stacked:
            return
        with torch.inference_mode(False), torch.no_grad():
            for i, tensors in enumerate(self._states()):
                stacked = torch.stack([t.clone() for t in tensors])
                self.register_buffer(f"_stacked_{i}", stacked, persistent=False)
        self._taken = self._versions()

    def __len__(self) -> int:
        return len(self.members)

    def forward(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The outputs of all members, in order."""
        if not self.is_stacked:
            return [member(*args, **kwargs) for member in self.members]
        first = inside(_converted(self.members[0]))
        leaves = first.trace.signature.flatten(args, kwargs)
        program = first.programs(tuple([is_moments(leaf) for leaf in leaves])).program
        specs: list[Any] = []

        def run(*state: Tensor) -> list[Tensor]:
            values = program(*state, *leaves)
            outputs = [as_output(v) for v in values]
            flat, spec = pytree.tree_flatten(outputs)
            specs.append((spec, [isinstance(v, Tensor) for v in flat], flat))
            return [v for v in flat if isinstance(v, Tensor)]

        stacked = torch.vmap(run)(*self._stacked())
        spec, is_tensor, template = specs[0]
        return [
            rebuild_output(_filled(spec, is_tensor, template, [t[i] for t in stacked]), first.trace.out_spec)
            for i in range(len(self.members))
        ]

    def monte_carlo(self, inputs: Any, n_samples: int = 50, seed: int = 0, **options: Any) -> list[Any]:
        """MC dropout of every member, as `mp.monte_carlo` gives it, each with masks of its own."""
        return [
            monte_carlo(member, inputs, n_samples, seed + i * 1_000_003, **options)
            for i, member in enumerate(self.members)
        ]

    def _stacked(self) -> list[Tensor]:
        """The members' parameters: the copies, unless gradients are wanted or a member has changed."""
        if not torch.compiler.is_compiling():
            if torch.is_grad_enabled() and any(p.requires_grad for p in self.members.parameters()):
                return [torch.stack(list(tensors)) for tensors in self._states()]
            if self._versions() != self._taken:
                self.refresh()
        count = len(inside(_converted(self.members[0])).trace.state)
        return [getattr(self, f"_stacked_{i}") for i in range(count)]

    def _states(self) -> Iterator[tuple[Tensor, ...]]:
        """Every parameter and buffer, of all members."""
        return zip(*(inside(_converted(m)).state for m in self.members), strict=True)

    def _versions(self) -> list[Any]:
        tensors = [t for group in self._states() for t in group]
        return [(id(t), None if t.is_inference() else t._version) for t in tensors]


def _filled(spec: Any, is_tensor: list[bool], template: list[Any], tensors: list[Tensor]) -> list[Moments]:
    found = iter(tensors)
    leaves = [next(found) if tensor else other for tensor, other in zip(is_tensor, template, strict=True)]
    return pytree.tree_unflatten(leaves, spec)


def _converted(member: nn.Module) -> BayesianNetwork:
    assert isinstance(member, BayesianNetwork)
    return member


def _difference(members: list[nn.Module]) -> str:
    """Say why the members cannot run as one graph; empty if they can."""
    networks = [inside(m) for m in members if isinstance(m, BayesianNetwork)]
    if len(networks) < len(members):
        return "not all of them are converted"
    if len({n.graph.graph.python_code("self").src for n in networks}) > 1:
        return "they have different graphs"
    if not networks[0].trace.state:
        return "they have no parameters"
    if any(n.trace.out_spec != networks[0].trace.out_spec for n in networks):
        return "their outputs have different structures"
    if len({(n.request, n.uncertain) for n in networks}) > 1:
        return "they were converted with different settings"
    shapes = {tuple((t.shape, t.dtype, t.device) for t in n.state) for n in networks}
    return "their parameters differ in shape, type or device" if len(shapes) > 1 else _unmapped(networks[0])


def _unmapped(network: Inside) -> str:
    """Name a recurrent layer that stays PyTorch's operator, which `torch.vmap` does not know; or nothing.

    These are most where no input is uncertain, which any call may be like.
    """
    prepared = network.programs((False,) * len(network.uncertain)).prepared
    for node in prepared.trace.graph.nodes:
        if node.target in RECURRENT and node not in prepared.random:
            return f"no noise reaches a recurrent layer, which torch.vmap cannot map:\n  {place_of(node)}"
    return ""
