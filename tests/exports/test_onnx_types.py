"""Operands of different types in ONNX: promoted as torch promotes them, and nothing else is interpreted."""

from __future__ import annotations

from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import momentprop as mp
from momentprop.exports.onnx_decompose import FunctionalProgram
from momentprop.exports.onnx_types import PromotedModule

aten = torch.ops.aten

FUNCTIONS = {
    "whole number": lambda x: x * 2 + 1,
    "whole number first": lambda x: torch.where(x > 0, 1, x),
    "mask": lambda x: x * (x > 0),
    "integers": lambda x: x + torch.arange(4),
    "division of integers": lambda x: x + torch.arange(1, 5) / 3,
    "root of integers": lambda x: x + torch.arange(4).sqrt(),
    "integers and a fraction": lambda x: x + torch.arange(4) * 0.5,
    "float64": lambda x: x.double() + x,
    "comparison": lambda x: (x > torch.arange(4)).float(),
    "concatenation": lambda x: torch.cat([x, torch.arange(4).expand(x.shape[0], 4)], 1),
    "sum of a mask": lambda x: (x > 0).sum(1),
}


class Function(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Any:
        return FUNCTIONS[self.name](x)


def exported(module: nn.Module) -> ExportedProgram:
    x = torch.randn(3, 4)
    return torch.export.export(module, (x,), dynamic_shapes=({0: Dim.DYNAMIC},))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_files_compute_what_torch_computes(name: str, tmp_path: Any) -> None:
    program = FunctionalProgram.of(exported(Function(name)))
    path = str(tmp_path / "function.onnx")
    torch.onnx.export(program, f=path, dynamo=True, verbose=False, external_data=False, optimize=False)
    x = torch.randn(5, 4)
    session = onnxruntime.InferenceSession(path)
    [found] = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    expected = FUNCTIONS[name](x)
    assert found.dtype == expected.numpy().dtype
    torch.testing.assert_close(torch.as_tensor(found), expected)


def test_only_operators_with_mixed_operands_are_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.onnx._internal.fx.passes import type_promotion

    class Mixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = (x * 2 + 1).exp().clamp_min(0) - 3
            return y * (y > 1)

    seen: list[str] = []
    run = type_promotion._TypePromotionInterpreter.run_node

    def noted(self: Any, node: torch.fx.Node) -> Any:
        seen.append(str(node.target))
        return run(self, node)

    monkeypatch.setattr(type_promotion._TypePromotionInterpreter, "run_node", noted)
    after = FunctionalProgram.of(exported(Mixed())).run_decompositions({})
    assert isinstance(after.graph_module, PromotedModule)
    assert seen == ["aten.mul.Tensor"]  # that of the mask
    x = torch.randn(5, 4)
    torch.testing.assert_close(after.module()(x), Mixed()(x))


def test_converted_networks_are_not_interpreted_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("the whole program is decomposed")

    monkeypatch.setattr(ExportedProgram, "run_decompositions", refused)
    layers = nn.Linear(4, 8), nn.GELU(), nn.RMSNorm(8), nn.Dropout(0.2), nn.Linear(8, 2), nn.Softmax(-1)
    bnn = mp.convert(nn.Sequential(*layers).eval(), torch.zeros(1, 4))
    mp.export_onnx(bnn, tmp_path / "model.onnx")
