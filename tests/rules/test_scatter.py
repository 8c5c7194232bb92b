import pytest
import torch

from properties import LinearRule
from rule_settings import C, X, setting

aten = torch.ops.aten


def index(*values):
    return C(len(values), make=lambda shape, generator: torch.tensor(values))


def rows(*values):
    return C(2, len(values), make=lambda shape, generator: torch.tensor([values, values[::-1]]))


def unpooled(shape, generator):
    return torch.tensor([[[[0, 3], [8, 11]]]])


SETTINGS = [
    setting(aten.scatter.src, X(2, 4), 1, rows(3, 0), X(2, 2)),
    setting(aten.scatter.src, C(2, 4), 1, rows(3, 0), X(2, 3)),
    setting(aten.scatter.src, X(2, 4), 1, rows(3, 0), C(2, 2)),
    setting(aten.scatter.value, X(2, 4), 1, rows(3, 0), 0.5),
    setting(aten.scatter_add.default, X(2, 4), 1, rows(3, 3), X(2, 2)),
    setting(aten.scatter_add.default, C(2, 4), 1, rows(3, 3, 0), X(2, 3)),
    setting(aten.index_add.default, X(2, 4), 1, index(1, 1, 0), X(2, 3)),
    setting(aten.index_add.default, C(2, 4), 1, index(1, 1, 0), X(2, 3), alpha=-2),
    setting(aten.index_copy.default, X(2, 4), 1, index(3, 0), X(2, 2)),
    setting(aten.index_put.default, X(4, 2), [index(3, 0)], X(2, 2)),
    setting(aten.index_put.default, C(4, 2), [index(3, 0)], X(2)),
    setting(aten.index_put.default, X(4, 2), [index(3, 3)], X(2, 2), True),
    setting(aten.max_unpool2d.default, X(1, 1, 2, 2), C(1, 1, 2, 2, make=unpooled), [4, 4]),
    setting(
        aten.max_unpool3d.default,
        X(1, 1, 1, 2, 2),
        C(1, 1, 1, 2, 2, make=lambda shape, generator: unpooled(shape, generator)[:, :, None]),
        [1, 4, 4],
        [1, 2, 2],
        [0, 0, 0],
    ),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
class TestScatter(LinearRule):
    pass
