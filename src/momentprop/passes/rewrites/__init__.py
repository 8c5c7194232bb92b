"""Rewrites a graph to the same function of the same inputs, easier on the rules.

Every rewrite keeps the deterministic function for every mask; parameters are not looked at, so they stay
true when the weights change. What is recomputed per call (folded weights) is small beside the network.
"""

from momentprop.passes.dropped import (
    DROP_NORMALISED_CHANNELS,
    JOIN_DROPPED_MAXIMUM,
    JOIN_DROPPED_NORM,
    JOIN_DROPPED_PAIR,
    JOIN_DROPPED_POOL,
    JOIN_DROPPED_SOFTMAX,
    RECOGNISE_DROPOUT,
    TAKE_DROPPED_FUNCTIONS,
)
from momentprop.passes.rewrites.activate_before_dropout import ACTIVATE_BEFORE_DROPOUT
from momentprop.passes.rewrites.batch_norm import FOLD_BATCH_NORM
from momentprop.passes.rewrites.pool_before_activation import POOL_BEFORE_ACTIVATION
from momentprop.passes.rewrites.reshapes import MERGE_RESHAPES
from momentprop.passes.rewrites.scalar_chains import FOLD_SCALAR_CHAINS
from momentprop.passes.runner import Pass

# batch norm is folded into a layer before a pooling can come between them; maxima, softmax and norms are
# joined with a dropout before an activation can come between those
REWRITES: tuple[Pass, ...] = (
    MERGE_RESHAPES,
    RECOGNISE_DROPOUT,
    FOLD_SCALAR_CHAINS,
    FOLD_BATCH_NORM,
    JOIN_DROPPED_POOL,
    JOIN_DROPPED_MAXIMUM,
    JOIN_DROPPED_PAIR,
    JOIN_DROPPED_SOFTMAX,
    JOIN_DROPPED_NORM,
    DROP_NORMALISED_CHANNELS,
    POOL_BEFORE_ACTIVATION,
    TAKE_DROPPED_FUNCTIONS,
    ACTIVATE_BEFORE_DROPOUT,
)

__all__ = ["REWRITES"]
