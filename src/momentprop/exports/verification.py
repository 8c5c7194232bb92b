"""Checks that a file gives the numbers that PyTorch gives, on ordinary and extreme inputs.

No runtime can be asked to agree closer than rounding alone moves the outputs; so that is measured too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from momentprop.errors import DisagreementError, ExportError
from momentprop.exports.onnx_names import input_names
from momentprop.exports.onnx_runtime import open_session
from momentprop.exports.program import Program
from momentprop.graph.private import OpOverload

aten = torch.ops.aten

TOLERANCE = 1e-5  # of the largest value of an output
_MARGIN = 10  # over what one unit in the last place does: sums of many terms are off by several
BATCHES = (1, 3, 32)
Run = Callable[[Sequence[Tensor]], list[Tensor]]

# sums of products: what their rounding leaves is relative to the terms, not to a sum that is small
_SUMS = (
    aten.addmm, aten.baddbmm, aten.bmm, aten.conv1d, aten.conv2d, aten.conv3d, aten.convolution, aten.einsum,
    aten.linear, aten.matmul, aten.mean, aten.mm, aten.sum,
)  # fmt: skip

_BOUNDED = (aten.cos, aten.erf, aten.sigmoid, aten.sin, aten.softmax, aten._softmax, aten.tanh)


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


@dataclass(frozen=True)
class Agreement:
    """Holds how far a file is from PyTorch, by output: largest errors relative to the output's scale."""

    errors: dict[str, float]
    rounding: dict[str, dict[str, float]]  # of those above the tolerance that rounding explains, by input


def verify_onnx(path: Path, program: Program) -> Agreement:
    """Compare a file in ONNX Runtime with the network in PyTorch; raises if they disagree."""
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

    return verify(run, program)


def verify(run: Run, program: Program) -> Agreement:
    """Compare `run` with the network in PyTorch.

    An error counts relative to the largest value of its output over the batch (see `_scale`). Where rounding
    alone can move an output of the program further than the tolerance, ten times as far is not an error of
    the file.
    """
    errors = {port.name: 0.0 for port in program.outputs}
    explained: dict[str, dict[str, float]] = {}
    problems: list[str] = []
    for title, make in FILLINGS.items():
        inputs = {batch: program.examples(batch, make) for batch in BATCHES}
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
                errors[name] = max(errors[name], error)
                if not error <= allowed[name]:
                    problems.append(
                        f"  {name}, batch {batch}, {title}: off by {error:.1e} of its largest value"
                    )
                elif error > TOLERANCE:
                    there = explained.setdefault(name, {})
                    there[title] = max(there.get(title, 0.0), error)
    if problems:
        shown = "\n".join(problems[:12]) + (
            f"\n  and {len(problems) - 12} more" if len(problems) > 12 else ""
        )
        raise DisagreementError(
            f"the file does not give what PyTorch gives (tolerance {TOLERANCE:.0e}):\n{shown}"
        )
    return Agreement(errors, explained)


def _named(program: Program, values: Sequence[Tensor]) -> dict[str, Tensor]:
    return {port.name: value.cpu() for port, value in zip(program.outputs, values, strict=True)}


def _rounding(
    program: Program, inputs: dict[int, list[Tensor]], wanted: dict[int, dict[str, Tensor]]
) -> dict[str, float]:
    """Measure how far outputs move if each operator's result is off by one unit in the last place."""
    rounding = {port.name: 0.0 for port in program.outputs}
    run = rounded(program)
    for batch, tensors in inputs.items():
        moved = _named(program, run(tensors))
        # what overflows when it is moved tells nothing; other samples do
        told = {
            name: torch.where(moved[name].isfinite(), moved[name], v) for name, v in wanted[batch].items()
        }
        for name, error in _errors(told, wanted[batch]).items():
            rounding[name] = max(rounding[name], error)
    return rounding


def _errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    return {name: _error(found[name], value, _scale(name, wanted)) for name, value in wanted.items()}


def _scale(name: str, wanted: dict[str, Tensor]) -> float:
    """Return what an error of this output is relative to: its largest value, as a rule.

    For a part of the total uncertainty it is the total. For a variance it is at least so large that a
    standard deviation of 1e-5 of the mean is tolerated: a smaller one is lost in the mean's own error.
    """
    name = "total" if name in ("aleatoric", "epistemic") and "total" in wanted else name
    size = _largest(wanted[name])
    for kind in ("covariance", "variance", "total"):
        mean = name.removesuffix(kind) + "mean"
        if name.endswith(kind) and mean in wanted:
            return max(size, TOLERANCE * _largest(wanted[mean]) ** 2)
    return size


def _largest(value: Tensor) -> float:
    finite = value[value.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def _error(found: Tensor, wanted: Tensor, scale: float) -> float:
    """The largest difference over the scale; infinite for other shapes and for lost numbers."""
    if found.shape != wanted.shape:
        return float("inf")
    if not wanted.is_floating_point():
        return float((found != wanted).any())
    finite = wanted.isfinite()  # what overflows in PyTorch may overflow differently
    if not found[finite].isfinite().all():
        return float("inf")
    if not finite.any():
        return 0.0
    return float((found - wanted)[finite].abs().max()) / max(scale, torch.finfo(wanted.dtype).tiny)


class _Rounded(fx.Interpreter):
    """Moves results at random by up to one unit in the last place: stochastic arithmetic (Vignes 1993).

    In sums the unit is that of the largest term. Nothing is computed in views, and whole numbers of whole
    numbers are exact: they stay as they are. No probability grows beyond 1.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.generator = torch.Generator().manual_seed(0)

    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        if not isinstance(n.target, OpOverload) or any(r.alias_info for r in n.target._schema.returns):
            return found
        given = [self.env[node] for node in n.all_input_nodes]
        if all(map(_is_whole, pytree.tree_leaves((given, found)))):
            return found
        is_sum, is_bounded = n.target.overloadpacket in _SUMS, n.target.overloadpacket in _BOUNDED

        def nudged(value: Tensor) -> Tensor:
            moved = self._nudged(value, is_sum)
            return moved.clamp(-1, 1) if is_bounded else moved

        return pytree.tree_map_only(Tensor, nudged, found)

    def _nudged(self, value: Tensor, is_sum: bool) -> Tensor:
        if not value.is_floating_point() or not value.numel():
            return value
        direction = torch.randint(-1, 2, value.shape, generator=self.generator).to(value)
        finite = value.nan_to_num(0.0, 0.0, 0.0)  # what overflowed is not rounded
        size = finite.abs().max() if is_sum else finite
        return torch.addcmul(value, size, direction, value=torch.finfo(value.dtype).eps)


def _is_whole(value: Any) -> bool:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return True
    return bool((value == value.round()).all())


def rounded(program: Program) -> Run:
    """Return the program as it might be rounded elsewhere, to see how much that matters."""
    module = program.exported.module(check_guards=False)

    @torch.no_grad()
    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(_Rounded(module).run(*tensors))

    return run
