"""Multiply-adds, the limit of what a method can cost: no runtime does fewer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode

from momentprop.sample import monte_carlo
from momentprop_reproduction.benchmarking.methods import MC, PLAIN, SAVED, Method
from momentprop_reproduction.benchmarking.subject import Subject

_BATCH = 2


def multiply_adds(function: Callable[[], object]) -> int:
    """Count multiply-adds of matrix products, convolutions and attention while the function runs.

    >>> a = torch.ones(2, 3)
    >>> multiply_adds(lambda: a @ a.T)
    12
    """
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops() // 2


def work_of(subject: Subject, method: Method) -> float | None:
    """Multiply-adds for one input; None where they cannot be counted."""
    x = subject.batch(_BATCH)
    with torch.no_grad():
        if method.kind == PLAIN:
            return multiply_adds(lambda: subject.plain()(*x)) / _BATCH
        if method.kind == MC:
            few, more = (_sampled(subject, n) for n in (2, 3))
            return (few + (more - few) * (method.samples - 2)) / _BATCH
        network = subject.saved if method.kind == SAVED else subject.frozen(method.kind)
        assert network is not None
        found = multiply_adds(lambda: network(*x)) / _BATCH
        return found or None  # of machine code nothing is seen


def _sampled(subject: Subject, n_samples: int) -> int:
    """The deterministic part is counted once, the rest once per sample."""
    x, bnn = subject.batch(_BATCH), subject.sampled()
    return multiply_adds(lambda: monte_carlo(bnn, x, n_samples, samples_at_once=1))
