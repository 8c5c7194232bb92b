"""Tidies an ONNX graph: constants are folded, repeated and unused nodes removed."""

from __future__ import annotations

from typing import Any


def tidy(model: Any) -> None:
    """Tidy a model of onnx_ir in place. Everything that depends on the runtime is left to the runtime."""
    from onnx_ir import passes
    from onnx_ir.passes import common
    from onnxscript.optimizer import fold_constants_ir

    common.InlinePass()(model)
    fold_constants_ir(model, onnx_shape_inference=True)
    _drop_zero_biases(model.graph)
    _infer_sizes(model.graph)
    passes.Sequential(
        common.IdentityEliminationPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),
        common.RemoveUnusedOpsetsPass(),
        common.OutputFixPass(),
        common.ClearMetadataAndDocStringPass(),
        common.NameFixPass(),
    )(model)


def _drop_zero_biases(graph: Any) -> None:
    """Drop the zero biases that the exporter adds to convolutions without one (in 3d with a wrong shape)."""
    for node in graph:
        if node.op_type == "Conv" and len(node.inputs) == 3 and node.inputs[2] is not None:
            constant = node.inputs[2].const_value
            if constant is not None and not constant.numpy().any():
                node.resize_inputs(2)


def _infer_sizes(graph: Any) -> None:
    """Write -1 for the one unknown size of a reshape: it follows from the others and need not be computed."""
    import numpy
    import onnx_ir

    for node in graph:
        if node.op_type != "Reshape" or node.inputs[1] is None:
            continue
        joined = node.inputs[1].producer()
        if joined is None or joined.op_type != "Concat":
            continue
        parts = [None if v.const_value is None else v.const_value.numpy().reshape(-1) for v in joined.inputs]
        unknown = [i for i, part in enumerate(parts) if part is None]
        if len(unknown) != 1 or list(joined.inputs[unknown[0]].shape or ()) != [1]:
            continue
        known = [[-1] if part is None else part for part in parts]
        sizes = numpy.concatenate(known).astype(numpy.int64)
        if sum(size < 1 for size in sizes) != 1:
            continue
        value = onnx_ir.node("Constant", [], attributes={"value": onnx_ir.tensor(sizes)})
        graph.insert_before(node, value)
        value.outputs[0].dtype, value.outputs[0].shape = onnx_ir.DataType.INT64, onnx_ir.Shape([len(sizes)])
        node.replace_input_with(1, value.outputs[0])
