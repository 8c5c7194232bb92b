"""What is done behind a dropout, where values are kept or dropped and no Gaussian resembles them."""

from momentprop.passes.dropped.by_hand import RECOGNISE_DROPOUT
from momentprop.passes.dropped.functions import TAKE_DROPPED_FUNCTIONS

__all__ = ["RECOGNISE_DROPOUT", "TAKE_DROPPED_FUNCTIONS"]
