"""An ONNX graph without what does nothing: constants folded, repeated and unused nodes removed."""

from __future__ import annotations

from typing import Any


def tidy(model: Any) -> None:
    """In place, of a model of onnx_ir. Everything that depends on the runtime is left to the runtime."""
    from onnx_ir import passes
    from onnx_ir.passes import common
    from onnxscript.optimizer import fold_constants_ir

    common.InlinePass()(model)
    fold_constants_ir(model, onnx_shape_inference=True)
    _drop_zero_biases(model.graph)
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
    """Those that the exporter adds to convolutions without one, in three dimensions with a wrong shape."""
    for node in graph:
        if node.op_type == "Conv" and len(node.inputs) == 3 and node.inputs[2] is not None:
            constant = node.inputs[2].const_value
            if constant is not None and not constant.numpy().any():
                node.resize_inputs(2)
