"""A converted network -> an exported program on flat, named tensors, with any batch size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from momentprop.capture.signature import EXAMPLE_BATCH, Make, Signature
from momentprop.exports.interface import BATCH, Call, Port, dtype_name
from momentprop.lowering.flat_export import export_flat
from momentprop.lowering.pooled_convolutions import join_convolutions
from momentprop.lowering.rectified import join_rectified_maxima
from momentprop.network import BayesianNetwork, inside


@dataclass(frozen=True)
class Program:
    """An exported program, and what its flat inputs and outputs are."""

    exported: ExportedProgram
    call: Call
    outputs: tuple[Port, ...]
    fidelity: str
    flat: nn.Module  # the same function in PyTorch: flat tensors -> named tensors, as a tuple


class _Flat(nn.Module):
    """A network as a function of flat tensors that returns flat tensors; their names are kept aside."""

    def __init__(
        self, network: nn.Module, call: Call, head: Callable[[Any], dict[str, Tensor]], names: list[str]
    ) -> None:
        super().__init__()
        self.network, self.call, self.head, self.names = network, call, head, names

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = self.call.arguments(tensors)
        named = self.head(self.network(*args, **kwargs))
        self.names[:] = named
        return tuple(named.values())


def program_of(network: nn.Module, head: Callable[[Any], dict[str, Tensor]]) -> Program:
    """Export a converted network (or one that `load` gave) with `head` behind it."""
    signature, uncertain, fidelity = _known(network)
    call = Call.of(signature, uncertain)
    names: list[str] = []
    flat = _Flat(network, call, head, names).eval()
    exported = export_flat(flat, signature.tensors(uncertain, _device(network)), signature.dynamic(uncertain))
    join_rectified_maxima(exported.graph)
    join_convolutions(exported.graph)
    _forget_places(exported)
    return Program(exported, call, _outputs(exported, names), fidelity, flat)


def _known(network: nn.Module) -> tuple[Signature, tuple[bool, ...], str]:
    """How a network is called, which of its inputs are uncertain, and its tier."""
    if isinstance(network, BayesianNetwork):
        parts = inside(network)
        return parts.trace.signature, parts.uncertain, network.fidelity
    found = getattr(network, "signature", None), getattr(network, "uncertain", None)
    if isinstance(found[0], Signature) and found[1] is not None:
        return found[0], found[1], str(network.fidelity)
    raise TypeError(f"expected what mp.convert or mp.load gave, not a {type(network).__name__}")


def example_tensors(
    network: nn.Module, call: Call, batch: int = EXAMPLE_BATCH, make: Make | None = None
) -> list[Tensor]:
    """Inputs of a call: floating-point ones from `make(shape)`; indices and masks as they were traced."""
    signature, marks = call.signature(), iter(call.inputs)
    uncertain = [isinstance(e, Tensor) and next(marks).uncertain for e in signature.examples]
    return signature.tensors(uncertain, _device(network), batch, make)


def _device(network: nn.Module) -> torch.device:
    return next((t.device for t in network.state_dict(keep_vars=True).values()), torch.device("cpu"))


def _forget_places(exported: ExportedProgram) -> None:
    """Where in whose source code operators come from: paths of this machine, and most of a file's size."""
    for module in exported.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                node.meta = {key: node.meta[key] for key in ("val", "unbacked_bindings") if key in node.meta}
    exported._guards_code = []  # Python code; the signature checks calls
    exported._example_inputs = None


def _outputs(exported: ExportedProgram, names: Sequence[str]) -> tuple[Port, ...]:
    values = [node.meta["val"] for node in exported.graph.output_node().args[0]]
    ports = []
    for name, value in zip(names, values[len(values) - len(names) :], strict=True):
        shape = [n if isinstance(n, int) else BATCH if n.node.expr.is_Symbol else str(n) for n in value.shape]
        ports.append(Port(name, dtype_name(value.dtype), tuple(shape)))
    return tuple(ports)
