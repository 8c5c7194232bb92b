"""Brings a graph into the form that rules are written for, in every tier."""

from momentprop.passes.canonical.compositions import COMPOSE
from momentprop.passes.canonical.last_sigmoid import SIGMOID_LAST
from momentprop.passes.canonical.results import READ_RESULT
from momentprop.passes.canonical.rms_norm import RECOGNISE_RMS_NORM
from momentprop.passes.canonical.segment_softmax import RECOGNISE_SEGMENT_SOFTMAX
from momentprop.passes.canonical.unpooling import JOIN_UNPOOLING
from momentprop.passes.runner import Pass

CANONICAL: tuple[Pass, ...] = (
    RECOGNISE_RMS_NORM,
    RECOGNISE_SEGMENT_SOFTMAX,
    READ_RESULT,
    JOIN_UNPOOLING,
    COMPOSE,
    SIGMOID_LAST,
)

__all__ = ["CANONICAL"]
