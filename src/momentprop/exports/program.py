"""A converted network -> an exported program on flat, named tensors, with any batch size."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram

from momentprop.convert import BayesianNetwork
from momentprop.errors import ExportError
from momentprop.exports.interface import BATCH, Call, Port, dtype_name
from momentprop.structure import Signature

_BATCH = 97  # of the examples: no size of a layer, so that no code takes them for the same


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
    examples = example_tensors(network, call)
    dynamic = tuple({0: Dim.DYNAMIC} if port.batched else None for port in call.ports)
    try:
        with quiet(), torch.no_grad():
            exported = torch.export.export(flat, tuple(examples), dynamic_shapes=(dynamic,), strict=False)
    except ExportError:
        raise
    except Exception as error:
        raise ExportError(
            f"torch.export does not accept the converted network: {type(error).__name__}: {error}"
        ) from error
    _forget_places(exported)
    return Program(exported, call, _outputs(exported, names), fidelity, flat)


def _known(network: nn.Module) -> tuple[Signature, tuple[bool, ...], str]:
    """How a network is called, which of its inputs are uncertain, and its tier."""
    if isinstance(network, BayesianNetwork):
        uncertain = tuple(map(any, zip(*network._checked, strict=True)))
        return network._trace.signature, uncertain, network.fidelity
    found = getattr(network, "signature", None), getattr(network, "uncertain", None)
    if isinstance(found[0], Signature) and found[1] is not None:
        return found[0], found[1], str(network.fidelity)
    raise TypeError(f"expected what mp.convert or mp.load gave, not a {type(network).__name__}")


def example_tensors(
    network: nn.Module,
    call: Call,
    batch: int = _BATCH,
    make: Callable[[Sequence[int]], Tensor] = torch.randn,
) -> list[Tensor]:
    """Inputs of a call: floating-point ones from `make(shape)`; indices and masks as they were traced."""
    device = next((t.device for t in network.state_dict(keep_vars=True).values()), torch.device("cpu"))
    tensors: list[Tensor] = []
    for port in call.inputs:
        rows = port.integers(batch)
        value = make(port.sizes(batch)) if rows is None else rows
        tensors.append(value.to(device, port.torch_dtype))
        if port.uncertain:
            tensors.append(make(port.sizes(batch)).abs().to(device, port.torch_dtype))
    return tensors


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


@contextmanager
def quiet() -> Iterator[None]:
    """Without the deprecation warnings that torch raises inside itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
