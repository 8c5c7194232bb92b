"""momentprop validate: files, statuses, messages."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from momentprop.cli.app import app
from momentprop.validation import latency

MODEL = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))

def dead():
    model = build()
    model[1].bias.data.fill_(-1e3)
    return model

def broken():
    raise RuntimeError("no luck")

number = 3

class Determinant(nn.Module):
    def forward(self, x):
        return torch.linalg.det(x.unflatten(1, (3, 4)) @ x.unflatten(1, (3, 4)).mT).unsqueeze(1)

def determinant():
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.3), Determinant())

def without_dropout():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 3))

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.rnn, self.out = nn.Dropout(0.3), nn.GRU(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(self.rnn(self.drop(x))[0][-1])
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(latency, "_SECONDS", 0.0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "validated_model", raising=False)
    (tmp_path / "validated_model.py").write_text(MODEL)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 3, 2, 2)).astype(np.float32), rng.integers(3, size=20)
    np.savez(tmp_path / "val.npz", x=x, y=y)
    np.savez(tmp_path / "labels.npz", x=x, y=y + 1)
    np.savez(tmp_path / "lengths.npz", x=x, y=y[:5])
    np.savez(tmp_path / "nan.npz", x=np.where(x > 2, np.nan, x), y=y)
    np.savez(tmp_path / "empty.npz", x=x[:0], y=y[:0])
    np.savez(tmp_path / "shape.npz", x=x[:, :2], y=y)
    np.savez(tmp_path / "objects.npz", x=np.array([{"a": 1}], dtype=object))
    return tmp_path


def run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["validate", *args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, " ".join(result.output.split())


def test_a_page_and_figures(folder: Path) -> None:
    torch.save(__import__("validated_model").build().state_dict(), folder / "weights.pt")
    arguments = ["--weights", "weights.pt", "--data", "val.npz", "--ood", "val.npz", "--samples", "40"]
    status, said = run("validated_model:build", *arguments, "--out", "report.html", "--json", "report.json")
    assert status == 0, said
    assert "Agreement with MC dropout" in said
    assert (folder / "report.html").stat().st_size < 5_000_000
    assert json.loads((folder / "report.json").read_text())["n_ood"] == 20


def test_a_batch_that_is_not_the_models_first_dimension(folder: Path) -> None:
    """Files have a row for every input all the same."""
    x = np.random.default_rng(0).normal(size=(20, 7, 4)).astype(np.float32)
    np.savez(folder / "series.npz", x=x, y=np.arange(20) % 3)
    arguments = ["validated_model:Tagger", "--data", "series.npz", "--ood", "series.npz", "--samples", "40"]
    arguments += ["--no-layers", "--json", "report.json", "--batch-dim"]
    status, said = run(*arguments, "1")
    assert status == 0, said
    found = json.loads((folder / "report.json").read_text())
    assert (found["n_inputs"], found["n_ood"]) == (20, 20)
    assert "accurate" in found["figures"]
    status, said = run(*arguments, "3")
    assert status == 2
    assert "batch_dim must be" in said


def test_a_required_worth(folder: Path) -> None:
    arguments = ["validated_model:build", "--data", "val.npz", "--samples", "40", "--no-layers"]
    assert run(*arguments, "--require-teq", "2")[0] == 0
    status, said = run(*arguments, "--tier", "paper", "--require-teq", "21")
    assert status == 2  # cannot be shown with so few samples
    assert "--samples 42" in said


def test_below_the_required_worth(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from momentprop.validation import comparison
    from momentprop.validation.equivalence import Samples

    monkeypatch.setattr(comparison, "equivalent_samples", lambda kl, curve: Samples(3.0))
    arguments = ["validated_model:build", "--data", "val.npz", "--samples", "40", "--no-layers"]
    status, said = run(*arguments, "--require-teq", "10")
    assert status == 1
    assert "below the required 10" in said


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        ("validated_model:build", "labels.npz", "labels must be within 0..2"),
        ("validated_model:build", "lengths.npz", "x has 20 rows, and y 5"),
        ("validated_model:build", "nan.npz", "NaN"),
        ("validated_model:build", "empty.npz", "empty"),
        ("validated_model:build", "shape.npz", "does not run on these inputs, float32 [2, 2, 2, 2]"),
        ("validated_model:dead", "val.npz", "do not vary"),
        ("validated_model:broken", "val.npz", "cannot be built: RuntimeError: no luck"),
        ("validated_model:number", "val.npz", "is a int"),
        ("validated_model:build", "objects.npz", "Python objects"),
        ("validated_model:build", "nothing.npz", "does not exist"),
        ("validated_model:without_dropout", "val.npz", "no active dropout"),
        ("validated_model:nothing", "val.npz", "nothing"),
        ("saved.pt2", "val.npz", "--original"),
    ],
)
def test_bad_input_has_status_2(folder: Path, model: str, data: str, message: str) -> None:
    status, said = run(model, "--data", data, "--samples", "20")
    assert status == 2, said
    assert message in said


def test_what_cannot_be_converted_is_on_the_page(folder: Path) -> None:
    status, said = run("validated_model:determinant", "--data", "val.npz", "--out", "report.html")
    assert status == 2
    assert "aten.linalg_det.default in 2" in said
    text = (folder / "report.html").read_text()
    assert "This model cannot be converted." in text
    assert "aten.linalg_det.default" in text
    assert "validated_model.py" in text


def test_paths_are_checked_before_the_long_part(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("momentprop.cli.validate._report", lambda *args: pytest.fail("started"))
    status, said = run("validated_model:build", "--data", "val.npz", "--out", "nowhere/report.html")
    assert status == 2
    assert "no such folder" in said


def test_an_interrupted_run_reports_and_has_status_130(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from momentprop.validation.sampling import _Stream

    def add(stream: _Stream, samples: torch.Tensor) -> None:
        original(stream, samples)
        signal.raise_signal(signal.SIGINT)

    original = _Stream.add
    monkeypatch.setattr(_Stream, "add", add)
    arguments = ["validated_model:build", "--data", "val.npz", "--samples", "100000", "--no-layers"]
    status, said = run(*arguments, "--out", "report.html")
    assert status == 130, said
    assert "PARTIAL" in said
    assert "<strong>Partial.</strong>" in (folder / "report.html").read_text()


def test_ctrl_c_in_a_terminal(folder: Path) -> None:
    """A bar with the time that remains; then the report of what is done, and status 130."""
    pty = pytest.importorskip("pty")
    command = "from momentprop.cli import main; main()"
    arguments = ["validated_model:build", "--data", "val.npz", "--samples", "100000000", "--no-layers"]
    arguments += ["--task", "moments", "--tier", "fast"]  # no metrics: importing them takes seconds
    child, terminal = pty.fork()
    if child == 0:
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        os.environ |= {"TERM": "xterm", "COLUMNS": "120", "PYTHONPATH": path}
        os.execv(sys.executable, [sys.executable, "-c", command, "validate", *arguments])
    said, pressed = "", False
    with contextlib.suppress(OSError):  # the end, on Linux
        while part := os.read(terminal, 2**16):
            said += part.decode(errors="replace")
            if not pressed and re.search(r"sampling.*?0%.*?\d:\d\d:\d\d", said):
                os.write(terminal, b"\x03")
                pressed = True
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert (pressed, status) == (True, 130), said[-2000:]
    assert "PARTIAL, interrupted" in said
    assert "Traceback" not in said


def test_a_saved_network_beside_its_original(folder: Path) -> None:
    import momentprop as mp

    model = __import__("validated_model").build().eval()
    mp.save(mp.convert(model, torch.zeros(2, 3, 2, 2), "accurate"), folder / "saved.pt2")
    status, said = run(
        "saved.pt2",
        "--original",
        "validated_model:build",
        "--data",
        "val.npz",
        "--samples",
        "40",
        "--no-layers",
    )
    assert status == 0, said
    assert "saved" in said


def test_parquet_and_folders(folder: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from PIL import Image
    from pyarrow import parquet

    from momentprop.cli.datasets import read_batches

    with np.load(folder / "val.npz") as arrays:
        x, y = arrays["x"], arrays["y"]
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(x))
    parquet.write_table(pa.table({"x": tensors, "y": y}), folder / "val.parquet")
    (first, labels), *_ = read_batches(folder / "val.parquet", 7)[0]
    assert first.shape == (7, 3, 2, 2)
    np.testing.assert_array_equal(first.numpy(), x[:7])
    np.testing.assert_array_equal(labels.numpy(), y[:7])
    for name, level in (("cat", 0), ("dog", 255)):
        (folder / "images" / name).mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (4, 5), (level, 0, 0)).save(folder / "images" / name / f"{i}.png")
    (pixels, labels), *_ = read_batches(folder / "images", 10)[0]
    assert pixels.shape == (4, 3, 5, 4)
    assert labels.tolist() == [0, 1, 0, 1]
    assert pixels[:, 0].amax((1, 2)).tolist() == [0, 1, 0, 1]
