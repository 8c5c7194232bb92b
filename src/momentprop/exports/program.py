"""Exports a converted network: a lowered program, with names and shapes of what goes in and comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.export import ExportedProgram

from momentprop.capture.signature import EXAMPLE_BATCH, Make, Signature
from momentprop.errors import ExportError
from momentprop.exports.interface import BATCH, Call, Port, dtype_name
from momentprop.lowering.lower import device_of, lower
from momentprop.network import BayesianNetwork, inside


@dataclass(frozen=True)
class Program:
    """An exported program, and what its flat inputs and outputs are."""

    exported: ExportedProgram
    call: Call
    outputs: tuple[Port, ...]
    fidelity: str
    flat: nn.Module  # the same function in PyTorch: flat tensors -> outputs, as a tuple
    signature: Signature
    uncertain: tuple[bool, ...]

    def examples(self, batch: int = EXAMPLE_BATCH, make: Make | None = None) -> list[Tensor]:
        """Inputs of a call: floating-point ones from `make(shape)`; indices and masks as they were traced."""
        return self.signature.tensors(self.uncertain, device_of(self.flat), batch, make)


def program_of(network: nn.Module, head: Callable[[Any], dict[str, Tensor]]) -> Program:
    """Export a converted network (or one that `load` gave) with `head` behind it."""
    signature, uncertain, fidelity = _known(network)
    if signature.batch.rows > 1:
        raise ExportError(
            f"a network that takes {signature.batch.rows} rows of the batch for one sample cannot be "
            "exported; wrap the model in a module that takes [batch, rows, ...] and folds them itself"
        )
    names: list[str] = []

    def values(output: Any) -> Iterable[Tensor]:
        named = head(output)
        names[:] = named
        return named.values()

    lowered = lower(network, signature, uncertain, values)
    outputs, call = _outputs(lowered.exported, names), Call.of(signature, uncertain)
    return Program(lowered.exported, call, outputs, fidelity, lowered.flat, signature, uncertain)


def _known(network: nn.Module) -> tuple[Signature, tuple[bool, ...], str]:
    """Tell how a network is called, which of its inputs are uncertain, and its tier."""
    if isinstance(network, BayesianNetwork):
        parts = inside(network)
        return parts.trace.signature, parts.uncertain, network.fidelity
    found = getattr(network, "signature", None), getattr(network, "uncertain", None)
    if isinstance(found[0], Signature) and found[1] is not None:
        return found[0], found[1], str(network.fidelity)
    raise TypeError(f"expected what mp.convert or mp.load gave, not a {type(network).__name__}")


def _outputs(exported: ExportedProgram, names: Sequence[str]) -> tuple[Port, ...]:
    values = [node.meta["val"] for node in exported.graph.output_node().args[0]]
    ports = []
    for name, value in zip(names, values[len(values) - len(names) :], strict=True):
        shape = [n if isinstance(n, int) else BATCH if n.node.expr.is_Symbol else str(n) for n in value.shape]
        ports.append(Port(name, dtype_name(value.dtype), tuple(shape)))
    return tuple(ports)
