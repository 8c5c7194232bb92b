"""Lowers a converted network to an exported program of flat tensors, which files and frozen networks read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from momentprop.capture.signature import Signature
from momentprop.lowering.flat_export import export_flat
from momentprop.lowering.pooled_convolutions import join_convolutions
from momentprop.lowering.rectified import join_rectified_maxima

Head = Callable[[Any], Iterable[Any]]  # a network's output -> the flat outputs


@dataclass(frozen=True)
class Lowered:
    """An exported program of flat tensors, for any batch size, and the same function in PyTorch."""

    exported: ExportedProgram
    flat: nn.Module


class Flat(nn.Module):
    """A network as a function of flat tensors, of which an uncertain input has two, to flat outputs."""

    def __init__(
        self, network: nn.Module, signature: Signature, uncertain: Sequence[bool], head: Head
    ) -> None:
        super().__init__()
        self.network, self.signature, self.uncertain, self.head = network, signature, uncertain, head

    def forward(self, *tensors: Any) -> tuple[Any, ...]:
        leaves = self.signature.joined(tensors, self.uncertain)
        args, kwargs = pytree.tree_unflatten(leaves, self.signature.spec)
        return tuple(self.head(self.network(*args, **kwargs)))


def lower(network: nn.Module, signature: Signature, uncertain: Sequence[bool], head: Head) -> Lowered:
    """Export a network with `head` behind it, and join operators that are cheaper together."""
    flat = Flat(network, signature, uncertain, head).eval()
    tensors = signature.tensors(uncertain, device_of(network))
    exported = export_flat(flat, tensors, signature.dynamic(uncertain))
    _drop_detaching(exported.graph)
    join_rectified_maxima(exported.graph)
    join_convolutions(exported.graph)
    _forget_places(exported)
    return Lowered(exported, flat)


def _drop_detaching(graph: fx.Graph) -> None:
    """Remove what stands behind constants and changes no value: torch cannot export it a second time."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.detach_.default):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)


def device_of(network: nn.Module) -> torch.device:
    """The device of a network's tensors; the CPU if it has none."""
    return next((t.device for t in network.state_dict(keep_vars=True).values()), torch.device("cpu"))


def _forget_places(exported: ExportedProgram) -> None:
    """Drop where in whose source code operators come from: paths of this machine, most of a file's size."""
    for module in exported.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                node.meta = {key: node.meta[key] for key in ("val", "unbacked_bindings") if key in node.meta}
    exported._guards_code = []  # Python code; the signature checks calls
    exported._example_inputs = None
