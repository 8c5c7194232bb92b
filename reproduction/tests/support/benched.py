"""What the tests of `momentprop bench` measure; processes of their own import it by name."""

from __future__ import annotations

import torch

from momentprop_reproduction.benchmarking.subject import Subject
from small import mlp


def subject() -> Subject:
    torch.manual_seed(0)
    return Subject("small", (torch.randn(2, 4),), mlp().eval())
