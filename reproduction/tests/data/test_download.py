"""Downloads, from a server on this machine: whole or not at all."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from copies import batch_files, gal_folder, served, write_tar
from momentprop.errors import DataError
from momentprop_reproduction.data import load_cifar10, load_uci
from momentprop_reproduction.data.catalogue import SETS, known
from momentprop_reproduction.data.download import download
from momentprop_reproduction.data.errors import DownloadError
from momentprop_reproduction.data.getting import get

CONTENT = bytes(range(256)) * 4096
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def files_below(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def manifest(files: dict[str, bytes]) -> str:
    """What `sha256sum *.txt | sha256sum` prints."""
    lines = [f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in sorted(files)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@pytest.fixture
def small_yacht(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The files of a small set that the catalogue calls yacht."""
    files = gal_folder()
    monkeypatch.setitem(SETS, "yacht", replace(SETS["yacht"], sha256=manifest(files), n_splits=2))
    return files


def test_a_file(tmp_path: Path) -> None:
    counts: list[int] = []
    with served({"file": CONTENT}) as url:
        download(f"{url}/file", tmp_path / "new" / "file", SHA256, counts.append)
    assert (tmp_path / "new" / "file").read_bytes() == CONTENT
    assert files_below(tmp_path) == ["file"]
    assert sum(counts) == len(CONTENT)
    assert len(counts) > 1


@pytest.mark.parametrize(
    ("name", "sha256", "message"),
    [
        ("file", "0" * 64, rf"/file has the SHA-256 checksum {SHA256}, not 0000.*Nothing was kept"),
        ("absent", SHA256, r"/absent cannot be downloaded \(404 Not Found\)"),
        ("broken", SHA256, rf"/broken broke off after {len(CONTENT) // 2} of {len(CONTENT)} bytes"),
    ],
)
def test_a_failure_leaves_what_was_there(tmp_path: Path, name: str, sha256: str, message: str) -> None:
    (tmp_path / "file").write_bytes(b"before")
    with (
        served({"file": CONTENT, "broken": CONTENT}, broken="broken") as url,
        pytest.raises(DownloadError, match=message),
    ):
        download(f"{url}/{name}", tmp_path / "file", sha256)
    assert (tmp_path / "file").read_bytes() == b"before"
    assert files_below(tmp_path) == ["file"]


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/file", "http://no-such-host.invalid/file", "no address"])
def test_without_a_network(tmp_path: Path, url: str) -> None:
    with pytest.raises(DownloadError, match=r"cannot be downloaded.*MOMENTPROP_DATA"):
        download(url, tmp_path / "file", SHA256)
    assert files_below(tmp_path) == []


def test_an_interruption_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with served({"file": CONTENT}) as url, pytest.raises(KeyboardInterrupt):
        download(f"{url}/file", tmp_path / "file", SHA256, interrupt)
    assert files_below(tmp_path) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "occupied").write_text("")
    with (
        served({"file": CONTENT}) as url,
        pytest.raises(DataError, match=r"cannot be written.*MOMENTPROP_CACHE"),
    ):
        download(f"{url}/file", tmp_path / "occupied" / "file", SHA256)


def test_a_uci_set_is_found_after_its_download(small_yacht: dict[str, bytes], own_folders: Path) -> None:
    counts: list[int] = []
    with served(small_yacht) as url:
        path = get("yacht", url=url, progress=counts.append)
    assert path == own_folders / "downloads" / "uci" / "yacht.npz"
    assert sum(counts) == sum(map(len, small_yacht.values()))
    found = load_uci("yacht")
    assert found.variant == "npz"
    assert found.features.shape == (20, 3)
    with np.load(path) as arrays:  # the documented format
        assert {"features", "target", "n_splits", "train_0", "test_1"} <= set(arrays.files)


@pytest.mark.parametrize("fault", ["changed", "absent", "broken"])
def test_a_faulty_uci_set_is_not_kept(small_yacht: dict[str, bytes], own_folders: Path, fault: str) -> None:
    files = dict(small_yacht)
    if fault == "changed":
        files["data.txt"] = files["data.txt"].replace(b"1", b"2", 1)
    elif fault == "absent":
        del files["index_test_1.txt"]
    with (
        served(files, broken="data.txt" if fault == "broken" else "") as url,
        pytest.raises(DownloadError, match=r"SHA-256|index_test_1\.txt cannot be|data\.txt broke off"),
    ):
        get("yacht", url=url)
    assert files_below(own_folders) == []


@pytest.mark.usefixtures("few_images")
def test_cifar10_is_found_after_its_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"cifar-10-batches-py/{name}": content for name, content in batch_files().items()}
    content = write_tar(tmp_path / "archive.tar.gz", files).read_bytes()
    checksum = hashlib.sha256(content).hexdigest()
    monkeypatch.setitem(SETS, "cifar10", replace(SETS["cifar10"], sha256=checksum))
    with served({"archive": content}) as url:
        get("cifar10", url=f"{url}/archive")
    assert load_cifar10("test").variant == "original pixels"


def test_unknown_names_are_all_named() -> None:
    with pytest.raises(DataError, match=r"no set iris, mnist; the sets are boston.*cifar10"):
        known(["iris", "yacht", "mnist"])
    assert known(["all"]) == list(SETS)
