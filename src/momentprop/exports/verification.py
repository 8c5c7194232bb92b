"""Whether a file gives the numbers that PyTorch gives, on ordinary and extreme inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from momentprop.errors import DisagreementError, ExportError
from momentprop.exports.onnx_names import input_names
from momentprop.exports.onnx_runtime import open_session
from momentprop.exports.program import Program, example_tensors, in_double

TOLERANCE = 1e-5  # of the largest value of an output
_MARGIN = 10  # over what rounding costs PyTorch itself
BATCHES = (1, 3, 32)
Run = Callable[[Sequence[Tensor]], list[Tensor]]


def _scaled(factor: float) -> Callable[[Sequence[int]], Tensor]:
    def make(shape: Sequence[int]) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * factor

    return make


# what fills the floating-point inputs
FILLINGS: dict[str, Callable[[Sequence[int]], Tensor]] = {
    "normal numbers": _scaled(1.0),
    "zeros": lambda shape: torch.zeros(*shape),
    "ones": lambda shape: torch.ones(*shape),
    "normal numbers of size 0.001": _scaled(1e-3),
    "normal numbers of size 1000": _scaled(1e3),
}


def verify_onnx(path: Path, network: nn.Module, program: Program) -> dict[str, float]:
    """The largest error of every output in ONNX Runtime, relative to its scale; raises if it is too large."""
    try:
        session = open_session(path)
    except Exception as error:  # of its own kinds
        raise ExportError(f"ONNX Runtime does not load the file: {error}") from error
    names = [value.name for value in session.get_inputs()]

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        # inputs that no output depends on are not in the file
        known = dict(zip(input_names(program), tensors, strict=True))
        values = session.run(None, {name: known[name].cpu().numpy() for name in names})
        return [torch.as_tensor(value) for value in values]

    return verify(run, network, program)


def verify(run: Run, network: nn.Module, program: Program) -> dict[str, float]:
    """Compare `run` with the network in PyTorch.

    An error counts relative to the largest value of its output over the batch. Mutual information is a small
    difference of entropies, so the entropy is its scale. Up to ten times the distance of PyTorch's float32
    from float64 is not an error of the file.
    """
    errors = {port.name: 0.0 for port in program.outputs}
    problems: list[str] = []
    for title, make in FILLINGS.items():
        inputs = {batch: example_tensors(network, program.call, batch, make) for batch in BATCHES}
        with torch.no_grad():
            wanted = {batch: _named(program, program.flat(*tensors)) for batch, tensors in inputs.items()}
        found = {
            batch: _errors(_named(program, run(tensors)), wanted[batch]) for batch, tensors in inputs.items()
        }
        allowed = dict.fromkeys(errors, TOLERANCE)
        if any(not error <= TOLERANCE for by_name in found.values() for error in by_name.values()):
            rounding = _rounding(program, inputs, wanted)
            allowed = {name: max(TOLERANCE, _MARGIN * error) for name, error in rounding.items()}
        for batch, by_name in found.items():
            for name, error in by_name.items():
                if not error <= allowed[name]:
                    problems.append(
                        f"  {name}, batch {batch}, {title}: off by {error:.1e} of its largest value"
                    )
                elif error <= TOLERANCE:
                    errors[name] = max(errors[name], error)
    if problems:
        shown = "\n".join(problems[:12]) + (
            f"\n  and {len(problems) - 12} more" if len(problems) > 12 else ""
        )
        raise DisagreementError(
            f"the file does not give what PyTorch gives (tolerance {TOLERANCE:.0e}):\n{shown}"
        )
    return errors


def _named(program: Program, values: Sequence[Tensor]) -> dict[str, Tensor]:
    return {port.name: value.cpu() for port, value in zip(program.outputs, values, strict=True)}


def _rounding(
    program: Program, inputs: dict[int, list[Tensor]], wanted: dict[int, dict[str, Tensor]]
) -> dict[str, float]:
    """The largest error of PyTorch's float32 in any batch: by chance one may be rounded well.

    0 where nothing is known about it: an operator may refuse to be widened.
    """
    rounding = {port.name: 0.0 for port in program.outputs}
    try:
        run = in_double(program)
        for batch, tensors in inputs.items():
            for name, error in _errors(_named(program, run(tensors)), wanted[batch]).items():
                rounding[name] = max(rounding[name], error if math.isfinite(error) else 0.0)
    except RuntimeError:
        pass
    return rounding


def _errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    scales = wanted | ({"mutual_information": wanted["entropy"]} if "mutual_information" in wanted else {})
    return {name: _error(found[name], value, scales[name]) for name, value in wanted.items()}


def _error(found: Tensor, wanted: Tensor, scale: Tensor) -> float:
    """The largest difference over the largest value; infinite for other shapes and for lost numbers."""
    if found.shape != wanted.shape:
        return float("inf")
    if not wanted.is_floating_point():
        return float((found != wanted).any())
    finite = wanted.isfinite()  # what overflows in PyTorch may overflow differently
    if not found[finite].isfinite().all():
        return float("inf")
    if not finite.any():
        return 0.0
    size = scale[scale.isfinite()].abs().max().clamp_min(torch.finfo(wanted.dtype).tiny)
    return float((found - wanted)[finite].abs().max() / size)
