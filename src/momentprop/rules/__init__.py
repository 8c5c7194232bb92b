"""The rules that ship with momentprop; importing this package registers them."""

from momentprop.rules import (
    activation,
    arithmetic,
    average_pooling,
    convolution,
    dropout,
    linear,
    max_pooling,
    normalization,
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
    "linear",
    "max_pooling",
    "normalization",
    "reduction",
    "shape",
    "softmax",
]
