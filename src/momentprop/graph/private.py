"""Holds all private names of torch that are used here.

They may move or change with any release of torch, so each stands here with what it is needed for.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor

# FX nodes call operators, whose types have no public name: rules are registered for an overload.
from torch._decomp import decomposition_table  # operators in terms of simpler ones
from torch._dispatch.python import enable_python_dispatcher  # kernels for symbolic shapes
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor  # a node's shape and dtype without its values
from torch.utils._python_dispatch import _disable_current_modes  # for constants made in the midst of tracing

__all__ = [  # what others import from here, though it comes from torch
    "FakeTensor",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "decomposition_table",
    "enable_python_dispatcher",
]

Function = TypeVar("Function", bound=Callable[..., Any])


def collate_with(kind: type, stack: Callable[[Any], Any]) -> None:
    """Make data loaders stack values of this kind: their table of kinds has no public name."""
    from torch.utils.data._utils.collate import default_collate_fn_map

    default_collate_fn_map[kind] = lambda batch, *, collate_fn_map=None: stack(batch)


def compile_package(exported: torch.export.ExportedProgram, path: str, options: Mapping[str, Any]) -> None:
    """AOTInductor's machine code of an exported program. The import takes seconds, so it stands here."""
    from torch._inductor import aoti_compile_and_package

    aoti_compile_and_package(exported, package_path=path, inductor_configs={**options})


def constant_result(function: Function) -> Function:
    """torch.compiler.assume_constant_result, which imports the whole compiler: a second at every start."""
    setattr(function, "_dynamo_marked_constant", True)  # noqa: B010  (a function has no such attribute)
    return function


def package_runner(path: str) -> Any:
    """The C++ loader of a package by itself: without importing torch._inductor, which takes longest."""
    return torch._C._aoti.AOTIModelPackageLoader(path, "model", False, 1, -1)


def has_kernel(name: str) -> bool:
    """Say whether an operator of this name is registered in this process."""
    return torch._C._dispatch_has_kernel(name)


def import_tracer() -> None:
    """Import what torch imports when it first traces: that takes a second, and is not to be watched."""
    importlib.import_module("torch._dynamo")


def in_dispatch_mode() -> bool:
    """Say whether something looks at all operators of this thread.

    The public `is_in_torch_dispatch_mode` is a flag of the process: two threads that enter and leave modes by
    turns can leave it set for good.
    """
    return torch._C._len_torch_dispatch_stack() > 0


def is_batched(tensor: Tensor) -> bool:
    """Say whether torch.vmap runs over the tensor: its values cannot be asked for then."""
    return torch._C._functorch.is_batchedtensor(tensor)


def is_transformed(tensor: Tensor) -> bool:
    """Say whether torch.func works on the tensor: its values cannot always be asked for then."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


@contextlib.contextmanager
def outside_of_modes() -> Iterator[None]:
    """Leave fake tensors, tracing and torch.vmap (which takes no random numbers): for constants to keep."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        yield


def without_overrides() -> AbstractContextManager[Any]:
    """Keep tensor subclasses from being asked about operators."""
    return torch._C.DisableTorchFunction()


# torch.export is not made for several threads: one that exports while another does finds, and may leave
# behind, what belongs to the other. Whatever exports, or sets what changes an export, holds this.
EXPORTING = threading.RLock()


@contextlib.contextmanager
def export_for_one_thread(any_backend: bool = False) -> Iterator[None]:
    """Limit to this thread what torch.export does to the whole process. Others wait for their turn.

    torch.export switches cuDNN and oneDNN off and says to all code that it is being compiled; it replaces
    `max`, `min` and `math.pow`, and keeps its modes where all threads set them aside for a moment, even to
    print a tensor.
    Its tracer patches methods of `nn.Module`, and where a module stands at two places of the model it hands
    out proxies of modules, to whoever asks.

    With `any_backend`, cuDNN and oneDNN stay on. For which batch sizes a convolution would use them may then
    become part of the graph.
    """
    with EXPORTING, contextlib.ExitStack() as stack:
        for module, name, new in _changes(_Here(), any_backend):
            if hasattr(module, name):  # older torch does not have them all
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, new)
        yield


class _Here:
    """Is true in the thread that made it."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()

    def __bool__(self) -> bool:
        return self.thread == threading.get_ident()

    def __or__(self, other: Any) -> Any:
        return bool(self) | other

    def __and__(self, other: Any) -> Any:
        return bool(self) & other

    __ror__, __rand__ = __or__, __and__

    def only(self, function: Callable[..., Any], elsewhere: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (function if self else elsewhere)(*args, **kwargs)


def _changes(here: _Here, any_backend: bool) -> list[tuple[Any, str, Any]]:
    """List names in modules of torch, and what takes their place."""
    from torch.fx.experimental import proxy_tensor

    export: Any = importlib.import_module("torch.export._trace")
    override = getattr(export, "_override_builtin_ops", contextlib.nullcontext)
    state: Any = torch.compiler

    @contextlib.contextmanager
    def compiling() -> Iterator[None]:
        before = state._is_compiling_flag, state._is_exporting_flag
        state._is_compiling_flag = state._is_exporting_flag = here
        try:
            yield
        finally:
            state._is_compiling_flag, state._is_exporting_flag = before

    @contextlib.contextmanager
    def builtin_ops() -> Iterator[None]:
        before = [getattr(module, name) for module, name in _BUILTINS]
        with override():
            for (module, name), old in zip(_BUILTINS, before, strict=True):
                setattr(module, name, here.only(getattr(module, name), old))
            yield

    class PerThread(threading.local, torch._ops._ModeStackStateForPreDispatch):
        pass

    backends: list[tuple[Any, str, Any]] = [(export, "_ignore_backend_decomps", contextlib.nullcontext)]
    return [
        *(backends if any_backend else []),
        (export, "_compiling_state_context", compiling),
        (export, "_override_builtin_ops", builtin_ops),
        (torch._ops, "_mode_stack_state_for_pre_dispatch", PerThread()),
        (proxy_tensor, "_ModuleStackTracer", _tracer(proxy_tensor._ModuleStackTracer, here)),
    ]


_BUILTINS: tuple[tuple[Any, str], ...] = ((builtins, "max"), (builtins, "min"), (math, "pow"))


def _tracer(kind: Any, here: _Here) -> Any:
    state: Any = torch.compiler

    class Tracer(kind):
        def getattr(self, attr: str, attr_val: object, *rest: Any) -> object:
            return super().getattr(attr, attr_val, *rest) if here else attr_val

        def call_module(self, m: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            return super().call_module(m, forward, args, kwargs) if here else forward(*args, **kwargs)

        def trace(self, *args: Any, **kwargs: Any) -> Any:
            # where fx says that it traces, and nobody that it compiles, compiled functions refuse to run
            state._is_compiling_flag = True
            try:
                return super().trace(*args, **kwargs)
            except RuntimeError as error:  # torch.export would print this, the whole graph, on stderr
                vars(error).pop("partial_fx_graph", None)
                raise
            finally:
                state._is_compiling_flag = here

        def create_args_for_root(self, *args: Any, **kwargs: Any) -> Any:
            torch.fx._symbolic_trace._is_fx_tracing_flag = here  # type: ignore[assignment]
            state._is_compiling_flag = here
            return super().create_args_for_root(*args, **kwargs)

    return Tracer
