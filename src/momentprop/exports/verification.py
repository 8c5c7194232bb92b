"""Whether a file gives the numbers that PyTorch gives, on ordinary and extreme inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from momentprop.errors import DisagreementError, ExportError
from momentprop.exports.onnx_names import input_names
from momentprop.exports.onnx_runtime import open_session
from momentprop.exports.program import Program, example_tensors

TOLERANCE = 1e-5  # of the largest value of an output
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
    difference of entropies, so the entropy is its scale.
    """
    errors = {port.name: 0.0 for port in program.outputs}
    problems: list[str] = []
    for batch in BATCHES:
        for title, make in FILLINGS.items():
            tensors = example_tensors(network, program.call, batch, make)
            with torch.no_grad():
                expected = {
                    p.name: t.cpu() for p, t in zip(program.outputs, program.flat(*tensors), strict=True)
                }
            for port, found in zip(program.outputs, run(tensors), strict=True):
                name, wanted = port.name, expected[port.name]
                scale = expected["entropy"] if name == "mutual_information" else wanted
                error = _error(found, wanted, scale)
                errors[name] = max(errors[name], error)
                if not error <= TOLERANCE:
                    problems.append(
                        f"  {name}, batch {batch}, {title}: off by {error:.1e} of its largest value"
                    )
    if problems:
        shown = "\n".join(problems[:12]) + (
            f"\n  and {len(problems) - 12} more" if len(problems) > 12 else ""
        )
        raise DisagreementError(
            f"the file does not give what PyTorch gives (tolerance {TOLERANCE:.0e}):\n{shown}"
        )
    return errors


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
