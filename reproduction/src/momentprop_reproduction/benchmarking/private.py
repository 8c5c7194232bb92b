"""Holds the private names of torch that only benchmarks use."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


def load_package(path: str) -> Any:
    """A package of machine code as a function, by torch's own loader in Python."""
    from torch._inductor import aoti_load_package

    return aoti_load_package(path)


def static_shapes() -> AbstractContextManager[Any]:
    """Compile code for one size each, so that code for varying sizes is not what is timed."""
    return torch._dynamo.config.patch(automatic_dynamic_shapes=False)


def forget_compiled() -> None:
    """Forget compiled code: that for other sizes counts against dynamo's limit for one function."""
    torch._dynamo.reset()


def without_autograd_cache() -> AbstractContextManager[Any]:
    """Switch the cache of compiled graphs off: it knows operators by name, not by what they compute."""
    from torch._functorch import config

    return config.patch(enable_autograd_cache=False)
