"""Files made to do harm: `mp.load` executes nothing but the network's operators, whoever wrote the file.

An attack that worked would leave the file `harmed`.
"""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import momentprop as mp
from momentprop.cli.app import app
from momentprop.exports.archive import seal
from small import mlp

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
HARM = 'open("harmed", "w")'

Change = Callable[[str, bytes], bytes]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("saved") / "model.pt2"
    mp.save(mp.convert(mlp(), X), path)
    return path


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attacks write into the current folder; a module that does harm when imported lies there too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "harmful", raising=False)
    (tmp_path / "harmful.py").write_text(HARM)


def rewritten(source: Path, target: Path, change: Change, *, sealed: bool = True, **description: Any) -> Path:
    """The file with members changed; `sealed`: with checksums that fit, as an attacker makes them."""
    metadata = dataclasses.replace(mp.inspect(source), **description)
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            if not (sealed and name.endswith("momentprop.json")):
                new.writestr(name, change(name, old.read(name)))
    if sealed:
        seal(target, metadata)
    return target


def refused(path: Path, message: str = "") -> None:
    with pytest.raises(mp.ArchiveError, match=message):
        mp.load(path)(X)
    assert not Path("harmed").exists()


def in_graph(edit: Callable[[dict[str, Any]], None]) -> Change:
    def change(name: str, content: bytes) -> bytes:
        if not name.endswith("models/model.json"):
            return content
        model = json.loads(content)
        edit(model)
        return json.dumps(model).encode()

    return change


def renamed(old: str, new: str) -> Change:
    """A name replaced wherever it stands, in the graph and in the list of weights."""

    def change(name: str, content: bytes) -> bytes:
        if not name.endswith(".json"):
            return content
        return content.replace(json.dumps(old).encode(), json.dumps(new).encode())

    return change


def calls(target: str) -> Change:
    return in_graph(lambda model: model["graph_module"]["graph"]["nodes"][0].update(target=target))


def with_node(target: str, *arguments: tuple[str, dict[str, Any]]) -> Change:
    """One more operator, which returns nothing; arguments without a name go by position."""
    inputs = [{"name": name, "arg": value, "kind": 2 if name else 1} for name, value in arguments]
    node = {"target": target, "inputs": inputs, "outputs": [], "metadata": {}, "name": "more"}
    node["is_hop_single_tensor_return"] = None
    return in_graph(lambda model: model["graph_module"]["graph"]["nodes"].append(node))


def signature(**entries: Any) -> Change:
    def edit(model: dict[str, Any]) -> None:
        model["graph_module"]["module_call_graph"][0]["signature"].update(entries)

    return in_graph(edit)


def spec(kind: str, context: str, *children: Any) -> dict[str, Any]:
    return {"type": kind, "context": context, "children_spec": list(children)}


def in_spec(keywords: str) -> str:
    """Of a call with one tensor, and keywords of this context."""
    leaf = {"type": None, "context": None, "children_spec": []}
    positional = spec("builtins.tuple", "null", leaf)
    return json.dumps([1, spec("builtins.tuple", "null", positional, spec("builtins.dict", keywords))])


def sized(expression: str) -> Change:
    def edit(model: dict[str, Any]) -> None:
        text = json.dumps(model).replace("Symbol('", expression + "Symbol('")
        model |= json.loads(text)

    return in_graph(edit)


class Exploit:
    def __reduce__(self) -> Any:
        return (open, ("harmed", "w"))


def pickled_inputs(name: str, content: bytes) -> bytes:
    return pickle.dumps(Exploit()) if "sample_inputs" in name else content


def pickled_weight(name: str, content: bytes) -> bytes:
    return content.replace(b'"use_pickle": false', b'"use_pickle": true')


TENSOR = {"as_tensor": {"name": "tensors_0"}}
# an enumeration, for which torch imports a module, spelled so that the text does not say so
ENUMERATION = '{"\\u005f\\u005fenum\\u005f\\u005f": true, "fqn": "harmful:x", "name": "y"}'

ATTACKS: dict[str, tuple[Change, str]] = {
    "pickled inputs": (pickled_inputs, "pickled example inputs"),
    "pickled weight": (pickled_weight, "pickled object"),
    "torch.load": (calls("torch.load"), "calls 'torch.load'"),
    "torch.hub.load": (calls("torch.hub.load"), r"calls 'torch\.hub\.load'"),
    "a file read": (calls("torch.ops.aten.from_file.default"), "from_file"),
    "a method": (calls("_operator.methodcaller"), "methodcaller"),
    "an extension": (calls("#extension:op"), "extension"),
    "an attribute": (calls("torch.ops.aten.__setattr__"), "__setattr__"),
    "an operator's attribute": (calls("torch.ops.aten.add.__setattr__"), "__setattr__"),
    "a file written": (
        with_node("torch.ops.aten.save.default", ("item", TENSOR), ("filename", {"as_string": "harmed"})),
        "aten.save",
    ),
    "any function": (
        with_node(
            "torch.ops.higher_order.wrap",
            ("", {"as_operator": "torch.save"}),
            ("", TENSOR),
            ("", {"as_string": "harmed"}),
        ),
        "wrap|as_operator",
    ),
    "an operator as argument": (
        with_node("torch.ops.aten.abs.default", ("self", {"as_operator": "torch.save"})),
        "as_operator",
    ),
    "a keyword": (
        with_node("torch.ops.aten.add", ("", TENSOR), (f"alpha={HARM} and 1, other", TENSOR)),
        "aten.add'|alpha",
    ),
    "an input": (renamed("tensors_0", f"tensors_0={HARM}"), "name"),
    "a node that is an attribute": (renamed("tensors_0", "torch.load"), "name"),
    "an argument": (signature(forward_arg_names=[f"tensors_0={HARM}"]), "name"),
    "a keyword argument": (
        signature(forward_arg_names=[], in_spec=in_spec(json.dumps([f"k={HARM}"]))),
        "structures",
    ),
    "a parameter": (renamed("network.0.weight", f'network.0");{HARM};("'), "name"),
    "code": (in_graph(lambda model: model.update(guards_code=[HARM])), "guards_code"),
    "a size": (sized("__import__('harmful') or "), "size"),
    "a size's attribute": (sized("Symbol('s0').\uff4e\uff41\uff4d\uff45 and "), "size"),
    "a structure": (signature(out_spec=json.dumps([1, spec("collections.defaultdict", "[]")])), "structures"),
    "an import": (signature(in_spec=in_spec(ENUMERATION)), "structures"),
    "a function's place": (
        in_graph(
            lambda model: model["graph_module"]["graph"]["nodes"][0].update(
                metadata={"source_fn_stack": "x,torch.load"}
            )
        ),
        "metadata",
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_files_made_to_do_harm(attack: str, saved: Path, tmp_path: Path) -> None:
    """Also where the checksums fit."""
    change, message = ATTACKS[attack]
    refused(rewritten(saved, tmp_path / "sealed.pt2", change), message)
    refused(rewritten(saved, tmp_path / "plain.pt2", change, sealed=False), "wrong checksum")


@pytest.mark.parametrize(
    "text",
    [
        json.dumps([1, spec("momentprop.Moments", ENUMERATION)]),
        json.dumps([1, spec("builtins.dict", ENUMERATION)], separators=(",", ":")),
        json.dumps([1, spec("momentprop.Moments", "null") | {"type": ["x"]}]),
        "[1]",
        "not JSON",
    ],
)
def test_structures_of_outputs_that_import(text: str, saved: Path, tmp_path: Path) -> None:
    known = mp.inspect(saved).structure
    assert known is not None
    path = rewritten(saved, tmp_path / "x.pt2", lambda _, b: b, structure=known | {"spec": text})
    refused(path, "structures")


def test_machine_code_that_calls_itself_a_description(saved: Path, tmp_path: Path) -> None:
    """What a file says of itself does not decide whether it is checked."""
    path = rewritten(saved, tmp_path / "x.pt2", lambda _, b: b, kind="aoti")
    refused(path, r"machine_code=True")
    refused(rewritten(saved, tmp_path / "x.pt2", lambda _, b: b, kind="other"), "kind 'other'")


def test_parts_in_other_folders(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.pt2"
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            if not name.endswith("momentprop.json"):
                new.writestr(name, old.read(name))
        new.writestr("archive_models/model.json", b"{}")
    seal(path, mp.inspect(saved))
    refused(path, "more than one folder")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", "x.pt2"], "cannot be exported again"),
        (["bench", "x.pt2", "--quick"], "--machine-code"),
        (["bench", "x.pt2", "--quick", "--machine-code"], "cannot run on this machine"),
    ],
    ids=["export", "bench", "bench of trusted code"],
)
def test_machine_code_on_the_command_line(
    arguments: list[str], message: str, saved: Path, tmp_path: Path
) -> None:
    rewritten(saved, tmp_path / "x.pt2", lambda _, content: content, kind="aoti")
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 1
    assert message in " ".join(ran.stderr.split())


def test_a_file_with_two_contents(saved: Path, tmp_path: Path) -> None:
    """Zip readers differ: Python's takes the directory before the end record, torch's the one at the offset
    given there. What is checked must be what is run."""
    harmful = rewritten(saved, tmp_path / "harmful.pt2", ATTACKS["an input"][0]).read_bytes()
    good = rewritten(saved, tmp_path / "good.pt2", lambda _, content: content).read_bytes()
    path = tmp_path / "two.pt2"
    path.write_bytes(two_faced(harmful, good))
    with zipfile.ZipFile(path) as archive:
        assert b"harmed" not in archive.read("archive/models/model.json")
    assert "harmed" in torch._C.PyTorchFileReader(str(path)).get_record("models/model.json").decode()
    assert torch.equal(mp.load(path)(X).mean, mp.load(saved)(X).mean)
    assert not Path("harmed").exists()


def two_faced(first: bytes, second: bytes) -> bytes:
    """Two archives in a row, with an end record whose offset is of the first one's directory."""
    start, end, count = place_of_directory(first)
    second_start, second_end, _ = place_of_directory(second)
    assert end - start == second_end - second_start
    directory = bytearray(second[second_start:second_end])
    place = 0
    while place < len(directory):  # Python adds what it takes for bytes before the archive
        name, extra, comment = struct.unpack_from("<3H", directory, place + 28)
        (offset,) = struct.unpack_from("<L", directory, place + 42)
        struct.pack_into("<L", directory, place + 42, offset + start - second_start)
        place += 46 + name + extra + comment
    record = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, count, count, len(directory), start, 0)
    return first[:end] + second[:second_start] + bytes(directory) + record


def place_of_directory(content: bytes) -> tuple[int, int, int]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return archive.start_dir, content.rindex(b"PK\x05\x06"), len(archive.namelist())
