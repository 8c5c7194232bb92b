"""Names in an ONNX graph: inputs and outputs as documented, and nothing else that is called like them."""

from __future__ import annotations

import dataclasses
from typing import Any

from momentprop.exports.interface import Port
from momentprop.exports.program import Program


def named_inputs(program: Program) -> tuple[Port, ...]:
    """Name the inputs as in the model's forward, with `_input` behind a name that an output has.

    An uncertain input keeps its variance under `<name>_variance`, so that both are renamed together.
    """
    taken = {port.name for port in program.outputs}
    free = taken | {port.name for port in program.call.ports}
    found = []
    for port in program.call.inputs:
        name = port.name
        if taken & _both(port, name):
            name += "_input"
            while free & _both(port, name):
                name += "_"
        found.append(dataclasses.replace(port, name=name))
    return tuple(found)


def input_names(program: Program) -> list[str]:
    """Return one name for every tensor."""
    return [port.name for port in dataclasses.replace(program.call, inputs=named_inputs(program)).ports]


def _both(port: Port, name: str) -> set[str]:
    return {name, f"{name}_variance"} if port.uncertain else {name}


def name_values(model: Any, program: Program) -> None:
    """Name the values of an onnx_ir model, and call free sizes `batch`, whatever symbol the tracer chose."""
    import onnx_ir

    graph = model.graph
    inputs, outputs = input_names(program), [port.name for port in program.outputs]
    for i, node in enumerate(graph):
        node.name = f"n{i}"
        for j, value in enumerate(node.outputs):
            value.name = f"v{i}_{j}"
    for name in list(graph.initializers):
        if name in inputs or name in outputs:
            value = graph.initializers.pop(name)
            value.name = f"{name}_constant"
            graph.initializers[value.name] = value
    values = [*graph.inputs, *graph.outputs]
    shapes = [port.shape for port in (*program.call.ports, *program.outputs)]
    for value, name, shape in zip(values, [*inputs, *outputs], shapes, strict=True):
        value.name = name
        value.shape = onnx_ir.Shape(list(shape))
        value.metadata_props.clear()
