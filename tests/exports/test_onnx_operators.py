"""In ONNX, formulas of few operators give what `gaussian` gives; pooling windows come from convolutions."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import momentprop as mp
from momentprop.gaussian import composites as operators
from momentprop.gaussian import normal as gaussian

onnx = pytest.importorskip("onnx", reason="comes with the extra onnx")
onnxruntime = pytest.importorskip("onnxruntime", reason="comes with the extra onnx")
pytestmark = pytest.mark.skipif(find_spec("onnxscript") is None, reason="comes with the extra onnx")

MEANS = torch.cat([torch.linspace(-8, 8, 65), torch.tensor([0.0, 1e3, -1e3, 1e-3, 1e30, -1e30])])
VARIANCES = torch.tensor([0.0, 1e-35, 1e-8, 1e-3, 1.0, 30.0, 1e8])


class Maximum(nn.Module):
    def forward(self, *moments: Tensor) -> tuple[Tensor, Tensor]:
        return operators.max_moments(*moments)


class Rectified(nn.Module):
    def forward(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        return operators.relu_moments(mean, variance)


def in_onnx_runtime(module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    from momentprop.exports.onnx_operators import short_translations

    program = torch.onnx.export(
        module, inputs, dynamo=True, verbose=False, custom_translation_table=short_translations()
    )
    session = onnxruntime.InferenceSession(
        program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    fed = {value.name: x.numpy() for value, x in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.as_tensor(v) for v in session.run(None, fed)]


def assert_near(found: list[Tensor], expected: tuple[Tensor, Tensor], spread: Tensor, size: Tensor) -> None:
    """To float32's rounding of what is added: the std and the mean, or the variance."""
    scales = (spread.sqrt() + size, 1e-15), (spread, 1e-30)
    for value, wanted, (scale, least) in zip(found, expected, scales, strict=True):
        assert value.isfinite().all()
        assert ((value - wanted).abs() <= 3e-6 * scale + least).all()
    assert (found[1] >= 0).all()


@pytest.mark.filterwarnings("ignore")
def test_relu() -> None:
    mean, variance = (t.reshape(-1).contiguous() for t in torch.meshgrid(MEANS, VARIANCES, indexing="ij"))
    found = in_onnx_runtime(Rectified(), mean, variance)
    wanted = gaussian.relu_moments(mean.double(), variance.double())
    assert_near(found, (wanted[0].float(), wanted[1].float()), variance, mean.abs())


@pytest.mark.filterwarnings("ignore")
def test_maximum_of_two() -> None:
    lowest = torch.finfo(torch.float32).min / 2  # padding
    grid = torch.meshgrid(
        torch.cat([MEANS[::4], torch.tensor([lowest])]), VARIANCES, MEANS[::5], VARIANCES, indexing="ij"
    )
    one, v_one, two, v_two = (t.reshape(-1).contiguous() for t in grid)
    found = in_onnx_runtime(Maximum(), one, v_one, two, v_two)
    wanted = gaussian.max_moments(*(t.double() for t in (one, v_one, two, v_two)))
    size = torch.maximum(one, two).abs()
    assert_near(found, (wanted[0].float(), wanted[1].float()), v_one + v_two, size)


class Skip(nn.Module):
    """A convolution that a pooling and something else read."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.conv, self.pool = nn.Dropout(0.3), nn.Conv2d(2, 4, 3, padding=1), nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.conv(self.drop(x))
        return self.pool(y).mean((2, 3)), y.mean((2, 3))


def pooling(convolution: nn.Module, pool: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Dropout(0.3), convolution, nn.ReLU(), pool, nn.Flatten(2))


# convolutions and slices in the file: variances are averages of rows of windows, in tier `fast`
CASES = {
    "same": (pooling(nn.Conv2d(2, 4, 3, padding=1), nn.MaxPool2d(2)), (8, 8), 4 + 2, 0),
    "odd sizes": (pooling(nn.Conv2d(2, 4, 3, padding=1), nn.MaxPool2d(2)), (9, 7), 2, 4 + 2),
    "windows of 3 x 2": (
        pooling(nn.Conv2d(2, 4, (5, 3), padding=(2, 1)), nn.MaxPool2d((3, 2))),
        (9, 6),
        6 + 3,
        0,
    ),
    "strides, groups": (
        pooling(nn.Conv2d(2, 4, 4, stride=2, padding=(3, 3), groups=2), nn.MaxPool2d(2)),
        (12, 12),
        4 + 2,
        0,
    ),
    "dilated": (
        pooling(nn.Conv2d(2, 4, 3, padding=2, dilation=2), nn.MaxPool2d(2)),
        (8, 8),
        4 + 1,  # means alone: neighbours share no inputs
        2,
    ),
    "no padding": (pooling(nn.Conv2d(2, 4, 3), nn.MaxPool2d(2)), (10, 10), 2, 4 + 2),
    "one dimension": (pooling(nn.Conv1d(2, 4, 3, padding=1), nn.MaxPool1d(2)), (8,), 2 + 1, 0),
    "overlapping windows": (pooling(nn.Conv2d(2, 4, 3, padding=1), nn.MaxPool2d(3, 2, 1)), (8, 8), 2, None),
    "skip connection": (Skip(), (8, 8), 2, 4 + 2),
}


@pytest.mark.parametrize(("case", "fidelity"), [("same", "paper"), *((c, "fast") for c in CASES)])
def test_windows_come_from_strided_convolutions(case: str, fidelity: str, tmp_path: Path) -> None:
    """Numbers are those of PyTorch in any case: `export_onnx` itself compares them."""
    model, sizes, convolutions, slices = CASES[case]
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, (nn.Conv1d, nn.Conv2d)):
            module.reset_parameters()
            nn.init.zeros_(module.bias)
    bnn = mp.convert(model.eval(), torch.randn(2, 2, *sizes), fidelity)
    mp.export_onnx(bnn, tmp_path / "model.onnx")
    graph = onnx.load(tmp_path / "model.onnx").graph
    kinds = Counter(node.op_type for node in graph.node)
    assert kinds["Conv"] == (8 if fidelity == "paper" else convolutions)  # of all elements' variances there
    assert kinds["Slice"] == slices or (slices is None and kinds["Slice"] > 0)
    assert {v.name for v in graph.initializer} <= {name for node in graph.node for name in node.input}


def test_outputs_in_the_tails_are_written_out(tmp_path: Path) -> None:
    """Short formulas would give 0; `export_onnx` sees that and takes others."""
    linear = nn.Linear(4, 3)
    bnn = mp.convert(nn.Sequential(nn.Dropout(0.3), linear, nn.ReLU()).eval(), torch.zeros(1, 4), "fast")
    with torch.no_grad():
        linear.weight.copy_(torch.eye(3, 4) * 0.2)
        linear.bias.fill_(-1.0)
    mp.export_onnx(bnn, tmp_path / "model.onnx")
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node)
    assert kinds["Erf"] == 0
    with torch.no_grad():
        linear.bias.fill_(0.1)
    mp.export_onnx(bnn, tmp_path / "model.onnx")
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node)
    assert kinds["Erf"] == 1
