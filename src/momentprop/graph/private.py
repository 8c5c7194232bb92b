"""Private names of torch, all of them in this file.

They may move or change with any release of torch, so each stands here with what it is needed for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor

# FX nodes call operators, whose types have no public name: rules are registered for an overload.
from torch._decomp import core_aten_decompositions, decomposition_table  # operators in terms of simpler ones
from torch._dispatch.python import enable_python_dispatcher  # kernels for symbolic shapes
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor  # a node's shape and dtype without its values

__all__ = [
    "FakeTensor",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "compile_package",
    "constant_result",
    "core_aten_decompositions",
    "decomposition_table",
    "enable_python_dispatcher",
    "forget_compiled",
    "has_kernel",
    "is_batched",
    "load_package",
    "package_runner",
    "static_shapes",
    "without_autograd_cache",
    "without_overrides",
]

Function = TypeVar("Function", bound=Callable[..., Any])


def compile_package(exported: torch.export.ExportedProgram, path: str, options: Mapping[str, Any]) -> None:
    """AOTInductor's machine code of an exported program. The import takes seconds, so it stands here."""
    from torch._inductor import aoti_compile_and_package

    aoti_compile_and_package(exported, package_path=path, inductor_configs={**options})


def constant_result(function: Function) -> Function:
    """torch.compiler.assume_constant_result, which imports the whole compiler: a second at every start."""
    setattr(function, "_dynamo_marked_constant", True)  # noqa: B010  (a function has no such attribute)
    return function


def load_package(path: str) -> Any:
    """A package of machine code as a function, by torch's own loader in Python."""
    from torch._inductor import aoti_load_package

    return aoti_load_package(path)


def package_runner(path: str) -> Any:
    """The C++ loader of a package by itself: without importing torch._inductor, which takes longest."""
    return torch._C._aoti.AOTIModelPackageLoader(path, "model", False, 1, -1)


def has_kernel(name: str) -> bool:
    """Say whether an operator of this name is registered in this process."""
    return torch._C._dispatch_has_kernel(name)


def is_batched(tensor: Tensor) -> bool:
    """Say whether torch.vmap runs over the tensor: its values cannot be asked for then."""
    return torch._C._functorch.is_batchedtensor(tensor)


def without_overrides() -> AbstractContextManager[Any]:
    """Tensor subclasses are not asked about operators."""
    return torch._C.DisableTorchFunction()


def static_shapes() -> AbstractContextManager[Any]:
    """Compiled code is for one size each: what is timed is not code for sizes that vary."""
    return torch._dynamo.config.patch(automatic_dynamic_shapes=False)


def forget_compiled() -> None:
    """Code for other sizes counts against dynamo's limit of compilations of one function."""
    torch._dynamo.reset()


def without_autograd_cache() -> AbstractContextManager[Any]:
    """The cache of compiled graphs knows operators by their names, not by what they compute."""
    from torch._functorch import config

    return config.patch(enable_autograd_cache=False)
