"""A module as a program that runs without its Python code: AOTInductor's machine code, or ONNX Runtime."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from momentprop.exports.onnx_runtime import check_onnx, open_session, silent_exporter
from momentprop.graph.private import compile_package
from momentprop.lowering.flat_export import export_flat, quiet
from momentprop.lowering.free_batch import Positional
from momentprop.lowering.inductor import OPTIONS
from momentprop_reproduction.benchmarking import private

Program = Callable[[Sequence[Tensor]], Sequence[Any]]


@dataclass(frozen=True)
class Setting:
    """Says where and how programs run."""

    threads: int
    folder: Path  # of the files of programs: each is made once
    backend: str = "inductor"  # of torch.compile
    arena: bool = True  # ONNX Runtime keeps memory for the next call; without, its peak can be seen


def exported(module: nn.Module, inputs: Sequence[Tensor], dynamic: Sequence[Any]) -> ExportedProgram:
    """Export a module; `dynamic` holds for every input a dictionary of its free dimensions, or None."""
    return export_flat(Positional(module).eval(), inputs, dynamic)


def packaged(module: nn.Module, inputs: Sequence[Tensor], dynamic: Sequence[Any], path: Path) -> Program:
    """Make a program of AOTInductor's machine code, in a file that is made unless it is there."""
    if not path.exists():
        with quiet(), torch.no_grad():
            program = exported(module, inputs, dynamic)
            compile_package(program, os.fspath(path), OPTIONS)
    loaded = private.load_package(os.fspath(path))

    def run(tensors: Sequence[Tensor]) -> Sequence[Any]:
        found = loaded(*tensors)
        return found if isinstance(found, (tuple, list)) else [found]

    return run


def in_onnx(
    module: nn.Module, inputs: Sequence[Tensor], dynamic: Sequence[Any], path: Path, setting: Setting
) -> Program:
    """Make a program of ONNX Runtime, on a file that is made unless it is there."""
    check_onnx()
    if not path.exists():
        with quiet(), silent_exporter(), torch.no_grad():
            made = torch.onnx.export(
                exported(module, inputs, dynamic), dynamo=True, external_data=False, verbose=False
            )
        assert made is not None
        made.save(os.fspath(path))
    return session(path, setting)


def session(path: Path, setting: Setting) -> Program:
    """Open a file in ONNX Runtime."""
    opened = open_session(path, setting.threads, setting.arena)
    names = [value.name for value in opened.get_inputs()]

    def run(tensors: Sequence[Tensor]) -> Sequence[Any]:
        found: list[Any] = opened.run(None, dict(zip(names, [t.numpy() for t in tensors], strict=True)))
        return found

    return run
