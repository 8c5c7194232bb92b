"""Programs for torch.onnx.export: decomposed where ONNX needs it, by torch where that is not enough."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from momentprop.exports.onnx_decompose import FunctionalProgram

aten = torch.ops.aten
TABLE = {op: torch.export.default_decompositions()[op] for op in (aten.square.default, aten.rsub.Scalar)}


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(self.linear(x)).square().detach_()
        return (1 - y).movedim(0, 1), y.reshape(-1, 2)


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.square()
        y[:, 0] = 1.0
        return y


def exported(module: nn.Module) -> ExportedProgram:
    return torch.export.export(module.eval(), (torch.randn(3, 4),), dynamic_shapes=({0: Dim.DYNAMIC},))


def operators(program: ExportedProgram) -> set[str]:
    return {str(n.target) for n in program.graph.nodes if n.op == "call_function"}


@pytest.mark.parametrize("batch", [2, 5])
@pytest.mark.parametrize("module", [Mixed(), InPlace()], ids=["functional", "in place"])
def test_the_function_is_the_same(module: nn.Module, batch: int) -> None:
    before = exported(module)
    program = FunctionalProgram.of(before)
    nodes = len(list(before.graph.nodes))
    after = program.run_decompositions(TABLE)
    x = torch.randn(batch, 4)
    torch.testing.assert_close(after.module()(x), module(x))
    assert len(list(before.graph.nodes)) == nodes  # the program given is as it was


def test_what_is_not_in_the_table_stays() -> None:
    after = FunctionalProgram.of(exported(Mixed())).run_decompositions(TABLE)
    assert isinstance(after, FunctionalProgram)
    assert {"aten.linear.default", "aten.reshape.default"} <= operators(after)
    assert not {"aten.square.default", "aten.rsub.Scalar", "aten.movedim.int"} & operators(after)
    assert "aten.batch_norm.default" not in operators(after)


def test_writing_in_place_is_left_to_torch() -> None:
    after = FunctionalProgram.of(exported(InPlace())).run_decompositions(TABLE)
    assert not isinstance(after, FunctionalProgram)
    assert not any(str(op).endswith("_.default") or "copy_" in str(op) for op in operators(after))


def test_sizes_are_computed_once() -> None:
    class Sized(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.square().movedim(0, 1).flatten(), (x + 1).unflatten(1, (2, 2)).flatten(0, 1)

    after = FunctionalProgram.of(exported(Sized())).run_decompositions(TABLE)
    assert sum(n.target is aten.sym_size.int for n in after.graph.nodes) == 1


def test_pooling_to_one_place_is_an_average() -> None:
    """torch writes it with strides set in place, which say nothing where there is one place."""

    class Pooled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.adaptive_avg_pool3d(x.reshape(-1, 4, 1, 1, 1).expand(-1, 4, 2, 2, 2), 1)

    program = exported(Pooled())
    op = aten.adaptive_avg_pool3d.default
    after = FunctionalProgram.of(program).run_decompositions({op: op.decompose})
    assert isinstance(after, FunctionalProgram)
    assert "aten.mean.dim" in operators(after)
    x = torch.randn(5, 4)
    torch.testing.assert_close(after.module()(x), Pooled()(x))


def test_expansions_that_write_in_place_are_functionalized() -> None:
    """torch's RMS norm adds epsilon in place."""

    class Normalized(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.rms_norm(x, (4,), eps=1e-3)

    op = aten.rms_norm.default
    after = FunctionalProgram.of(exported(Normalized())).run_decompositions({op: op.decompose})
    assert isinstance(after, FunctionalProgram)
    assert "aten.rsqrt.default" in operators(after)
    assert not any("_." in name for name in operators(after))
    x = torch.randn(5, 4)
    torch.testing.assert_close(after.module()(x), Normalized()(x))


def test_a_batch_of_one_is_not_squeezed_where_torch_decomposes_either() -> None:
    class Squeezed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x[:, :1].square()
            y[:, 0] += 1.0
            return y.squeeze().unsqueeze(1)

    after = FunctionalProgram.of(exported(Squeezed())).run_decompositions(TABLE)
    assert not isinstance(after, FunctionalProgram)
    assert "aten.squeeze.default" not in operators(after)
    assert after.module()(torch.randn(1, 4)).shape == (1, 1)
