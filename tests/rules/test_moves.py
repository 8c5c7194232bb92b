"""The transposed maps that are spelled out, against those found by the elements' positions."""

import inspect
from typing import Any

import pytest
import torch
from test_shape import CAST
from test_shape import SETTINGS as SHAPES

from momentprop.moments import Moments
from momentprop.rules import moves
from momentprop.rules.families import by_position
from rule_settings import C, Setting, X, setting

aten = torch.ops.aten


def transposed_map(setting: Setting) -> Any:
    """The function of moves.py that transposes a setting's operator, if there is one."""
    function = inspect.getclosurevars(setting.rule.function).nonlocals.get("transposed")
    return function if getattr(function, "__module__", "") == moves.__name__ else None


# Beside those that the rules of shape.py are tested with: corners of the arguments' ranges.
SETTINGS = [
    setting(aten.permute.default, X(2, 3, 4), [-1, 0, 1]),
    setting(aten.permute.default, X(2, 3, 4, 5), [2, 0, 3, 1]),
    setting(aten.permute.default, X(3), [0]),
    setting(aten.transpose.int, X(2, 3, 4), -1, 0),
    setting(aten.transpose.int, X(2, 3, 4), 1, 1),
    setting(aten.transpose.int, X(3), 0, -1),
    setting(aten.t.default, X(3)),
    setting(aten.t.default, X(3, 2)),
    setting(aten.expand.default, X(2, 1, 3), [2, 4, -1]),
    setting(aten.expand.default, X(3), [4, 2, 3]),
    setting(aten.expand.default, X(1, 1), [5, 2, 3]),
    setting(aten.expand.default, X(1), [1]),
    setting(aten.broadcast_to.default, X(1, 3), [2, 2, 3]),
    setting(aten.expand_as.default, X(1, 3), C(2, 2, 3)),
    setting(aten.slice.Tensor, X(5, 2)),
    setting(aten.slice.Tensor, X(5, 2), 0, 1, 4),
    setting(aten.slice.Tensor, X(5, 2), 0, 1, 2**62),
    setting(aten.slice.Tensor, X(5, 2), 0, -3, -1),
    setting(aten.slice.Tensor, X(5, 2), 0, -9, 3),
    setting(aten.slice.Tensor, X(2, 7), 1, 0, 7, 2),
    setting(aten.slice.Tensor, X(2, 7), 1, 1, 6, 3),
    setting(aten.slice.Tensor, X(2, 7), -1, 6, 7, 4),
    setting(aten.slice.Tensor, X(2, 7), -1, None, None, 5),
    setting(aten.slice.Tensor, X(2, 7, 3), 1, -5, None, 2),
    setting(aten.slice.Tensor, X(4, 2), 0, 3, 2),
    setting(aten.slice.Tensor, X(4, 2), 0, 9, 12),
    setting(aten.narrow.default, X(5, 2), 0, 1, 3),
    setting(aten.narrow.default, X(5, 2), 0, -2, 2),
    setting(aten.narrow.default, X(2, 5), -1, 4, 1),
    setting(aten.narrow.default, X(2, 5), 1, 5, 0),
    setting(aten.select.int, X(5, 2), 0, 0),
    setting(aten.select.int, X(5, 2), 0, -1),
    setting(aten.select.int, X(2, 5, 3), -2, 3),
    setting(aten.select.int, X(4, 1), 0, 2),
    setting(aten.cat.default, [X(2, 3), X(2, 1)], -1),
    setting(aten.cat.default, [C(1, 3), X(2, 3), C(3, 3), X(1, 3)]),
    setting(aten.cat.default, [X(2, 3), C(0), X(1, 3)]),
    setting(aten.cat.default, [X(2)]),
    setting(aten.stack.default, [X(2, 3), C(2, 3), X(2, 3)], -1),
    setting(aten.stack.default, [X(3), X(3)], 1),
    setting(aten.split.Tensor, X(7, 2), 3),
    setting(aten.split.Tensor, X(2, 7), 3, -1),
    setting(aten.split_with_sizes.default, X(2, 6), [1, 3, 2], 1),
    setting(aten.split_with_sizes.default, X(2, 6), [0, 6], 1),
    setting(aten.split.sizes, X(6, 2), [5, 1]),
    setting(aten.chunk.default, X(7, 2), 3),
    setting(aten.chunk.default, X(2, 5), 4, -1),
    setting(aten.unbind.int, X(3, 2)),
    setting(aten.unbind.int, X(3, 2), -1),
]


def transposed(one: Setting, args: tuple[Any, ...], index: int, rows: torch.Tensor) -> list[torch.Tensor]:
    """What `by_position` makes of a cotangent of one of the outputs."""
    out = one.rule(*args, **one.kwargs)
    cotangent: Any = rows
    if isinstance(out, (list, tuple)):
        cotangent = [rows if i == index else None for i in range(len(out))]
    return list(by_position(one.op, 1)(out, *args, **one.kwargs)(cotangent))


CASES = SETTINGS + CAST + [s for s in SHAPES if transposed_map(s)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_is_the_map_by_position(case: Setting) -> None:
    args = case.arguments()
    part = case.linear_part(args)
    for index, out in enumerate(part.outputs):
        rows = torch.randn(3, *out.shape, dtype=torch.float64)
        mine, other = part.pulled(rows, index), transposed(case, args, index, rows)
        assert len(mine) == len(other) > 0
        for one, two in zip(mine, other, strict=True):
            assert one.shape == two.shape
            torch.testing.assert_close(one, two, rtol=0, atol=1e-14)


def test_every_map_of_the_file_is_tested() -> None:
    public = {
        name
        for name, value in vars(moves).items()
        if callable(value) and value.__module__ == moves.__name__ and not name.startswith("_")
    }
    tested = {transposed_map(case) for case in CASES} - {None}
    assert public == {function.__name__ for function in tested}


@pytest.mark.parametrize(
    "case", [s for s in SETTINGS if s.op in (aten.split.Tensor, aten.chunk.default, aten.unbind.int)], ids=str
)
def test_parts_that_nothing_depends_on_count_as_zero(case: Setting) -> None:
    """Several parts at once, one of them missing: the sum of the parts alone."""
    part = case.linear_part(case.arguments())
    rows: list[Any] = [torch.randn(2, *o.shape, dtype=torch.float64) for o in part.outputs]
    rows[1] = None
    (together,) = part.pull(rows)
    alone = [part.pulled(r, i)[0] for i, r in enumerate(rows) if r is not None]
    torch.testing.assert_close(together, sum(alone))


def test_cast_goes_back_to_the_inputs_type() -> None:
    x = Moments(torch.randn(2, 3), 1.0)
    out = x.to(torch.float64)
    (back,) = moves.cast(out, x, torch.float64)(torch.ones(4, 2, 3, dtype=torch.float64))
    assert back.dtype == torch.float32
    part = setting(aten.type_as.default).rule.propagate(torch.ones(2, 3), x).linearize()
    assert part.map.pull(torch.ones(4, 2, 3)) == [None]  # it only lends its type
