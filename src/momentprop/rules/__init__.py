"""The rules that ship with momentprop; importing this package registers them."""

from momentprop.rules import (
    activation,
    arithmetic,
    convolution,
    dropout,
    linear,
    normalization,
    pooling,
    reduction,
    shape,
    softmax,
)

__all__ = [
    "activation",
    "arithmetic",
    "convolution",
    "dropout",
    "linear",
    "normalization",
    "pooling",
    "reduction",
    "shape",
    "softmax",
]
