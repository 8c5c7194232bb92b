"""Random numbers of one network: a stream of its own, so that it trains the same alone and in a stack.

Masks are drawn as the positions of what is dropped: with p = 0.005 one random number serves 200 elements.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np

Array = Any  # of numpy
Generator = Any


def stream(seed: int, *key: int | str) -> Generator:
    """The generator of whatever `key` names; two keys give independent streams.

    >>> bool(stream(0, "yacht", 3).random() == stream(0, "yacht", 3).random())
    True
    """
    words = [k if isinstance(k, int) else zlib.crc32(k.encode()) for k in key]
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence([seed, *words])))


def glorot(rng: Generator, n_in: int, n_out: int) -> Array:
    """Initial weights [n_in, n_out] as Keras takes them (Glorot & Bengio 2010), uniform."""
    bound = math.sqrt(6 / (n_in + n_out))
    return rng.uniform(-bound, bound, (n_in, n_out))


def shuffles(rng: Generator, epochs: int, n: int) -> Array:
    """One permutation of 0..n-1 per epoch, one after the other: [epochs * n]."""
    return rng.permuted(np.tile(np.arange(n), (epochs, 1)), axis=1).reshape(-1)


def dropped(rng: Generator, n: int, drop_probability: float) -> Array:
    """Draw which of n elements are dropped, each by itself with probability p: positions in ascending order.

    Gaps between them are geometric: floor(E / -log(1-p)) elements kept, with E standard exponential. So the
    count is binomial and every subset has its right probability, to the 52 bits of a double.

    >>> positions = dropped(stream(0), 100_000, 0.1)
    >>> 9_500 < len(positions) < 10_500
    True
    """
    if not 0 < drop_probability < 1:
        raise ValueError(f"the drop probability must lie between 0 and 1, not {drop_probability}")
    expected = n * drop_probability
    count = int(expected + 5 * math.sqrt(expected)) + 8  # nearly always enough, and the loop does the rest
    scale, last = -1 / math.log1p(-drop_probability), -1
    found = []
    while last < n:
        gaps = (rng.standard_exponential(count) * scale).astype(np.int64)
        gaps += 1
        gaps[0] += last
        np.cumsum(gaps, out=gaps)
        found.append(gaps)
        last = int(gaps[-1])
    positions = found[0] if len(found) == 1 else np.concatenate(found)
    return positions[: np.searchsorted(positions, n)]
