"""Tidies an ONNX graph: constants are folded, repeated and unused nodes removed, convolutions strided."""

from __future__ import annotations

from collections.abc import Sequence
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


def stride_convolutions(graph: Any) -> None:
    """Replace a convolution of which only every k-th output is read, at several starts, by strided ones.

    The elements of pooling windows are such outputs. Written by strided convolutions they cost nothing, where
    slicing them out of the whole output costs as much as the maxima of them.
    """
    for node in list(graph):
        if node.op_type != "Conv":
            continue
        out = node.outputs[0]
        slices = [use.node for use in out.uses()]
        if not slices or out.is_graph_output():
            continue
        parts = [_strided(node, part) for part in slices]
        if any(part is None for part in parts):
            continue
        for part, replacement in zip(slices, parts, strict=True):
            graph.insert_before(part, replacement)
            replacement.outputs[0].shape = part.outputs[0].shape
            replacement.outputs[0].dtype = part.outputs[0].dtype
            part.outputs[0].replace_all_uses_with(replacement.outputs[0])
            graph.remove(part, safe=True)
        graph.remove(node, safe=True)


def _strided(convolution: Any, part: Any) -> Any:
    """The convolution that gives this slice, if one does."""
    import onnx_ir

    out, sizes = convolution.outputs[0].shape, [v.shape for v in convolution.inputs[:2]]
    read = [c for v in part.inputs[1:] if (c := _constant(v)) is not None]
    if part.op_type != "Slice" or len(read) != 4 or None in (out, *sizes):
        return None
    n = len(sizes[1]) - 2
    starts, ends, axes, steps = read
    dims = [axis % (n + 2) - 2 for axis in axes]
    if min(dims) < 0 or min(starts) < 0 or min(steps) < 1:
        return None
    whole, kernel = [list(s)[2:] for s in sizes]
    if not all(isinstance(size, int) for size in (*whole, *kernel, *list(out)[2:])):
        return None
    given = convolution.attributes
    if "auto_pad" in given and given["auto_pad"].as_string() != "NOTSET":
        return None
    stride, dilation = (given[k].as_ints() if k in given else [1] * n for k in ("strides", "dilations"))
    pads = given["pads"].as_ints() if "pads" in given else [0] * (2 * n)
    before, after, wide = list(pads[:n]), list(pads[n:]), list(stride)
    for start, end, d, step in zip(starts, ends, dims, steps, strict=True):
        count = -(-(min(end, out[d + 2]) - start) // step)
        wide[d] = stride[d] * step
        before[d] = pads[d] - stride[d] * start
        after[d] = (count - 1) * wide[d] + dilation[d] * (kernel[d] - 1) + 1 - before[d] - whole[d]
    if min(*before, *after) < 0:  # runtimes do not crop
        return None
    attributes = {
        "strides": wide,
        "pads": [*before, *after],
        "dilations": list(dilation),
        "group": given["group"].as_int() if "group" in given else 1,
    }
    return onnx_ir.node("Conv", convolution.inputs, attributes=attributes)


def _constant(value: Any) -> Sequence[int] | None:
    if value is None or value.const_value is None:
        return None
    return [int(v) for v in value.const_value.numpy().reshape(-1)]
