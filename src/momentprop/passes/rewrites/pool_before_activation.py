"""Moves max pooling in front of monotone functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from momentprop.graph.edit import Editor
from momentprop.graph.ops import MAX_POOLS, MONOTONE
from momentprop.graph.schema import has_running_statistics
from momentprop.passes.runner import Pass

aten = torch.ops.aten

_SIGNLESS = (*MONOTONE, aten.feature_dropout.default)


def pool_before_activation(pool: fx.Node, edit: Editor) -> fx.Node | None:
    """max_pool(f(x)) = f(max_pool(x)) for non-decreasing f: the largest f(x_i) is f of the largest x_i.

    Pooling then sees values that are close to Gaussian, and f works on fewer elements. For batch norm,
    y = s x + b channel by channel, f is non-decreasing or non-increasing with the sign of s; and for
    non-increasing f the largest f(x_i) is f(min x_i) = f(-max(-x_i)). In one formula for both,

        max_pool(f(x)) = f(t max_pool(t x)),   t = sign(s).

    A chain of such functions has the product of their signs. (Where s = 0, f is constant and its argument
    does not matter.) Channel dropout is one too: every element of a window is multiplied by the same number,
    0 or 1 / (1-p).
    """
    n = MAX_POOLS[pool.target]
    if pool.meta["val"].dim() != n + 2:
        return None  # without a batch dimension, what it pools over may be the channels of a norm
    chain = _monotone_chain(pool.args[0])
    if not chain:
        return None
    x: Any = chain[-1].args[0]
    sign, like = _sign(chain, n, edit), pool.meta["val"]
    if sign is not None:
        x = edit.op(aten.mul.Tensor, x, sign, value=x.meta["val"])
    x = edit.op(pool.target, x, *pool.args[1:], value=like)
    if sign is not None:
        x = edit.op(aten.mul.Tensor, x, sign, value=like)
    for f in reversed(chain):
        x = edit.op(f.target, x, *f.args[1:], place=f, value=like)
    return x


def _monotone_chain(x: Any) -> list[fx.Node]:
    """The functions in front of a pooling that it may move past, the last one first."""
    chain: list[fx.Node] = []
    while isinstance(x, fx.Node) and len(x.users) == 1:
        is_norm = x.target is aten.batch_norm.default and has_running_statistics(x)
        if not is_norm and x.target not in _SIGNLESS:
            break
        chain.append(x)
        x = x.args[0]
    return chain


def _sign(chain: list[fx.Node], n: int, edit: Editor) -> fx.Node | None:
    """Return per channel the sign by which the chain increases or decreases; None if it increases."""
    sign = None
    for f in chain:
        weight = f.args[1] if f.target is aten.batch_norm.default else None
        if weight is not None:
            one = edit.op(aten.sign.default, weight)
            sign = one if sign is None else edit.op(aten.mul.Tensor, sign, one)
    return None if sign is None else edit.op(aten.reshape.default, sign, [-1, *[1] * n])


POOL_BEFORE_ACTIVATION = Pass(MAX_POOLS.__contains__, pool_before_activation)
