"""mp.save and mp.load: the same numbers, nothing unpickled, and damage is found."""

from __future__ import annotations

import dataclasses
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import momentprop as mp
from small import cnn, mlp

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def same(first: Any, second: Any) -> None:
    """Equal to the last digit: it is the same graph."""
    for name in ("mean", "variance", "covariance", "indices"):
        a, b = getattr(first, name), getattr(second, name)
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)
    assert (first.logits is None) == (second.logits is None)
    if first.logits is not None:
        assert first.logits.dim == second.logits.dim
        same(first.logits.moments, second.logits.moments)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("saved") / "model.pt2"
    mp.save(mp.convert(mlp(), X), path, note="a note", preprocessing="divide by 255", report={"ratio": 0.99})
    return path


@pytest.mark.parametrize("fidelity", ["paper", "fast", "accurate"])
def test_a_loaded_network_gives_the_same_numbers(fidelity: str, tmp_path: Path) -> None:
    model = cnn().eval()
    bnn = mp.convert(model, torch.randn(2, 3, 8, 8), fidelity)
    mp.save(bnn, tmp_path / "model.pt2")
    loaded = mp.load(tmp_path / "model.pt2")
    assert loaded.fidelity == bnn.fidelity == fidelity
    # averages of variances come from convolutions there, as in frozen networks: the same but for rounding
    frozen = bnn.freeze()
    for batch in (1, 2, 7):  # and no gradient is needed for it
        x = torch.randn(batch, 3, 8, 8)
        same(loaded(x), frozen(x) if fidelity == "fast" else bnn(x))
        torch.testing.assert_close(loaded(x).variance, bnn(x).variance, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("fidelity", ["paper", "fast", "accurate"])
def test_a_loaded_network_can_be_saved_again(fidelity: str, tmp_path: Path) -> None:
    """The sweep back through max pooling puts constants into the middle of the program."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Dropout(0.3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2)
    )
    mp.save(mp.convert(model, torch.randn(2, 3, 8, 8), fidelity), tmp_path / "one.pt2")
    mp.save(mp.load(tmp_path / "one.pt2"), tmp_path / "two.pt2")
    x = torch.randn(5, 3, 8, 8)
    same(mp.load(tmp_path / "two.pt2")(x), mp.load(tmp_path / "one.pt2")(x))


def test_nothing_is_unpickled(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("unpickled")

    for owner, name in ((pickle, "loads"), (pickle, "load"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(owner, name, refuse)
    assert mp.load(saved)(X).mean.shape == (3, 3)


def test_the_models_class_is_not_needed(tmp_path: Path) -> None:
    """Another process, where the class does not exist, gets the same numbers."""

    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.layers(x), "input": x}

    bnn = mp.convert(Mine(), X)
    mp.save(bnn, tmp_path / "model.pt2")
    code = f"""
import torch, momentprop as mp
out = mp.load({str(tmp_path / "model.pt2")!r})(torch.tensor({X.tolist()}))
print(out["logits"].variance.sum().item())
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(ran.stdout) == bnn(X)["logits"].variance.sum().item()


class Pair(NamedTuple):
    first: Tensor
    rest: list[Tensor]


@dataclasses.dataclass
class Named:
    logits: Tensor
    missing: Tensor | None = None


class Many(nn.Module):
    """Inputs by position, keyword and in a container; indices; several outputs."""

    def __init__(self, wrap: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.embed, self.head, self.wrap = nn.Embedding(10, 4), nn.Linear(4, 3), wrap
        self.dropout = nn.Dropout(0.2)

    def forward(self, tokens: Tensor, parts: dict[str, Tensor], scale: float = 1.0) -> Any:
        h = self.dropout(self.embed(tokens).mean(1) + parts["x"])
        return self.wrap(self.head(h) * scale, h)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda a, b: (a, [b]),
        lambda a, b: Pair(a, [b]),
        lambda a, b: {"a": a, "b": (b, None)},
        lambda a, b: Named(a),
        lambda a, b: a.softmax(-1),
    ],
    ids=["tuple", "named tuple", "dict", "dataclass", "softmax"],
)
def test_structures_of_inputs_and_outputs(wrap: Callable[[Tensor, Tensor], Any], tmp_path: Path) -> None:
    tokens = torch.randint(10, (3, 5))
    bnn = mp.convert(Many(wrap), ((tokens,), {"parts": {"x": X}, "scale": 2.0}))
    metadata = mp.save(bnn, tmp_path / "model.pt2")
    assert [port.name for port in metadata.inputs] == ["tokens", "parts_x"]
    loaded = mp.load(tmp_path / "model.pt2")
    out, expected = loaded(tokens, parts={"x": X}, scale=2.0), bnn(tokens, parts={"x": X}, scale=2.0)
    if isinstance(expected, mp.Moments):
        same(out, expected)
        return
    if isinstance(expected, Pair):
        assert out._fields == expected._fields
        same(out.first, expected.first)
        same(out.rest[0], expected.rest[0])
    elif isinstance(expected, Named):
        same(out.logits, expected.logits)
        assert out["missing"] is None
    elif isinstance(expected, dict):
        same(out["b"][0], expected["b"][0])
        assert out["b"][1] is None
    else:
        same(out[1][0], expected[1][0])
    with pytest.raises(mp.InputError, match="scale"):
        loaded(tokens, parts={"x": X}, scale=3.0)


def test_uncertain_inputs(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    bnn = mp.convert(model, mp.Moments(X, 0.1))
    metadata = mp.save(bnn, tmp_path / "model.pt2")
    assert metadata.inputs[0].uncertain
    loaded = mp.load(tmp_path / "model.pt2")
    same(loaded(mp.Moments(X, 0.5)), bnn(mp.Moments(X, 0.5)))
    assert loaded(X).variance.abs().max() < 1e-12
    mp.save(mp.convert(mlp(), X), tmp_path / "certain.pt2")
    with pytest.raises(mp.MomentpropError, match="not uncertain when"):
        mp.load(tmp_path / "certain.pt2")(mp.Moments(X, 0.5))


class Odd(nn.Module):
    """Modules and buffers whose names are no names of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"conv 1": nn.Linear(4, 4), "conv_1": nn.Linear(4, 4)})
        self.layers["class"] = nn.Linear(4, 4)
        self.layers["\"); x('"] = nn.Linear(4, 3)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("a scale", torch.full((4,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = x * dict(self.named_buffers())["a scale"]
        for layer in self.layers.values():
            x = layer(self.dropout(x))
        return x


def test_any_name_of_a_module(tmp_path: Path) -> None:
    bnn = mp.convert(Odd(), X)
    mp.save(bnn, tmp_path / "model.pt2")
    loaded = mp.load(tmp_path / "model.pt2")
    same(loaded(X), bnn(X))
    mp.save(loaded, tmp_path / "again.pt2")
    same(mp.load(tmp_path / "again.pt2")(X), bnn(X))


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("momentprop.exports.guard.is_operator", lambda target: False)
    with pytest.raises(mp.ExportError, match="loaded again"):
        mp.save(mp.convert(mlp(), X), tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


def test_permissions_are_those_of_any_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the mask of the process, which all its threads share, is left alone."""
    (tmp_path / "other").touch()
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("changed the mask"))
    mp.save(mp.convert(mlp(), X), tmp_path / "model.pt2")
    assert (tmp_path / "model.pt2").stat().st_mode == (tmp_path / "other").stat().st_mode
    assert {path.name for path in tmp_path.iterdir()} == {"model.pt2", "other"}


def test_what_the_file_says_about_itself(saved: Path) -> None:
    metadata = mp.inspect(saved)
    assert (metadata.kind, metadata.fidelity, metadata.note) == ("pt2", "accurate", "a note")
    assert metadata.preprocessing == "divide by 255"
    assert metadata.report == {"ratio": 0.99}
    assert metadata.momentprop == mp.__version__
    assert metadata.inputs[0].shape == ("batch", 4)
    assert {port.name: port.shape for port in metadata.outputs} == {
        "mean": ("batch", 3),
        "variance": ("batch", 3),
        "covariance": ("batch", 3, 3),
    }
    again = mp.load(saved)
    mp.save(again, saved.with_name("again.pt2"))  # a loaded network can be saved, with what was said of it
    assert mp.inspect(saved.with_name("again.pt2")).report == {"ratio": 0.99}
    same(mp.load(saved.with_name("again.pt2"))(X), again(X))


def test_no_path_of_this_machine_is_in_the_file(saved: Path) -> None:
    assert b"site-packages" not in saved.read_bytes()
    assert str(Path(mp.__file__).parent).encode() not in saved.read_bytes()


def test_a_report_must_be_json(tmp_path: Path) -> None:
    bnn = mp.convert(mlp(), X)
    mp.save(bnn, tmp_path / "model.pt2", report={"ratio": torch.tensor([1.0, float("nan")])})
    assert mp.inspect(tmp_path / "model.pt2").report == {"ratio": [1.0, None]}
    with pytest.raises(mp.ExportError, match="plain JSON"):
        mp.save(bnn, tmp_path / "other.pt2", report={"x": object()})
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt2"]


def test_type_and_device(saved: Path) -> None:
    loaded = mp.load(saved)
    expected = loaded(X).mean
    for kept in (loaded.to("cpu"), loaded.float(), loaded.to(torch.float32)):
        assert torch.equal(kept(X).mean, expected)
    with pytest.raises(mp.MomentpropError, match="keeps its type"):
        loaded.double()
    with pytest.raises(mp.MomentpropError, match="keeps its type"):
        loaded.half()
    with pytest.raises(mp.InputError, match="shape"):
        loaded(torch.zeros(3, 5))
    with pytest.raises(TypeError, match=r"mp\.convert or mp\.load"):
        mp.save(mlp(), "model.pt2")


def test_truncated_files(saved: Path, tmp_path: Path) -> None:
    content = saved.read_bytes()
    for share in (0.0, 0.01, 0.5, 0.9, 0.999):
        (tmp_path / "cut.pt2").write_bytes(content[: int(share * len(content))])
        with pytest.raises(mp.ArchiveError, match="truncated"):
            mp.load(tmp_path / "cut.pt2")


def test_changed_bytes_of_parts(saved: Path, tmp_path: Path) -> None:
    """A changed byte is found, wherever it counts."""
    content = saved.read_bytes()
    path = tmp_path / "changed.pt2"
    for info, start in places(saved):
        if not info.file_size:
            continue
        for place in {0, info.file_size // 2, info.file_size - 1}:
            changed = bytearray(content)
            changed[start + place] ^= 0x20
            path.write_bytes(changed)
            with pytest.raises(mp.ArchiveError):
                mp.inspect(path)


@pytest.mark.parametrize("mask", [0x01, 0xFF])
def test_changed_bytes_of_headers(mask: int, saved: Path, tmp_path: Path) -> None:
    """They are found too, or nothing depends on them, as on the time of writing."""
    content = saved.read_bytes()
    expected = mp.inspect(saved)
    with zipfile.ZipFile(saved) as archive:
        directory = range(archive.start_dir, len(content))
    headers = [i for info, start in places(saved)[:3] for i in range(info.header_offset, start)]
    path = tmp_path / "changed.pt2"
    found = 0
    for place in (*headers, *directory):
        changed = bytearray(content)
        changed[place] ^= mask
        path.write_bytes(changed)
        try:
            assert mp.inspect(path) == expected
        except mp.ArchiveError:
            found += 1
    assert found > len(directory) / 3


def places(path: Path) -> list[tuple[zipfile.ZipInfo, int]]:
    """All members of a file, and where their content starts."""
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    lengths = [struct.unpack_from("<2H", content, info.header_offset + 26) for info in members]
    return [(info, info.header_offset + 30 + sum(n)) for info, n in zip(members, lengths, strict=True)]


def test_parts_added_or_left_out(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "changed.pt2"
    path.write_bytes(saved.read_bytes())
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("archive/data/more", b"x")
    with pytest.raises(mp.ArchiveError, match=r"unknown part archive/data/more"):
        mp.load(path)
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("archive/data/more", b"y")
    with pytest.raises(mp.ArchiveError, match="two parts of one name"):
        mp.load(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/models/model.json", b"{}")
    with pytest.raises(mp.ArchiveError, match=r"not written by mp\.save"):
        mp.load(path)


def test_files_of_others(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1)}, tmp_path / "weights.pt")
    with pytest.raises(mp.ArchiveError, match=r"not written by mp\.save"):
        mp.load(tmp_path / "weights.pt")
    (tmp_path / "text.pt2").write_text("hello")
    with pytest.raises(mp.ArchiveError, match="no file that"):
        mp.inspect(tmp_path / "text.pt2")
    with pytest.raises(FileNotFoundError):
        mp.load(tmp_path / "nothing.pt2")
    with pytest.raises(FileNotFoundError, match="no folder"):
        mp.save(mp.convert(mlp(), X), tmp_path / "nowhere" / "model.pt2")


def test_torch_reads_it_too(tmp_path: Path) -> None:
    """On flat tensors, without momentprop's description; but with its operators, which are in the graph."""
    bnn = mp.convert(nn.Sequential(nn.Dropout(0.2), nn.Linear(4, 3), nn.ReLU()), X, "fast")
    mp.save(bnn, tmp_path / "model.pt2")
    code = f"""
import traceback, torch, warnings
warnings.simplefilter("ignore")
def load():
    return torch.export.load({str(tmp_path / "model.pt2")!r})
try:
    load()
except Exception:
    traceback.print_exc()
import momentprop
print(load().module()(torch.tensor({X.tolist()}))[1].sum().item())
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "relu_moments" in ran.stderr
    assert float(ran.stdout) == bnn(X).variance.sum().item()
