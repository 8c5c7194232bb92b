"""mp.save and mp.load: the same numbers, nothing unpickled, and damage is found."""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
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
from momentprop.exports.archive import seal
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
    for batch in (1, 2, 7):  # and no gradient is needed for it
        x = torch.randn(batch, 3, 8, 8)
        same(loaded(x), bnn(x))


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
    assert torch.equal(loaded.to("cpu")(X).mean, loaded(X).mean)
    with pytest.raises(mp.MomentpropError, match="keeps its type"):
        loaded.double()
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


def test_changed_bytes(saved: Path, tmp_path: Path) -> None:
    """A changed byte is found, wherever it counts."""
    content = saved.read_bytes()
    with zipfile.ZipFile(saved) as archive:
        members = [(info, info.header_offset + 30 + len(info.filename)) for info in archive.infolist()]
    path = tmp_path / "changed.pt2"
    for info, start in members:
        if not info.file_size:
            continue
        extra = int.from_bytes(content[info.header_offset + 28 : info.header_offset + 30], "little")
        for place in {0, info.file_size // 2, info.file_size - 1}:
            changed = bytearray(content)
            changed[start + extra + place] ^= 0x20
            path.write_bytes(changed)
            with pytest.raises(mp.ArchiveError):
                mp.inspect(path)


def rewritten(source: Path, target: Path, change: Callable[[str, bytes], bytes], sealed: bool) -> Path:
    """The file with members changed; `sealed`: with checksums that fit, as an attacker makes them."""
    metadata = mp.inspect(source)
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            if not (sealed and name.endswith("momentprop.json")):
                new.writestr(name, change(name, old.read(name)))
    if sealed:
        seal(target, metadata)
    return target


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


class Exploit:
    def __reduce__(self) -> Any:
        return (print, ("unpickled",))


def _in_graph(edit: Callable[[dict[str, Any]], None]) -> Callable[[str, bytes], bytes]:
    def change(name: str, content: bytes) -> bytes:
        if not name.endswith("models/model.json"):
            return content
        model = json.loads(content)
        edit(model)
        return json.dumps(model).encode()

    return change


def _call(target: str) -> Callable[[str, bytes], bytes]:
    return _in_graph(lambda model: model["graph_module"]["graph"]["nodes"][0].update(target=target))


def _size(model: dict[str, Any]) -> None:
    text = json.dumps(model).replace("Symbol('", "__import__('os').getcwd() or Symbol('")
    model |= json.loads(text)


def _structure(model: dict[str, Any]) -> None:
    signature = model["graph_module"]["module_call_graph"][0]["signature"]
    signature["out_spec"] = signature["out_spec"].replace("builtins.tuple", "collections.defaultdict")


def _pickled_inputs(name: str, content: bytes) -> bytes:
    return pickle.dumps(Exploit()) if "sample_inputs" in name else content


def _pickled_weight(name: str, content: bytes) -> bytes:
    return content.replace(b'"use_pickle": false', b'"use_pickle": true')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_pickled_inputs, "pickled example inputs"),
        (_pickled_weight, "pickled object"),
        (_call("torch.load"), "calls 'torch.load'"),
        (_call("torch.hub.load"), "calls 'torch.hub.load'"),
        (_call("torch.ops.aten.from_file.default"), "from_file"),
        (_call("_operator.methodcaller"), "methodcaller"),
        (_call("#extension:op"), "extension"),
        (_in_graph(lambda model: model.update(guards_code=["print(1)"])), "Python code"),
        (_in_graph(_size), "no arithmetic"),
        (_in_graph(_structure), "structures"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_files_made_to_do_harm(
    change: Callable[[str, bytes], bytes], message: str, saved: Path, tmp_path: Path
) -> None:
    """Also where the checksums fit."""
    path = rewritten(saved, tmp_path / "sealed.pt2", change, sealed=True)
    with pytest.raises(mp.ArchiveError, match=message):
        mp.load(path)
    path = rewritten(saved, tmp_path / "plain.pt2", change, sealed=False)
    with pytest.raises(mp.ArchiveError, match="wrong checksum"):
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


def test_torch_reads_it_too(saved: Path) -> None:
    """On flat tensors, without momentprop's description."""
    outputs = torch.export.load(io.BytesIO(saved.read_bytes())).module()(X)
    assert torch.equal(outputs[0], mp.load(saved)(X).mean)
