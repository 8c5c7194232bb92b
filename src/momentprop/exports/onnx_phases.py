"""Replaces a convolution of which only every k-th output is read, at several starts, by strided ones.

The elements of pooling windows are such outputs. Written by strided convolutions they cost nothing, where
slicing them out of the whole output costs as much as the maxima of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def stride_convolutions(graph: Any) -> None:
    """Replace in a graph of onnx_ir the convolutions that only slices along the last dimensions read."""
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
