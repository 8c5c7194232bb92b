"""Every method in every runtime, as a function of its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from momentprop.capture.signature import EXAMPLE_BATCH
from momentprop.exports.archive import compile_package, load
from momentprop.exports.loaded import LoadedNetwork
from momentprop.exports.onnx import export_onnx
from momentprop.exports.onnx_runtime import check_onnx
from momentprop.lowering.inductor import OPTIONS
from momentprop.sample import monte_carlo
from momentprop_reproduction.benchmarking.methods import MC, PLAIN, SAVED, Method
from momentprop_reproduction.benchmarking.programs import Program, Setting, in_onnx, packaged, session
from momentprop_reproduction.benchmarking.sampling import sample_with
from momentprop_reproduction.benchmarking.subject import Subject

RUNTIMES = ("eager", "compiled", "aot", "onnx")

Call = Callable[[tuple[Tensor, ...]], object]


def prepare(subject: Subject, method: Method, runtime: str, setting: Setting) -> Call:
    """Make a function inputs -> outputs, as a user of that runtime would; raise where that is impossible.

    The plain network in the same runtime has its free batch, its threads and its precision.
    """
    if runtime not in RUNTIMES:
        raise ValueError(f"runtimes are {', '.join(RUNTIMES)}, not {runtime!r}")
    if runtime in ("eager", "compiled"):
        return _in_torch(subject, method, runtime == "compiled", setting)
    if runtime == "onnx":
        check_onnx()
    if method.kind == MC:
        return _sampled(subject, method, runtime, setting)
    if method.kind == PLAIN:
        inputs = subject.batch(EXAMPLE_BATCH)
        program = _program(
            subject.plain(), inputs, [{0: Dim.DYNAMIC}] * len(inputs), "plain", runtime, setting
        )
        return lambda x: program(x)
    return _converted(subject, method, runtime, setting)


def _in_torch(subject: Subject, method: Method, compiled: bool, setting: Setting) -> Call:
    if method.kind == MC:
        bnn, inductor = subject.sampled(), setting.backend == "inductor"
        return lambda x: monte_carlo(
            bnn, x, method.samples, compile=compiled and inductor, keep_samples=False
        )
    network: nn.Module
    if method.kind == PLAIN:
        network = subject.plain()
    elif method.kind == SAVED:
        network = _saved(subject)
        if compiled:
            network = network.program  # type: ignore[assignment]
    else:
        network = subject.frozen(method.kind)
    function: Any = network
    if compiled:
        # static shapes are what a user who cares for speed compiles for
        options = {**OPTIONS} if setting.backend == "inductor" else None
        function = torch.compile(
            network, fullgraph=True, dynamic=False, backend=setting.backend, options=options
        )
    return lambda x: function(*x)


def _converted(subject: Subject, method: Method, runtime: str, setting: Setting) -> Call:
    """Make the call that runs a network from a file of `compile_package` or `export_onnx`."""
    path = setting.folder / f"{method.slug}-{setting.threads}.{'pt2' if runtime == 'aot' else 'onnx'}"
    is_saved = method.kind == SAVED
    if runtime == "onnx":
        if not path.exists():
            export_onnx(_saved(subject) if is_saved else subject.converted(method.kind), path, verify=False)
        program = session(path, setting)
        return lambda x: program(x)
    if is_saved and _is_machine_code(subject.saved):
        loaded = subject.saved
    else:
        if not path.exists():
            compile_package(_saved(subject) if is_saved else subject.frozen(method.kind), path)
        loaded = load(path, machine_code=True)  # made here
    assert loaded is not None
    network: nn.Module = loaded
    return lambda x: network(*x)


def _saved(subject: Subject) -> nn.Module:
    if subject.saved is None:
        raise LookupError("there is no saved network: name a .pt2 file")
    if _is_machine_code(subject.saved):
        raise LookupError("the file is machine code, which runs in the runtime aot only")
    return subject.saved


def _is_machine_code(network: nn.Module | None) -> bool:
    return isinstance(network, LoadedNetwork) and network.metadata.kind == "aoti"


def _sampled(subject: Subject, method: Method, runtime: str, setting: Setting) -> Call:
    def make(module: nn.Module, inputs: Any, dynamic: Any, name: str) -> Program:
        # the number of samples is free: every T uses the same two files
        return _program(module, inputs, dynamic, f"mc-{name}", runtime, setting)

    sample: Call = sample_with(subject.sampled(), make, subject.batch(EXAMPLE_BATCH), method.samples)
    return sample


def _program(
    module: nn.Module, inputs: Any, dynamic: Any, name: str, runtime: str, setting: Setting
) -> Program:
    path = setting.folder / f"{name}-{setting.threads}.{'pt2' if runtime == 'aot' else 'onnx'}"
    if runtime == "aot":
        return packaged(module, inputs, dynamic, path)
    return in_onnx(module, inputs, dynamic, path, setting)
