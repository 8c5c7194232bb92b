"""`compile_package`: a converted network as machine code in a file, which starts without compiling."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from momentprop.errors import ExportError
from momentprop.exports.archive import describe, moments_program, seal, written
from momentprop.exports.metadata import Metadata
from momentprop.exports.program import example_tensors
from momentprop.graph import private
from momentprop.lowering.flat_export import quiet
from momentprop.lowering.inductor import OPTIONS


def compile_package(
    network: nn.Module,
    path: str | os.PathLike[str],
    *,
    note: str = "",
    preprocessing: str = "",
    report: Any = None,
) -> Metadata:
    """Compile a converted network with AOTInductor into a `.pt2` package that `load` reads.

    It takes a C++ compiler and minutes for deep networks, once. The package runs with the same version of
    torch, on processors that have the instructions of this one, for any batch size. Note, preprocessing and
    report are as for `save`.
    """
    program, structure = moments_program(network)
    metadata = describe("aoti", network, program, note, preprocessing, report, structure=structure)
    exported = program.exported
    exported._example_inputs = (tuple(example_tensors(network, program.call)), {})
    with written(path) as temporary:
        if temporary.suffix != ".pt2":
            raise ValueError(f"torch names its packages .pt2, but the path is {path}")
        try:
            with quiet(), torch.no_grad():
                private.compile_package(exported, os.fspath(temporary), OPTIONS)
        except Exception as error:
            if type(error).__name__ == "InvalidCxxCompiler" or "InvalidCxxCompiler" in str(error):
                raise ExportError(
                    "no C++ compiler was found: install g++ or clang++, or name one in the variable CXX"
                ) from error
            raise ExportError(
                f"AOTInductor cannot compile the network: {type(error).__name__}: {error}"
            ) from error
        return seal(temporary, metadata)
