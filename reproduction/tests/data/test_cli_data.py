"""momentprop data: what it prints, and its status."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from copies import batch_files, gal_folder, image_files, served, write, write_batches, write_tar
from momentprop.cli.app import app
from momentprop_reproduction.data import catalogue, load_uci
from momentprop_reproduction.data.catalogue import SETS
from momentprop_reproduction.data.checking import checksum

pytestmark = pytest.mark.usefixtures("few_images")


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["data", *map(str, arguments)])


@pytest.fixture
def gal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small set that the catalogue calls yacht."""
    folder = tmp_path / "data"
    write(folder / "yacht" / "data", gal_folder())
    content = checksum(load_uci("yacht", folder))
    monkeypatch.setitem(SETS, "yacht", replace(SETS["yacht"], content=content, n_splits=2))
    return folder


@pytest.fixture
def home(gal: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The public home of yacht is on this machine."""
    files = gal_folder()
    lines = [f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in sorted(files)]
    sha256 = hashlib.sha256("".join(lines).encode()).hexdigest()
    with served(files) as url:
        size = sum(map(len, files.values()))
        monkeypatch.setitem(SETS, "yacht", replace(SETS["yacht"], url=url, sha256=sha256, size=size))
        yield


def line_of(name: str, result: Result) -> str:
    [line] = [line for line in result.stdout.splitlines() if line.startswith(f"│ {name} ")]
    return line


def test_list(gal: Path) -> None:
    result = run("list", "--data", gal)
    assert result.exit_code == 0
    assert all(f"│ {name} " in result.stdout for name in SETS)
    assert str(gal / "yacht" / "data") in line_of("yacht", result)
    assert "170.5 MB" in line_of("cifar10", result)
    assert line_of("boston", result).split("│")[4].strip() == "-"
    rows = {row["name"]: row for row in json.loads(run("list", "--data", gal, "--json").stdout)}
    assert rows["yacht"]["found"] == str(gal / "yacht" / "data")
    assert rows["boston"]["found"] is None


@pytest.mark.usefixtures("home")
def test_get_then_get_again(own_folders: Path) -> None:
    path = own_folders / "downloads" / "uci" / "yacht.npz"
    result = run("get", "yacht")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"yacht: {path}\n"
    date = path.stat().st_mtime_ns
    assert run("get", "yacht").stdout == f"yacht: already there, {path} (--force downloads it all the same)\n"
    assert path.stat().st_mtime_ns == date
    assert run("get", "yacht", "--force").stdout == f"yacht: {path}\n"
    assert path.stat().st_mtime_ns > date
    assert "sound" in line_of("yacht", run("check"))


@pytest.mark.usefixtures("home")
def test_get_to_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "new" / "uci" / "yacht.npz"
    assert run("get", "yacht", "--to", tmp_path / "new").stdout == f"yacht: {path}\n"
    assert run("get", "yacht", "--to", tmp_path / "new").stdout.startswith(f"yacht: already there, {path}")


def test_get_fails_clearly(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETS, "yacht", replace(SETS["yacht"], url="http://127.0.0.1:9"))
    result = run("get", "yacht")
    assert result.exit_code == 1
    assert "momentprop data get failed" in result.stderr
    assert "MOMENTPROP_DATA" in result.stderr
    assert "Traceback" not in result.output
    assert not own_folders.exists() or not list(own_folders.rglob("*.npz"))
    result = run("get", "yacht", "iris")
    assert result.exit_code == 1
    assert "there is no set iris" in result.stderr


def test_check_sound_data(gal: Path) -> None:
    write(gal, image_files("JPEG"))
    result = run("check", "--data", gal)
    assert result.exit_code == 0, result.output
    assert "sound" in line_of("yacht", result)
    assert "50 + 20 images (JPEG re-encoding), counts agree" in line_of("cifar10", result)
    assert "not there" in line_of("boston", result)


def test_check_damaged_data(gal: Path) -> None:
    path = gal / "yacht" / "data" / "data.txt"
    path.write_bytes(path.read_bytes()[:-100])
    result = run("check", "--data", gal)
    assert result.exit_code == 1
    assert "damaged" in line_of("yacht", result)


def test_check_sees_a_changed_number(gal: Path) -> None:
    path = gal / "yacht" / "data" / "tau_values.txt"
    path.write_text("0.1\n0.2\n0.4\n")
    rows = {row["name"]: row for row in json.loads(run("check", "--data", gal, "--json").stdout)}
    assert rows["yacht"]["status"] == "damaged"
    assert "not what was published" in rows["yacht"]["detail"]


@pytest.mark.parametrize("kind", ["folder", "archive"])
def test_check_verifies_the_checksums_of_cifar10(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    files = batch_files()
    if kind == "folder":
        write_batches(folder)
        for name, content in files.items():
            monkeypatch.setitem(catalogue.BATCH_MD5, name, hashlib.md5(content).hexdigest())
    else:
        archive = write_tar(
            folder / "cifar-10-python.tar.gz", {f"cifar-10-batches-py/{k}": v for k, v in files.items()}
        )
        sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
        monkeypatch.setitem(SETS, "cifar10", replace(SETS["cifar10"], sha256=sha256))
    sound = run("check", "cifar10", "--data", folder)
    assert sound.exit_code == 0, sound.output
    assert "checksum agrees" in line_of("cifar10", sound)
    monkeypatch.undo()
    for split, count in {"train": 5, "test": 2}.items():
        monkeypatch.setitem(sys.modules["momentprop_reproduction.data.images"].PER_CLASS, split, count)
    other = run("check", "cifar10", "--data", folder)
    assert other.exit_code == 1
    assert "is not what was published" in line_of("cifar10", other)


def test_check_of_a_set_that_is_not_there(tmp_path: Path) -> None:
    assert run("check", "--data", tmp_path).exit_code == 0
    result = run("check", "boston", "--data", tmp_path)
    assert result.exit_code == 1
    assert "momentprop data get boston" in line_of("boston", result)


@pytest.mark.parametrize("verb", ["list", "check"])
def test_a_folder_that_is_not_there(tmp_path: Path, verb: str) -> None:
    result = run(verb, "--data", tmp_path / "nowhere")
    assert result.exit_code == 1
    assert "does not exist" in " ".join(result.stderr.split())
