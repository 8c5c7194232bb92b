"""What is done behind a dropout, where values are kept or dropped and no Gaussian resembles them."""

from momentprop.passes.dropped.by_hand import RECOGNISE_DROPOUT
from momentprop.passes.dropped.channels import DROP_NORMALISED_CHANNELS
from momentprop.passes.dropped.functions import TAKE_DROPPED_FUNCTIONS
from momentprop.passes.dropped.maxima import (
    JOIN_DROPPED_MAXIMUM,
    JOIN_DROPPED_PAIR,
    JOIN_DROPPED_POOL,
)
from momentprop.passes.dropped.sums import JOIN_DROPPED_NORM, JOIN_DROPPED_SOFTMAX

__all__ = [
    "DROP_NORMALISED_CHANNELS",
    "JOIN_DROPPED_MAXIMUM",
    "JOIN_DROPPED_NORM",
    "JOIN_DROPPED_PAIR",
    "JOIN_DROPPED_POOL",
    "JOIN_DROPPED_SOFTMAX",
    "RECOGNISE_DROPOUT",
    "TAKE_DROPPED_FUNCTIONS",
]
