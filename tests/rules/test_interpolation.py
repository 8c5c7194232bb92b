import pytest
import torch

from properties import LinearRule
from rule_settings import X, setting

aten = torch.ops.aten

SETTINGS = [
    setting(aten.upsample_linear1d.vec, X(1, 2, 3), [5], False, None),
    setting(aten.upsample_linear1d.vec, X(1, 1, 5), None, False, [0.5]),
    setting(aten.upsample_linear1d.default, X(1, 2, 3), [7], True, None),
    setting(aten.upsample_bilinear2d.vec, X(1, 1, 3, 2), [5, 4], False, None),
    setting(aten.upsample_bilinear2d.vec, X(1, 2, 2, 3), [4, 6], True, None),
    setting(aten.upsample_bilinear2d.vec, X(1, 1, 2, 3), None, False, [2.0, 1.5]),
    setting(aten.upsample_bilinear2d.vec, X(1, 1, 4, 5), None, False, [0.5, 0.4]),
    setting(aten.upsample_bilinear2d.default, X(1, 1, 3, 3), [2, 4], False),
    setting(aten.upsample_bicubic2d.vec, X(1, 1, 4, 5), [6, 3], False, None),
    setting(aten._upsample_bilinear2d_aa.vec, X(1, 1, 5, 4), [2, 3], False, None),
    setting(aten.upsample_bicubic2d.default, X(1, 1, 4, 5), [6, 3], True),
    setting(aten._upsample_bilinear2d_aa.default, X(1, 1, 5, 4), [2, 3], False),
    setting(aten._upsample_bicubic2d_aa.default, X(1, 1, 5, 4), [2, 3], False),
    setting(aten._upsample_bicubic2d_aa.vec, X(1, 1, 5, 4), [2, 3], False, None),
    setting(aten.upsample_trilinear3d.default, X(1, 1, 2, 3, 2), [3, 4, 2], True),
    setting(aten.upsample_trilinear3d.vec, X(1, 1, 2, 3, 2), [3, 4, 2], False, None),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
class TestInterpolation(LinearRule):
    pass
