"""Networks for any batch size where torch.vmap fixes it: numbers that follow the batch are found out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import momentprop as mp
from momentprop.engine.per_sample import PerSample
from momentprop.lowering.flat_export import export_flat
from momentprop.lowering.free_batch import with_free_batch
from momentprop.network import inside


class Shared(nn.Module):
    """Noise that all samples share, and operators in which torch.vmap fixes the size of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(4, 8))
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([self.norm(x), x[:, :1]], 1)[:, 1:] + F.dropout(self.positions, 0.1, self.training)
        order = torch.arange(3, -1, -1).reshape(1, 4, 1).expand(x.shape[0], 4, 8)
        return self.out(y.gather(1, order).mean(1))


@pytest.mark.parametrize("size", [1, 2, 5, 97])
def test_networks_with_shared_noise_freeze_for_any_batch(size: int) -> None:
    torch.manual_seed(0)
    bnn = mp.convert(Shared().eval(), torch.randn(3, 4, 8))
    assert isinstance(inside(bnn).built.program, PerSample)
    frozen, x = bnn.freeze(), torch.randn(size, 4, 8)
    torch.testing.assert_close(frozen(x).mean, bnn(x).mean)
    torch.testing.assert_close(frozen(x).covariance, bnn(x).covariance)


class Sized(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> tuple[Tensor]:
        return (self.function(*tensors),)  # type: ignore[operator]


def test_numbers_are_linear_functions_of_the_batch() -> None:
    def function(x: Tensor, table: Tensor) -> Tensor:
        n = x.shape[0]
        return (x.reshape(3 * n, 2)[: 3 * n - 1].sum() + torch.arange(n).sum()) * table

    tensors = torch.randn(97, 6), torch.randn(4)
    program = export_flat(with_free_batch(Sized(function), tensors, [{0: 97}, None]), tensors, [None, None])
    torch.testing.assert_close(program.module()(*tensors)[0], function(*tensors))
    module = with_free_batch(Sized(function), tensors, [{0: 97}, None])
    few = torch.randn(5, 6), tensors[1]
    torch.testing.assert_close(module(*few)[0], function(*few))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * x.shape[0] ** 2,
        lambda x: x + 1 if x.shape[0] % 2 else x - 1,
        lambda x: x.sum(0) if x.shape[0] > 90 else (x + 1).sum(0),
    ],
    ids=["not linear", "parity", "other operators"],
)
def test_what_depends_on_the_batch_otherwise_is_refused(function: object) -> None:
    try:
        module = with_free_batch(Sized(function), [torch.randn(97, 6)], [{0: 97}])
    except ValueError:
        return
    few = torch.randn(6, 6)  # two sizes cannot tell everything, but they must not be told wrong
    torch.testing.assert_close(module(few)[0], function(few))  # type: ignore[operator]
