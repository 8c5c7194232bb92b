"""The vocabulary: operators in groups, by what they are like.

A group stands here if its members share a property that several readers ask for, or that takes a sentence to
say. Tables of what one file does with an operator stay in that file.
"""

from __future__ import annotations

from typing import Any

import torch

from momentprop.graph.private import OpOverload

aten = torch.ops.aten
Operators = tuple[Any, ...]

# Noise ------------------------------------------------------------------------------------------------------

SCALING_DROPOUTS: Operators = (aten.dropout.default, aten.feature_dropout.default)  # 0 or 1 / (1 - p)
DROPOUTS: Operators = (*SCALING_DROPOUTS, aten.alpha_dropout.default, aten.feature_alpha_dropout.default)
BERNOULLIS: Operators = (aten.bernoulli.p, aten.bernoulli.default, aten.bernoulli.Tensor)
SHAPED_NOISE: Operators = (  # that asks its argument for a shape alone
    aten.bernoulli.p,
    aten.randn_like.default,
    aten.rand_like.default,
    aten.normal_functional.default,
    aten.uniform.default,
)


def draws(op: Any) -> bool:
    """Say whether an operator may draw random numbers."""
    return isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags


# Operators that move elements -------------------------------------------------------------------------------

STRIDED_VIEWS: Operators = (aten.view.default, aten._unsafe_view.default)  # refuse some strides
VIEWS: Operators = (*STRIDED_VIEWS, aten.reshape.default)  # with the new sizes as their argument
RESHAPES: Operators = (  # all elements, in row-major order
    *VIEWS,
    aten.view_as.default,
    aten.reshape_as.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
)
ALIASES: Operators = (aten.detach.default, aten.alias.default, aten.contiguous.default)
IDENTITIES: Operators = (*ALIASES, aten.clone.default)
SAME_ORDER: Operators = (*RESHAPES, *IDENTITIES)
TRANSPOSES: Operators = (  # that undo themselves
    aten.transpose.int,
    aten.t.default,
    aten.swapaxes.default,
    aten.swapdims.default,
    aten.numpy_T.default,
    aten.mT.default,
)
MOVES: Operators = (*SAME_ORDER, *TRANSPOSES, aten.permute.default)  # every element once
ARRANGEMENTS: Operators = (  # elements, some not at all or several times
    *MOVES,
    aten.expand.default,
    aten.expand_as.default,
    aten.slice.Tensor,
    aten.select.int,
)
LIKE: Operators = (  # that bring a value into the shape or type of another
    aten.expand_as.default,
    aten.view_as.default,
    aten.reshape_as.default,
    aten.type_as.default,
    aten.to.other,
)
LIST_VIEWS: Operators = (
    aten.split.Tensor,
    aten.split.sizes,
    aten.split_with_sizes.default,
    aten.chunk.default,
)
CASTS: Operators = (
    aten.to.dtype,
    aten.to.other,
    aten.to.device,
    aten.to.dtype_layout,
    aten._to_copy.default,
)

# Functions of one element -----------------------------------------------------------------------------------

MONOTONE: Operators = (  # non-decreasing
    aten.relu.default,
    aten.relu6.default,
    aten.hardtanh.default,
    aten.hardsigmoid.default,
    aten.sigmoid.default,
    aten.tanh.default,
    aten.selu.default,
    aten.exp.default,
)
HOMOGENEOUS: Operators = (  # f(c x) = c f(x) for c >= 0
    aten.relu.default,
    aten.leaky_relu.default,
    aten.prelu.default,
)
BELOW: Operators = (aten.lt.Scalar, aten.le.Scalar, aten.lt.Tensor, aten.le.Tensor)
ABOVE: Operators = (aten.gt.Scalar, aten.ge.Scalar, aten.gt.Tensor, aten.ge.Tensor)
CHOICES: Operators = (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
FILLS: Operators = (aten.masked_fill.Scalar, aten.masked_fill.Tensor)
SUMS: Operators = (aten.add.Tensor, aten.add.Scalar)
DIFFERENCES: Operators = (aten.sub.Tensor, aten.sub.Scalar)
PRODUCTS: Operators = (aten.mul.Tensor, aten.mul.Scalar)
QUOTIENTS: Operators = (aten.div.Tensor, aten.div.Scalar)
_ALIASES_OF_POINTWISE = (
    *("absolute", "negative", "arccos", "arcsin", "arcsinh", "arctan", "arctanh"),
    *("special_digamma", "special_erf", "special_erfc", "special_erfinv", "special_exp2", "special_expit"),
    *("special_expm1", "special_gammaln", "special_i0", "special_log1p", "special_logit", "special_ndtr"),
    *("special_psi", "special_sinc"),
)
_UNTAGGED: Operators = (  # which torch does not call pointwise
    aten.prelu.default,
    aten.log_sigmoid.default,
    aten.hardswish.default,
    *(getattr(aten, name).default for name in _ALIASES_OF_POINTWISE),
)


def is_pointwise(op: Any) -> bool:
    """Say whether an operator works element by element and draws nothing."""
    if not isinstance(op, OpOverload) or draws(op):
        return False
    tagged = torch.Tag.pointwise in op.tags
    return tagged or op in IDENTITIES or op in _UNTAGGED or op is aten.to.dtype


# Layers -----------------------------------------------------------------------------------------------------

RECURRENT: Operators = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
MATRIX_PRODUCTS: Operators = (aten.matmul.default, aten.mm.default)
CONVOLUTIONS: Operators = (
    aten.conv1d.default,
    aten.conv1d.padding,
    aten.conv2d.default,
    aten.conv2d.padding,
    aten.conv3d.default,
    aten.conv3d.padding,
)
CONVOLUTION: dict[int, Any] = {1: aten.conv1d.default, 2: aten.conv2d.default, 3: aten.conv3d.default}
AVERAGE_POOL: dict[int, Any] = {
    1: aten.avg_pool1d.default,
    2: aten.avg_pool2d.default,
    3: aten.avg_pool3d.default,
}
MAX_POOLS: dict[Any, int] = {  # and over how many dimensions
    aten.max_pool1d.default: 1,
    aten.max_pool2d.default: 2,
    aten.max_pool3d.default: 3,
}
MAX_POOLS_WITH_INDICES: dict[Any, Any] = {  # and what returns the values alone
    aten.max_pool1d_with_indices.default: aten.max_pool1d.default,
    aten.max_pool2d_with_indices.default: aten.max_pool2d.default,
    aten.max_pool3d_with_indices.default: aten.max_pool3d.default,
}
ADAPTIVE_MAX_POOLS: dict[Any, Any] = {  # and the same with windows of one size
    aten.adaptive_max_pool1d.default: aten.max_pool1d.default,
    aten.adaptive_max_pool2d.default: aten.max_pool2d.default,
    aten.adaptive_max_pool3d.default: aten.max_pool3d.default,
}
FILLED: Operators = (  # with one number, in the shape of another value
    aten.empty_like.default,
    aten.full_like.default,
    aten.new_empty.default,
    aten.new_full.default,
    aten.new_ones.default,
    aten.new_zeros.default,
    aten.ones_like.default,
    aten.zeros_like.default,
)
HEADS: dict[Any, str] = {  # outputs made of logits
    aten.softmax.int: "softmax",
    aten.log_softmax.int: "log_softmax",
    aten.sigmoid.default: "sigmoid",
}
