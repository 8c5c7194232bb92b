import pytest
import torch
import torch.nn.functional as F

from momentprop.rules.windows import Windows

CASES = [
    ([2, 2], [], 0, 1, False),
    ([3, 2], [2, 1], [1, 0], [1, 2], False),
    ([3, 3], 2, 1, 1, True),
    ([2, 2], [3, 3], 0, 1, True),
]


@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation", "ceil"), CASES, ids=str)
def test_maxima_of_the_elements_are_those_of_pooling(kernel, stride, padding, dilation, ceil):
    x = torch.randn(2, 3, 7, 8)
    windows = Windows.of(x.shape[-2:], kernel, stride, padding, dilation, ceil)
    opened = windows.open(x, fill=(-torch.inf,))[0]
    parts = torch.stack([windows.close(windows.element(opened, p)) for p in windows.positions])
    expected = F.max_pool2d(x, kernel, stride or None, padding, dilation, ceil)
    assert torch.equal(parts.amax(0), expected)


@pytest.mark.parametrize(
    ("case", "tile"),
    [
        ((2, [], 0, 1, False), True),
        ((2, 1, 0, 1, False), False),
        ((2, [], 1, 1, False), False),
        ((2, 2, 0, 2, False), False),
        ((3, [], 0, 1, True), False),  # the last windows reach beyond the input
    ],
    ids=str,
)
def test_windows_that_tile(case, tile):
    assert Windows.of((8, 8), *case).tile is tile


def test_tiled_values_lie_where_their_elements_are():
    windows = Windows.of((4, 6), 2, [], 0, 1, False)
    x = torch.randn(2, 3, 4, 6)
    opened = windows.open(x, fill=(0.0,))[0]
    tiled = windows.tiled([windows.element(opened, p) for p in windows.positions])
    assert torch.equal(tiled.reshape(2, 4, 6, 3), x.movedim(1, -1))
