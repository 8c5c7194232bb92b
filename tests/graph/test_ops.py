"""Groups of operators have the property that they are named after."""

import pytest
import torch

from momentprop.graph import ops

aten = torch.ops.aten
X = torch.linspace(-4, 4, 401, dtype=torch.float64)


@pytest.mark.parametrize("op", ops.MONOTONE, ids=str)
def test_monotone_functions_never_decrease(op):
    assert (op(X).diff() >= 0).all()


@pytest.mark.parametrize("op", ops.HOMOGENEOUS, ids=str)
def test_homogeneous_functions_scale_with_their_argument(op):
    more = (torch.tensor([0.3], dtype=torch.float64),) if op is aten.prelu.default else ()
    for scale in (0.0, 0.5, 3.0):
        torch.testing.assert_close(op(scale * X, *more), scale * op(X, *more))


ARGUMENTS = {
    aten.view.default: ([3, 2],),
    aten._unsafe_view.default: ([3, 2],),
    aten.reshape.default: ([3, 2],),
    aten.view_as.default: (torch.zeros(3, 2),),
    aten.reshape_as.default: (torch.zeros(3, 2),),
    aten.flatten.using_ints: (),
    aten.unflatten.int: (1, [3, 1]),
    aten.squeeze.dim: (0,),
    aten.squeeze.dims: ([0, 1],),
    aten.unsqueeze.default: (0,),
    aten.transpose.int: (0, 1),
    aten.swapaxes.default: (0, 1),
    aten.swapdims.default: (0, 1),
    aten.permute.default: ([1, 0],),
}


@pytest.mark.parametrize("op", ops.MOVES, ids=str)
def test_moves_keep_every_element_once(op):
    x = torch.arange(6).reshape(2, 3)
    moved = op(x, *ARGUMENTS.get(op, ()))
    assert sorted(moved.flatten().tolist()) == list(range(6))
    if op in ops.SAME_ORDER:
        assert moved.flatten().tolist() == list(range(6))


@pytest.mark.parametrize("op", ops.TRANSPOSES, ids=str)
def test_transposes_undo_themselves(op):
    x, arguments = torch.arange(6).reshape(2, 3), ARGUMENTS.get(op, ())
    assert torch.equal(op(op(x, *arguments), *arguments), x)


def test_pointwise():
    assert ops.is_pointwise(aten.tanh.default)
    assert ops.is_pointwise(aten.prelu.default)
    assert ops.is_pointwise(aten.special_i0.default)
    assert not ops.is_pointwise(aten.softmax.int)
    assert not ops.is_pointwise(aten.dropout.default)
    assert not ops.is_pointwise(torch.tanh)
