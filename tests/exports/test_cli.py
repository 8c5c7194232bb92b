"""momentprop export and inspect, and the models that are named on the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import momentprop as mp
from momentprop.cli.app import app
from momentprop.cli.models import ModelError, build_model, load_weights, parse_example
from small import mlp

FACTORY = """
import torch
def make():
    nn = torch.nn
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
class Zoo:
    ready = make()
def number():
    return 3
class Tagger(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.rnn, self.out = torch.nn.Dropout(0.2), torch.nn.GRU(4, 5), torch.nn.Linear(5, 3)
    def forward(self, x):
        return self.out(self.rnn(self.drop(x))[0][-1])
tagger = Tagger
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current folder that makes the model."""
    (tmp_path / "my_models.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.delitem(sys.modules, "my_models", raising=False)
    return "my_models"


def test_export_and_inspect(module: str, tmp_path: Path) -> None:
    model = mlp()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    options = [
        "--format",
        "pt2",
        "--weights",
        "weights.pt",
        "--example",
        "4",
        "--fidelity",
        "fast",
        "--note",
        "mine",
    ]
    ran = CliRunner().invoke(app, ["export", f"{module}:make", *options])
    assert ran.exit_code == 0, ran.output
    assert "fast" in ran.stdout
    x = torch.randn(5, 4)
    assert torch.equal(mp.load("model.pt2")(x).variance, mp.convert(model, x, "fast")(x).variance)
    ran = CliRunner().invoke(app, ["inspect", "model.pt2"])
    assert ran.exit_code == 0
    for text in ("torch.export archive", "input: float32[batch, 4]", "variance: float32[batch, 3]", "mine"):
        assert text in ran.stdout
    ran = CliRunner().invoke(app, ["inspect", "model.pt2", "--json"])
    assert json.loads(ran.stdout)["fidelity"] == "fast"


def test_a_saved_network_to_onnx(module: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="comes with the extra onnx")
    mp.save(mp.convert(mlp(), torch.zeros(2, 4), "paper"), "saved.pt2")
    arguments = [
        "export",
        "saved.pt2",
        "--to",
        "out.onnx",
        "--outputs",
        "regression",
        "--noise",
        "0.1",
        "--level",
        "0.8",
        "--json",
    ]
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 0, ran.output
    said = json.loads(ran.stdout)
    assert [port["name"] for port in said["outputs"]] == [
        *("mean", "std", "total", "aleatoric", "epistemic", "lower", "upper")
    ]
    assert said["options"]["level"] == 0.8
    assert said["options"]["verified"]
    ran = CliRunner().invoke(app, ["inspect", "out.onnx"])
    assert "ONNX" in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", "my_models:make"], "--example"),
        (["export", "my_models:make", "--example", "4,x"], "no shape"),
        (["export", "my_models:other", "--example", "4"], "has no 'other'"),
        (["export", "no_such_package:make", "--example", "4"], "cannot be imported"),
        (["export", "my_models", "--example", "4"], "package.module:factory"),
        (
            ["export", "my_models:make", "--example", "4", "--format", "pt2", "--level", "0.9"],
            "--format onnx",
        ),
        (["export", "my_models:make", "--example", "4", "--outputs", "regression"], "--noise"),
        (["export", "gone.pt2"], "gone.pt2"),
        (["inspect", "gone.pt2"], "gone.pt2"),
        (["inspect", "my_models.py"], "no file that mp.save wrote"),
    ],
)
def test_errors_are_one_message(arguments: list[str], message: str, module: str) -> None:
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 1
    assert "failed:" in ran.stderr
    assert message in " ".join(ran.stderr.split())
    assert "Traceback" not in ran.stderr


def test_models_by_name(module: str, tmp_path: Path) -> None:
    assert not build_model("my_models:make").training
    assert isinstance(build_model("my_models:Zoo.ready"), torch.nn.Sequential)
    with pytest.raises(ModelError, match=r"not an nn\.Module"):
        build_model("my_models:number")


def test_weights(tmp_path: Path) -> None:
    model, other = mlp(), mlp()
    torch.save({"state_dict": model.state_dict(), "epoch": 3}, tmp_path / "checkpoint.pt")
    load_weights(other, tmp_path / "checkpoint.pt")
    assert torch.equal(model[0].weight, other[0].weight)
    safetensors = pytest.importorskip("safetensors.torch", reason="comes with the extra validate")
    safetensors.save_file(mlp().state_dict(), tmp_path / "model.safetensors")
    load_weights(other, tmp_path / "model.safetensors")
    assert not torch.equal(model[0].weight, other[0].weight)
    torch.save(model, tmp_path / "pickled.pt")
    with pytest.raises(ModelError, match="more than weights"):
        load_weights(other, tmp_path / "pickled.pt")
    torch.save({"x": torch.zeros(1)}, tmp_path / "others.pt")
    with pytest.raises(ModelError, match="do not fit"):
        load_weights(other, tmp_path / "others.pt")


def test_a_batch_that_is_not_the_first_dimension(module: str) -> None:
    options = ["--format", "pt2", "--example", "7,4", "--fidelity", "accurate", "--batch-dim"]
    ran = CliRunner().invoke(app, ["export", f"{module}:tagger", *options, "1"])
    assert ran.exit_code == 0, ran.output
    assert mp.load("model.pt2")(torch.randn(7, 5, 4)).covariance.shape == (5, 3, 3)
    for wrong, message in ((["3"], "no dimension"), (["1", "--batch-dim", "0"], "once for each of 1")):
        ran = CliRunner().invoke(app, ["export", f"{module}:tagger", *options, *wrong])
        assert ran.exit_code == 1
        assert message in ran.stderr


def test_examples() -> None:
    first, second = parse_example("3,8,8; int64:5")
    assert (first.shape, second.shape) == ((2, 3, 8, 8), (2, 5))
    assert second.dtype == torch.int64
    first, second = parse_example("3,8;5", [1, -1])
    assert (first.shape, second.shape) == ((3, 2, 8), (5, 2))
    for text in ("a", "0", "-1,2", "nothing:3"):
        with pytest.raises(ModelError, match="no shape"):
            parse_example(text)
