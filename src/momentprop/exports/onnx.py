"""`export_onnx`: a converted network for ONNX Runtime and others, checked against PyTorch."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from momentprop.errors import ArchiveError, DisagreementError, ExportError, MissingExtraError
from momentprop.exports.archive import describe, written
from momentprop.exports.heads import head_of
from momentprop.exports.metadata import Metadata
from momentprop.exports.onnx_decompose import FunctionalProgram
from momentprop.exports.onnx_names import name_values, named_inputs
from momentprop.exports.onnx_operators import Translations, short_translations, stable_translations
from momentprop.exports.onnx_runtime import check_onnx, silent_exporter
from momentprop.exports.onnx_tidy import stride_convolutions, tidy
from momentprop.exports.program import Program, program_of
from momentprop.exports.verification import Agreement, verify_onnx
from momentprop.lowering.flat_export import quiet
from momentprop.predict.records import plain

OPSET = 20  # of ONNX 1.15, which is of 2023
_OLDEST = 18  # what torch's exporter writes
_KEY = "momentprop"  # of the description among the file's properties


def export_onnx(
    network: nn.Module,
    path: str | os.PathLike[str],
    outputs: str = "moments",
    *,
    select: str | int | None = None,
    verify: bool = True,
    opset: int = OPSET,
    note: str = "",
    preprocessing: str = "",
    report: Any = None,
    **options: Any,
) -> Metadata:
    """Write a converted network as ONNX, for any batch size.

    Args:
        network: what `convert` or `load` gave.
        path: the file. It appears only if all went well.
        outputs: what the file returns, under these names:

            - `"moments"`: `mean`, `variance`, and in tier `accurate` `covariance`;
            - `"classification"`: `probs`, and the entropies `total`, `aleatoric` and `epistemic`, as
              `classify` gives them; options `method`, `kind`, `dim`;
            - `"regression"`: `mean`, `std`, the variances `total`, `aleatoric` and `epistemic`, and the
              central interval `lower`, `upper` of the target, as `regress` gives them; options `noise`,
              `heteroscedastic`, and `level` (0.95).
        select: which of several outputs of the network is meant, by name or position.
        verify: run the file in ONNX Runtime beside PyTorch, for several batch sizes on ordinary and extreme
            inputs. Outputs must agree to 1e-5 of their largest value, or to ten times what rounding by one
            unit in the last place after every operator does to them in PyTorch.
        opset: version of the ONNX operators, 18 or newer.
        note, preprocessing, report: as for `save`; `inspect` shows them.

    Returns:
        What the file says about itself; `options["errors"]` holds the largest error of each output, and
        `options["rounding"]` those above 1e-5 that rounding explains, by output and kind of input.

    Raises:
        ExportError: the network cannot be written as ONNX.
        DisagreementError: ONNX Runtime gives other numbers than PyTorch. No file is left.
    """
    check_onnx(runtime=verify)
    if opset < _OLDEST:
        raise ValueError(f"opset must be at least {_OLDEST}, not {opset}")
    program = program_of(network, head_of(outputs, options, select))
    with written(path) as temporary:
        model, agreement = _checked(program, opset, temporary, verify)
        known: dict[str, Any] = {"opset": opset, "outputs": outputs, "verified": verify}
        known |= dataclasses.asdict(agreement)
        given = {"select": select, **options}
        chosen = {key: plain(value) for key, value in given.items() if value is not None}
        metadata = describe("onnx", network, program, note, preprocessing, report, options=known | chosen)
        metadata = dataclasses.replace(metadata, device="any", inputs=named_inputs(program))
        model.metadata_props[_KEY] = metadata.to_json()
        _save(model, temporary)
    return metadata


def read_onnx_metadata(path: str | os.PathLike[str]) -> Metadata:
    """The description that `export_onnx` left in a file."""
    if importlib.util.find_spec("onnx") is None:
        raise MissingExtraError("onnx", "onnx")
    import onnx

    try:
        properties = {
            p.key: p.value for p in onnx.load(os.fspath(path), load_external_data=False).metadata_props
        }
    except FileNotFoundError:
        raise
    except Exception as error:  # protobuf's own kinds
        raise ArchiveError(f"{path} is damaged, or not an ONNX file: {error}") from None
    if _KEY not in properties:
        raise ArchiveError(f"{path} holds no description by momentprop: it was not written by mp.export_onnx")
    return Metadata.from_json(properties[_KEY])


def _checked(program: Program, opset: int, path: Path, verify: bool) -> tuple[Any, Agreement]:
    """The program in ONNX, saved, and its errors: by short formulas, or if these disagree, by exact ones."""
    stable, short = stable_translations(), short_translations()
    model = _translated(program, opset, stable | short)
    _save(model, path)
    if not verify:
        return model, Agreement({}, {})
    try:
        return model, verify_onnx(path, program)
    except DisagreementError:  # an output that is nothing but far tails
        if not any(node.target in short for node in program.exported.graph.nodes):
            raise
        model = _translated(program, opset, stable)
        _save(model, path)
        return model, verify_onnx(path, program)


def _translated(program: Program, opset: int, table: Translations) -> Any:
    """The program in ONNX, as onnx_ir has it, named and without what only its maker could use."""
    try:
        model = _exported(FunctionalProgram.of(program.exported), opset, table)
    except Exception:  # an operator that only the decomposition of the whole gets rid of
        try:
            model = _exported(program.exported, opset, table)
        except Exception as error:
            raise ExportError(f"the network cannot be written as ONNX: {_reason(error)}") from error
    with silent_exporter():
        tidy(model)
        stride_convolutions(model.graph)
        tidy(model)
    name_values(model, program)
    model.producer_name = "momentprop"
    return model


def _exported(exported: ExportedProgram, opset: int, table: Translations) -> Any:
    with quiet(), silent_exporter():
        made = torch.onnx.export(
            exported,
            dynamo=True,
            external_data=False,
            verbose=False,
            optimize=False,  # by a hundred patterns at every node, which takes minutes; `tidy` does not
            opset_version=opset,
            custom_translation_table=table,
        )
    assert made is not None
    return made.model


def _save(model: Any, path: Path) -> None:
    import onnx_ir

    onnx_ir.save(model, os.fspath(path))


def _reason(error: BaseException) -> str:
    """Return the innermost cause, which names the operator."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"
