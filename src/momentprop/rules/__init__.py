"""The rules that ship with momentprop; importing this package registers them."""

from momentprop.rules import (
    activation,
    arithmetic,
    average_pooling,
    convolution,
    dropout,
    interpolation,
    layer_norm,
    linear,
    max_pooling,
    noise,
    normalization,
    product,
    random_weights,
    reduction,
    shape,
    softmax,
)

__all__ = [
    "activation",
    "arithmetic",
    "average_pooling",
    "convolution",
    "dropout",
    "interpolation",
    "layer_norm",
    "linear",
    "max_pooling",
    "noise",
    "normalization",
    "product",
    "random_weights",
    "reduction",
    "shape",
    "softmax",
]
