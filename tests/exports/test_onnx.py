"""mp.export_onnx: ONNX Runtime gives what PyTorch gives, under the documented names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import momentprop as mp
from momentprop.exports import verification
from momentprop.exports.heads import head_of
from momentprop.exports.program import program_of
from momentprop.exports.verification import rounded
from small import mlp

onnx = pytest.importorskip("onnx", reason="comes with the extra onnx")
onnxruntime = pytest.importorskip("onnxruntime", reason="comes with the extra onnx")
pytestmark = pytest.mark.skipif(find_spec("onnxscript") is None, reason="comes with the extra onnx")

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def tiny_cnn() -> nn.Sequential:
    layers = (nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.3), nn.Flatten(), nn.Linear(27, 3))
    return nn.Sequential(*layers)


def run(path: Path, *inputs: Tensor) -> dict[str, Tensor]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    fed = {value.name: x.numpy() for value, x in zip(session.get_inputs(), inputs, strict=True)}
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, map(torch.as_tensor, session.run(None, fed)), strict=True))


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("fidelity", ["paper", "fast", "accurate"])
def test_moments(fidelity: str, tmp_path: Path) -> None:
    bnn = mp.convert(tiny_cnn(), torch.randn(2, 1, 8, 8), fidelity)
    state = torch.get_rng_state()
    metadata = mp.export_onnx(bnn, tmp_path / "model.onnx", note="a note")
    assert torch.equal(torch.get_rng_state(), state)  # the caller's random numbers are left alone
    assert max(metadata.options["errors"].values()) < 1e-5
    assert metadata.options["opset"] == 20
    holds_nothing_twice(tmp_path / "model.onnx")
    x = torch.randn(5, 1, 8, 8)
    found, wanted = run(tmp_path / "model.onnx", x), bnn(x)
    names = ["mean", "variance", "covariance"] if fidelity == "accurate" else ["mean", "variance"]
    assert list(found) == names
    for name in names:
        close(found[name], getattr(wanted, name))
    again = mp.inspect(tmp_path / "model.onnx")
    assert again == metadata
    assert again.note == "a note"
    assert again.inputs[0].shape == ("batch", 1, 8, 8)


def holds_nothing_twice(path: Path) -> None:
    nodes = onnx.load(path).graph.node
    calls = [(n.op_type, *n.input, *sorted(a.SerializeToString() for a in n.attribute)) for n in nodes]
    assert len(set(calls)) == len(calls)
    assert not {"Identity", "Constant"} & {n.op_type for n in nodes}


@pytest.mark.parametrize("classes", [1, 2, 3])
def test_finished_classification(classes: int, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, classes))
    bnn = mp.convert(model, X)
    mp.export_onnx(bnn, tmp_path / "model.onnx", "classification")
    x = torch.randn(40, 4)
    found, wanted = run(tmp_path / "model.onnx", x), mp.classify(bnn(x))
    assert list(found) == ["probs", "total", "aleatoric", "epistemic"]
    close(found["probs"], wanted.probs)
    close(found["total"], wanted.total)
    assert wanted.aleatoric is not None
    atol = 1e-5 * float(wanted.total.max())
    torch.testing.assert_close(found["aleatoric"], wanted.aleatoric, rtol=0, atol=atol)
    torch.testing.assert_close(found["epistemic"], wanted.epistemic, rtol=0, atol=atol)


def test_finished_classification_behind_the_networks_own_softmax(tmp_path: Path) -> None:
    """The file computes from the logits, as mp.classify does; closed formulas have no mutual information."""
    bnn = mp.convert(nn.Sequential(mlp(), nn.Softmax(-1)), X)
    mp.export_onnx(bnn, tmp_path / "model.onnx", "classification", method="paper")
    found = run(tmp_path / "model.onnx", X)
    assert list(found) == ["probs", "total"]
    close(found["probs"], mp.classify(bnn(X), "paper").probs)


def test_finished_regression(tmp_path: Path) -> None:
    bnn = mp.convert(mlp(), X)
    options: dict[str, Any] = {"noise": 0.2}
    metadata = mp.export_onnx(bnn, tmp_path / "model.onnx", "regression", level=0.9, **options)
    assert metadata.options["level"] == 0.9
    found, wanted = run(tmp_path / "model.onnx", X), mp.regress(bnn(X), **options)
    names = ["mean", "std", "total", "aleatoric", "epistemic"]
    assert list(found) == [*names, "lower", "upper"]
    for name in names:
        close(found[name], getattr(wanted, name))
    for name, value in zip(("lower", "upper"), wanted.interval(0.9), strict=True):
        close(found[name], value)


def test_a_regression_without_noise_says_so(tmp_path: Path) -> None:
    bnn = mp.convert(mlp(), X)
    with pytest.warns(UserWarning, match="fit_noise"):
        mp.export_onnx(bnn, tmp_path / "model.onnx", "regression", verify=False)
    close(run(tmp_path / "model.onnx", X)["std"], bnn(X).std)


def test_noise_of_every_output(tmp_path: Path) -> None:
    bnn = mp.convert(mlp(), X)
    options: dict[str, Any] = {"noise": torch.tensor([0.25, 0.5, 2.0])}
    metadata = mp.export_onnx(bnn, tmp_path / "model.onnx", "regression", **options)
    assert metadata.options["noise"] == [0.25, 0.5, 2.0]
    assert mp.inspect(tmp_path / "model.onnx") == metadata
    close(run(tmp_path / "model.onnx", X)["std"], mp.regress(bnn(X), **options).std)


class Recurrent(nn.Module):
    layer: type[nn.RNNBase] = nn.LSTM

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.dropout = nn.Embedding(11, 6), nn.Dropout(0.2)
        self.recurrent, self.head = self.layer(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.recurrent(self.dropout(self.embed(tokens)))[0][:, -1])


class Simple(Recurrent):
    layer = nn.RNN


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


TOKENS, VECTORS = torch.arange(4).reshape(2, 2), torch.ones(2, 3, 8)


@pytest.mark.parametrize(
    ("build", "example", "fidelity"),
    [
        (Simple, TOKENS, "fast"),
        (Recurrent, TOKENS, "accurate"),  # whose forward pass is that of `fast`
        (Attention, VECTORS, "fast"),
        (Attention, VECTORS, "accurate"),
    ],
    ids=["rnn-fast", "lstm-accurate", "attention-fast", "attention-accurate"],
)
def test_recurrent_networks_and_attention(
    build: type[nn.Module], example: Tensor, fidelity: str, tmp_path: Path
) -> None:
    """Checked by the export itself; the batch is free there too."""
    bnn = mp.convert(build().eval(), example, fidelity)
    metadata = mp.export_onnx(bnn, tmp_path / "model.onnx")
    assert max(metadata.options["errors"].values()) < 1e-5
    x = example.repeat(3, *[1] * (example.dim() - 1))[:5]
    found = run(tmp_path / "model.onnx", x)
    close(found["variance"], bnn(x).variance)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor, mean: Tensor) -> dict[str, Tensor]:
        noisy = self.body(x)
        return {"logits": noisy + mean, "same": noisy + mean, "given": x, "mean": noisy.mean(1)}


def test_several_outputs_and_names_that_clash(tmp_path: Path) -> None:
    bnn = mp.convert(Two(), (X, X[:, :3]))
    mp.export_onnx(bnn, tmp_path / "all.onnx")
    found = run(tmp_path / "all.onnx", X, X[:, :3])
    assert list(found)[:3] == ["logits_mean", "logits_variance", "logits_covariance"]
    wanted = bnn(X, X[:, :3])
    for name in ("logits", "same", "given", "mean"):
        close(found[f"{name}_mean"], wanted[name].mean)
        close(found[f"{name}_variance"], wanted[name].variance)
    mp.export_onnx(bnn, tmp_path / "one.onnx", select="logits", verify=False)
    description = mp.inspect(tmp_path / "one.onnx")
    assert description.options["select"] == "logits"
    session = onnxruntime.InferenceSession(tmp_path / "one.onnx", providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    assert names == [port.name for port in description.inputs] == ["x", "mean_input"]
    one = run(tmp_path / "one.onnx", X, X[:, :3])
    assert list(one) == ["mean", "variance", "covariance"]
    close(one["mean"], found["logits_mean"])
    mp.export_onnx(bnn, tmp_path / "classes.onnx", "classification", verify=False)
    close(run(tmp_path / "classes.onnx", X, X[:, :3])["probs"], mp.classify(wanted["logits"]).probs)
    with pytest.raises(mp.InputError, match="no output 'other'"):
        mp.export_onnx(bnn, tmp_path / "no.onnx", select="other")


def test_uncertain_inputs_are_two(tmp_path: Path) -> None:
    bnn = mp.convert(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), mp.Moments(X, 0.1))
    mp.export_onnx(bnn, tmp_path / "model.onnx")
    found = run(tmp_path / "model.onnx", X, torch.full_like(X, 0.3))
    close(found["variance"], bnn(mp.Moments(X, 0.3)).variance)


def test_an_uncertain_input_keeps_its_two_names_together(tmp_path: Path) -> None:
    class Named(nn.Module):
        def forward(self, mean: Tensor, mean_input: Tensor) -> Tensor:
            return (mean * 2 + mean_input).relu()

    bnn = mp.convert(Named(), (mp.Moments(X, 0.1), X))
    metadata = mp.export_onnx(bnn, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    assert names == ["mean_input_", "mean_input__variance", "mean_input"]
    assert [port.name for port in metadata.inputs] == ["mean_input_", "mean_input"]


def test_a_saved_network_can_be_exported(tmp_path: Path) -> None:
    bnn = mp.convert(mlp(), X)
    mp.save(bnn, tmp_path / "model.pt2", note="from a file")
    metadata = mp.export_onnx(mp.load(tmp_path / "model.pt2"), tmp_path / "model.onnx", opset=18)
    assert (metadata.note, metadata.fidelity) == ("from a file", "accurate")
    close(run(tmp_path / "model.onnx", X)["covariance"], bnn(X).covariance)


def test_a_mismatch_raises_with_figures_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "TOLERANCE", 1e-12)
    monkeypatch.setattr(verification, "_MARGIN", 0)
    with pytest.raises(mp.DisagreementError, match=r"variance, batch 1, .*: off by \d\.\de-\d\d of its"):
        mp.export_onnx(mp.convert(mlp(), X), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("factor", "agrees"), [(1 + 3e-6, True), (1 + 3e-5, False), (float("nan"), False)])
def test_errors_count_unless_rounding_explains_them(factor: float, agrees: bool) -> None:
    """What is rounding and nothing else is not held against a file, and told apart."""

    class Cancelling(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            lost = torch.dropout(x * 1e-6, 0.5, True) + 1
            return lost - 1, torch.dropout(x, 0.5, True)

    bnn = mp.convert(Cancelling(), X, "paper")  # the others see that nothing is added
    program = program_of(bnn, head_of("moments", {}, None))
    lost, kept = (port.name for port in program.outputs if port.name.endswith("mean"))

    def run_it(tensors: Any) -> list[Tensor]:
        found = dict(zip([port.name for port in program.outputs], program.flat(*tensors), strict=True))
        found[lost] = found[lost] + 1e-7 * tensors[0].abs().clamp_max(1)
        found[kept] = found[kept] * factor
        return list(found.values())

    if agrees:
        found = verification.verify(run_it, program)
        assert set(found.rounding) == {lost}
        assert found.errors[lost] == max(found.rounding[lost].values()) > 1e-5
        assert 1e-6 < found.errors[kept] < 1e-5
    else:
        with pytest.raises(mp.DisagreementError, match=kept) as raised:
            verification.verify(run_it, program)
        assert lost not in str(raised.value)


def test_rounding_is_told_beside_infinities() -> None:
    """A mask of minus infinity must not turn the largest term of a sum, and so all rounding, into NaN."""

    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.dropout(x, 0.5, True) @ torch.ones(4, 4)
            return y.masked_fill(torch.arange(4) == 1, float("-inf"))

    bnn = mp.convert(Masked(), X, "paper")
    program = program_of(bnn, head_of("moments", {}, None))
    exact, moved = program.flat(X)[0], rounded(program)([X])[0]
    assert not moved.isnan().any()
    assert torch.equal(exact.isinf(), moved.isinf())
    assert not torch.equal(exact, moved)


def test_the_tail_of_log_sigmoid(tmp_path: Path) -> None:
    """torch's own translation is the logarithm of 0 there."""
    bnn = mp.convert(nn.Sequential(nn.LogSigmoid(), nn.Dropout(0.5)).eval(), X)
    x = torch.tensor([[-1000.0, -20.0, 0.0, 20.0]])
    mp.export_onnx(bnn, tmp_path / "model.onnx")
    close(run(tmp_path / "model.onnx", x)["mean"], nn.functional.logsigmoid(x))


@pytest.mark.parametrize("function", [torch.expm1, torch.log1p])
def test_functions_that_are_for_small_numbers(function: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    """torch's own translation takes 1 off, or adds it, and the number is lost."""

    class Small(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.dropout(function(x), 0.5, True)

    sizes = torch.logspace(-12, -0.01, 50)
    x = torch.cat([-sizes, torch.zeros(1), sizes, torch.tensor([0.999, 1.0, 1.5, 20.0, 80.0])]).reshape(1, -1)
    bnn = mp.convert(Small(), x, "fast")
    mp.export_onnx(bnn, tmp_path / "model.onnx", verify=False)
    found = run(tmp_path / "model.onnx", x)["mean"]
    torch.testing.assert_close(torch.as_tensor(found), function(x), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("fidelity", ["fast", "accurate"])
def test_softmax_and_norm_behind_dropout(fidelity: str, tmp_path: Path) -> None:
    layers = [nn.Linear(4, 8), nn.Dropout(0.3), nn.Softmax(-1), nn.Linear(8, 8), nn.Dropout(0.3)]
    known = [nn.Linear(4, 8), nn.Dropout(0.3), nn.LayerNorm(8), nn.Linear(8, 3)]
    for model in (nn.Sequential(*layers, nn.Softmax(-1), nn.Linear(8, 3)), nn.Sequential(*known)):
        metadata = mp.export_onnx(mp.convert(model.eval(), X, fidelity), tmp_path / "model.onnx")
        assert max(metadata.options["errors"].values()) < 1e-5


def test_average_over_windows_larger_than_the_input(tmp_path: Path) -> None:
    pool = nn.Sequential(nn.Dropout(0.3), nn.Conv2d(2, 3, 3), nn.AvgPool2d(20, ceil_mode=True), nn.Flatten())
    metadata = mp.export_onnx(mp.convert(pool.eval(), torch.randn(2, 2, 6, 6)), tmp_path / "model.onnx")
    assert max(metadata.options["errors"].values()) < 1e-5


def test_sizes_of_one_but_not_the_batch_are_squeezed(tmp_path: Path) -> None:
    class Squeezed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.dropout(x, 0.5, True)[:, :1].squeeze() + x[:, 1]

    metadata = mp.export_onnx(mp.convert(Squeezed(), X), tmp_path / "model.onnx")  # for a batch of one too
    assert max(metadata.options["errors"].values()) < 1e-5


class Convolutions(nn.Module):
    """In one to three dimensions, with two kinds of padding, and all without bias."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
        self.layers = nn.ModuleList(
            kind(2, 3, 3, padding=padding, bias=False) for kind in kinds for padding in (1, "same")
        )

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        noisy = [torch.dropout(x, 0.2, True) for x in inputs for _ in range(2)]
        return [layer(x) for layer, x in zip(self.layers, noisy, strict=True)]


def test_convolutions_without_bias(tmp_path: Path) -> None:
    """The exporter gives some of them a bias of zeros, of a shape that ONNX Runtime refuses."""
    inputs = tuple(torch.randn(2, 2, *[4] * n) for n in (1, 2, 3))
    mp.export_onnx(mp.convert(Convolutions(), inputs, "fast"), tmp_path / "model.onnx")
    graph = onnx.load(tmp_path / "model.onnx").graph
    assert [len(node.input) for node in graph.node if node.op_type == "Conv"] == [2] * 12


def test_the_comparison_sees_errors() -> None:
    """Of 2e-5 of the largest value, of shape, and numbers lost; what overflows in PyTorch is not compared."""
    wanted = {"x": torch.tensor([1.0, -4.0, float("inf")])}

    def error(*values: float) -> float:
        return verification._errors({"x": torch.tensor(values)}, wanted)["x"]

    assert error(1.0, -4.0, 0.0) == 0
    assert error(1 + 8e-5, -4.0, float("inf")) == pytest.approx(2e-5, rel=1e-2)
    assert error(1.0, float("nan"), 0.0) == float("inf")
    assert error(1.0, -4.0) == float("inf")
    assert verification._errors({"n": torch.tensor([1, 2])}, {"n": torch.tensor([1, 3])}) == {"n": 1.0}


def test_scales_of_errors() -> None:
    """A standard deviation counts down to 1e-5 of its mean; mutual information beside the entropy."""
    wanted = {"mean": torch.tensor([-10.0]), "variance": torch.tensor([1e-20]), "covariance": torch.eye(1)}
    assert verification._scale("variance", wanted) == pytest.approx(1e-3)
    assert verification._scale("covariance", wanted) == 1.0
    wanted = {"total": torch.tensor([2.0]), "epistemic": torch.tensor([1e-7])}
    assert verification._scale("epistemic", wanted) == 2.0
    assert verification._scale("epistemic", wanted | {"mean": torch.tensor([1e6])}) == pytest.approx(1e7)


def test_small_files_without_paths(tmp_path: Path) -> None:
    """Squared weights are computed in the graph, and nothing of this machine is in it."""
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, 256), nn.Linear(256, 3)
    )
    mp.export_onnx(mp.convert(model, torch.zeros(2, 64), "fast"), tmp_path / "model.onnx", verify=False)
    size = sum(p.numel() for p in model.parameters()) * 4
    content = (tmp_path / "model.onnx").read_bytes()
    assert len(content) < 2 * size
    assert str(Path(mp.__file__).parent).encode() not in content


def test_errors(tmp_path: Path) -> None:
    bnn = mp.convert(mlp(), X)
    with pytest.raises(ValueError, match="outputs must be one of"):
        mp.export_onnx(bnn, tmp_path / "model.onnx", "other")
    with pytest.raises(ValueError, match="at least 18"):
        mp.export_onnx(bnn, tmp_path / "model.onnx", opset=11)
    with pytest.raises(ValueError, match="takes no options"):
        mp.export_onnx(bnn, tmp_path / "model.onnx", level=0.9)
    (tmp_path / "bad.onnx").write_bytes(b"hello")
    with pytest.raises(mp.ArchiveError, match="damaged"):
        mp.inspect(tmp_path / "bad.onnx")
