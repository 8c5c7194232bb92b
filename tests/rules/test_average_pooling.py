import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from momentprop.rules.average_pooling import _summed_back
from momentprop.rules.windows import Windows
from properties import LinearRule
from rule_settings import X, setting

aten = torch.ops.aten

SETTINGS = [
    setting(aten.avg_pool1d.default, X(2, 2, 6), [2]),
    setting(aten.avg_pool1d.default, X(2, 7), [3], [2], [1]),
    setting(aten.avg_pool1d.default, X(1, 2, 7), [3], [2], [1], True),
    setting(aten.avg_pool1d.default, X(1, 2, 7), [3], [2], [1], False, False),
    setting(aten.avg_pool1d.default, X(1, 2, 8), [3], [2], [1], True, False),
    setting(aten.avg_pool1d.default, X(1, 2, 8), [3], [], [0], True),
    setting(aten.avg_pool2d.default, X(1, 2, 4, 4), [2, 2]),
    setting(aten.avg_pool2d.default, X(1, 2, 2, 3), [2, 3]),
    setting(aten.avg_pool2d.default, X(1, 2, 2, 3), 100_000, [], 0, True),
    setting(aten.avg_pool2d.default, X(2, 5, 4), [2, 3]),
    setting(aten.avg_pool2d.default, X(2, 4, 4), 2, 1, 1),
    setting(aten.avg_pool2d.default, X(1, 2, 5, 4), [3, 3], [2, 1], [1, 1]),
    setting(aten.avg_pool2d.default, X(1, 2, 5, 4), [3, 3], [2, 1], [1, 1], False, False),
    setting(aten.avg_pool2d.default, X(1, 2, 5, 6), [3, 2], [2, 3], [1, 1], True),
    setting(aten.avg_pool2d.default, X(1, 2, 5, 6), [3, 2], [2, 3], [1, 1], True, False),
    setting(aten.avg_pool2d.default, X(1, 1, 4, 4), [3, 3], [2, 2], [0, 0], True, True),
    setting(aten.avg_pool2d.default, X(1, 1, 4, 4), [2, 2], [2, 2], [1, 1], False, True, 3),
    setting(aten.avg_pool2d.default, X(1, 1, 5, 4), [2, 2], [2, 2], [0, 0], True, False, 5),
    setting(aten.avg_pool3d.default, X(1, 2, 2, 2, 4), [2, 2, 2]),
    setting(aten.avg_pool3d.default, X(1, 3, 3, 3), [2, 2, 2], [1, 1, 1], [1, 0, 1], False, False),
    setting(aten.avg_pool3d.default, X(1, 1, 3, 3, 4), 2, 2, 1, True, False),
    setting(aten.avg_pool3d.default, X(1, 1, 3, 3, 4), 2, 2, 0, True, True, 7),
    setting(aten.adaptive_avg_pool1d.default, X(2, 2, 6), [3]),
    setting(aten.adaptive_avg_pool1d.default, X(2, 7), [3]),
    setting(aten.adaptive_avg_pool1d.default, X(1, 1, 3), [5]),
    setting(aten.adaptive_avg_pool2d.default, X(1, 2, 4, 5), [1, 1]),
    setting(aten.adaptive_avg_pool2d.default, X(2, 5, 4), [3, 2]),
    setting(aten.adaptive_avg_pool2d.default, X(1, 1, 5, 7), [2, 3]),
    setting(aten.adaptive_avg_pool2d.default, X(1, 1, 3, 4), [5, 4]),
    setting(aten.adaptive_avg_pool3d.default, X(1, 1, 2, 3, 5), [1, 2, 3]),
    setting(aten.adaptive_avg_pool3d.default, X(1, 2, 2, 4), [2, 1, 2]),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
class TestAveragePooling(LinearRule):
    pass


def test_samples_of_a_vmap_share_the_kernel_of_sums() -> None:
    """Otherwise there is one group of the convolution for every sample, of which ONNX has a fixed number."""
    windows = Windows.of((6,), [2], [2], 0, 1, False)

    def back(cotangent: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return _summed_back(cotangent, x, windows)

    cotangent, x = torch.randn(5, 2, 3, 3), torch.randn(5, 3, 6)
    graph = make_fx(torch.vmap(back))(cotangent, x).graph
    [convolution] = graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    assert convolution.args[-1] == 1  # groups
    torch.testing.assert_close(torch.vmap(back)(cotangent, x)[1], back(cotangent[1], x[1]))
