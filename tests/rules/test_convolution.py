import pytest
import torch

from properties import LinearRule
from rule_settings import C, X, reason_of, setting

aten = torch.ops.aten

SETTINGS = [
    setting(aten.conv1d.default, X(2, 2, 7), C(3, 2, 3), C(3)),
    setting(aten.conv1d.default, X(2, 2, 7), C(3, 2, 3)),
    setting(aten.conv1d.default, X(2, 7), C(3, 2, 2), None, [2], [1], [3]),
    setting(aten.conv1d.padding, X(2, 2, 7), C(3, 2, 3), C(3), [1], "same"),
    setting(aten.conv1d.padding, X(2, 2, 7), C(3, 2, 2), None, [2], "valid", [2]),
    setting(aten.conv2d.default, X(2, 2, 5, 5), C(3, 2, 3, 3), C(3)),
    setting(aten.conv2d.default, X(2, 5, 5), C(3, 2, 3, 3), C(3)),
    setting(aten.conv2d.default, X(1, 2, 5, 6), C(3, 2, 3, 2), C(3), [2, 1]),
    setting(aten.conv2d.default, X(1, 2, 4, 5), C(3, 2, 3, 3), None, [2, 2], [1, 2]),
    setting(aten.conv2d.default, X(1, 2, 5, 6), C(3, 2, 2, 3), C(3), [1, 1], [1, 0], [2, 2]),
    setting(aten.conv2d.default, X(1, 4, 4, 4), C(6, 2, 3, 3), C(6), [1, 1], [1, 1], [1, 1], 2),
    setting(aten.conv2d.default, X(1, 4, 4, 4), C(4, 1, 3, 3), None, [1, 1], [0, 0], [1, 1], 4),
    # an even kernel is padded on one side more than on the other
    setting(aten.conv2d.padding, X(1, 2, 4, 5), C(3, 2, 2, 4), C(3), [1, 1], "same"),
    setting(aten.conv2d.padding, X(1, 2, 5, 5), C(3, 2, 3, 3), C(3), [1, 1], "same", [2, 1]),
    setting(aten.conv2d.padding, X(1, 2, 5, 5), C(2, 1, 3, 3), None, [2, 2], "valid", [1, 1], 2),
    setting(aten.conv3d.default, X(1, 2, 3, 4, 3), C(2, 2, 2, 2, 2), C(2)),
    setting(aten.conv3d.default, X(2, 3, 4, 3), C(2, 1, 2, 3, 2), C(2), [1, 2, 1], [1, 1, 0], [1, 1, 2], 2),
    setting(aten.conv3d.padding, X(1, 1, 3, 3, 3), C(2, 1, 3, 2, 1), C(2), [1, 1, 1], "same"),
    setting(aten.convolution.default, X(1, 2, 6), C(3, 2, 3), C(3), [2], [1], [1], False, [0], 1),
    setting(
        aten.convolution.default, X(1, 2, 4, 4), C(2, 1, 3, 3), C(2), [1, 1], [1, 1], [1, 1], False, [0, 0], 2
    ),
    setting(
        aten.convolution.default, X(1, 2, 3, 3), C(2, 3, 3, 3), C(3), [2, 2], [1, 1], [1, 1], True, [1, 1], 1
    ),
    setting(aten.conv_transpose1d.default, X(2, 2, 4), C(2, 3, 3), C(3)),
    setting(aten.conv_transpose1d.default, X(2, 4), C(2, 2, 3), C(4), [3], [1], [1], 2, [2]),
    setting(aten.conv_transpose2d.input, X(1, 2, 3, 3), C(2, 3, 3, 3), C(3)),
    setting(aten.conv_transpose2d.input, X(1, 2, 3, 3), C(2, 3, 2, 3), None, [2, 2], [1, 0], [1, 0]),
    setting(aten.conv_transpose2d.input, X(2, 3, 3), C(2, 1, 2, 2), C(2), [2, 1], [0, 1], [1, 0], 2, [1, 2]),
    setting(aten.conv_transpose3d.input, X(1, 2, 2, 2, 3), C(2, 2, 2, 2, 2), C(2)),
    setting(
        aten.conv_transpose3d.input,
        X(1, 2, 2, 2, 2),
        C(2, 1, 2, 3, 2),
        C(2),
        [2, 1, 2],
        [1, 1, 0],
        [1, 0, 0],
        2,
        [1, 1, 2],
    ),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
class TestConvolution(LinearRule):
    pass


@pytest.mark.parametrize("op", sorted({s.op for s in SETTINGS}, key=str), ids=str)
def test_random_weight_is_refused(op):
    example = next(s for s in SETTINGS if s.op is op)
    assert "weight is random" in reason_of(example, "weight")
    assert "bias is random" in reason_of(example, "input", "bias")
