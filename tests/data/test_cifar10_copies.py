"""CIFAR-10: every kind of copy gives the same images; damage is named, and leaves the cache as it was."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from copies import PER_CLASS, batch_files, image_files, pixels, write, write_batches, write_tar
from momentprop.data import images as cifar10_images
from momentprop.data import load_cifar10
from momentprop.data.images import CLASSES
from momentprop.errors import DataError, MissingDataError, MissingExtraError

FULL_SIZE = {"train": 5000, "test": 1000}
DATA = os.environ.get("MOMENTPROP_DATA", "")
pytestmark = pytest.mark.usefixtures("few_images")

BATCHES_IN_TAR = {f"cifar-10-batches-py/{name}": content for name, content in batch_files().items()}
COPIES: dict[str, Callable[[Path], Path]] = {
    "batches": write_batches,
    "tar.gz of batches": lambda folder: write_tar(folder / "cifar-10-python.tar.gz", BATCHES_IN_TAR),
    "PNG files": lambda folder: write(folder, image_files()),
    "PNG files below": lambda folder: write(folder / "CIFAR-10-images", image_files()),
    "tar.xz of PNG files": lambda folder: write_tar(folder / "cifar10-jpeg.tar.xz", image_files()),
    "JPEG files": lambda folder: write(folder, image_files("JPEG")),
    "tar.xz of JPEG files": lambda folder: write_tar(folder / "cifar10-jpeg.tar.xz", image_files("JPEG")),
    "tar.gz of JPEG files": lambda folder: write_tar(folder / "cifar10-jpeg.tar.gz", image_files("JPEG")),
}


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("split", ["train", "test"])
def test_every_copy(tmp_path: Path, kind: str, split: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    COPIES[kind](folder)
    for _ in range(2):  # decoded, then from the cache
        found = load_cifar10(split, folder)
        assert found.images.shape == (10 * PER_CLASS[split], 3, 32, 32)
        assert found.images.dtype == torch.uint8
        assert found.labels.dtype == torch.int64
        assert found.classes == CLASSES
        assert found.variant == ("JPEG re-encoding" if "JPEG" in kind else "original pixels")
        seen = [0] * 10
        for image, label in zip(found.images, found.labels.tolist(), strict=True):
            expected = torch.from_numpy(pixels(split, label, seen[label])).int()
            assert (image.int() - expected).abs().max() <= (6 if "JPEG" in kind else 0)
            seen[label] += 1
        if "batches" not in kind:
            assert found.labels.tolist() == sorted(found.labels.tolist())


def test_batches_keep_their_order(tmp_path: Path) -> None:
    write_batches(tmp_path)
    assert load_cifar10("train", tmp_path).labels.tolist() == 5 * list(reversed(range(10)))


def test_original_pixels_are_preferred(tmp_path: Path) -> None:
    COPIES["JPEG files"](tmp_path)
    assert load_cifar10("test", tmp_path).variant == "JPEG re-encoding"
    COPIES["tar.gz of batches"](tmp_path)
    assert load_cifar10("test", tmp_path).variant == "original pixels"


@pytest.mark.parametrize("name", ["pictures.tar.bz2", "cifar-10-batches-py"])
def test_a_path_may_be_the_copy_itself(tmp_path: Path, name: str) -> None:
    path = write_tar(tmp_path / name, image_files()) if "tar" in name else write_batches(tmp_path)
    assert len(load_cifar10("test", path).labels) == 20


def test_files_of_other_kinds_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path, image_files() | {"train/cat/._0000.png": b"", "train/cat/Thumbs.db": b"", "readme": b""})
    assert len(load_cifar10("train", tmp_path).labels) == 50


def test_the_cache_follows_the_source(tmp_path: Path, own_folders: Path) -> None:
    path = write(tmp_path / "data", image_files()) / "test" / "cat" / "0001.png"
    before = load_cifar10("test", tmp_path / "data").images
    shutil.copy(path.with_name("0000.png"), path)
    os.utime(path, (1, 1))  # a copy of the same size must be seen by its date
    after = load_cifar10("test", tmp_path / "data").images
    assert (before != after).flatten(1).any(1).nonzero().flatten().tolist() == [7]
    assert len(list(own_folders.glob("*.npz"))) == 4


def test_a_damaged_cache_is_decoded_again(tmp_path: Path, own_folders: Path) -> None:
    write(tmp_path / "data", image_files())
    before = load_cifar10("test", tmp_path / "data").images
    for path in own_folders.iterdir():
        path.write_bytes(path.read_bytes()[:-1000])
    assert torch.equal(before, load_cifar10("test", tmp_path / "data").images)


def test_an_own_cache(tmp_path: Path, own_folders: Path) -> None:
    write(tmp_path / "data", image_files())
    load_cifar10("test", tmp_path / "data", cache=tmp_path / "other")
    assert len(list((tmp_path / "other").iterdir())) == 2
    assert not own_folders.exists()


def damaged(name: str, folder: Path) -> str:
    """A copy with one fault; what the error has to say."""
    files = image_files()
    batches = batch_files()
    match name:
        case "truncated tar.xz" | "truncated tar.gz":
            kind = "tar.xz of JPEG files" if "xz" in name else "tar.gz of batches"
            path = COPIES[kind](folder)
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            return f"{path.name} is damaged or incomplete"
        case "tar cut between files":
            write_tar(folder / "cifar10-jpeg.tar.xz", dict(list(files.items())[:-3]))
            return r"each class has 5 train images, but there are 2 of airplane"
        case "no archive at all":
            (folder / "cifar10-jpeg.tar.xz").write_bytes(b"<html>not found</html>")
            return "is damaged or incomplete"
        case "archive of something else":
            write_tar(folder / "cifar10-jpeg.tar.xz", {"train/readme.txt": b"hello"})
            return "neither cifar-10-batches-py/ nor train"
        case "missing class folder":
            write(folder, {k: v for k, v in files.items() if not k.startswith("train/dog/")})
            return "there are 0 of dog"
        case "missing split":
            write(folder, {k: v for k, v in files.items() if k.startswith("train/")})
            return "each class has 2 test images, but there are 0 of airplane, 0 of"
        case "unknown class":
            write(folder, files | {"train/zebra/0000.png": files["train/dog/0000.png"]})
            return "train/zebra is not a class of CIFAR-10"
        case "text for an image":
            write(folder, files | {"train/dog/0002.jpg": b"This is not an image."})
            return r"train/dog/0002\.jpg is damaged or not an image"
        case "half an image":
            half = image_files("JPEG")["train/dog/0002.jpg"][:-200]
            write(folder, image_files("JPEG") | {"train/dog/0002.jpg": half})
            return r"train/dog/0002\.jpg is damaged or not an image"
        case "half a PNG":
            write(folder, files | {"train/dog/0002.png": files["train/dog/0002.png"][:60]})
            return r"train/dog/0002\.png is damaged or not an image"
        case "large image":
            from copies import encoded

            write(folder, files | {"train/dog/0002.png": encoded(np.zeros((3, 40, 32), np.uint8))})
            return "32x40, not 32x32"
        case "missing batch":
            write(folder / "cifar-10-batches-py", {k: v for k, v in batches.items() if k != "data_batch_3"})
            return "it has no data_batch_3"
        case "truncated batch":
            half = batches["data_batch_3"][:-500]
            write(folder / "cifar-10-batches-py", batches | {"data_batch_3": half})
            return "data_batch_3 is damaged"
    raise AssertionError(name)


@pytest.mark.parametrize(
    "name",
    [
        "truncated tar.xz",
        "truncated tar.gz",
        "tar cut between files",
        "no archive at all",
        "archive of something else",
        "missing class folder",
        "missing split",
        "unknown class",
        "text for an image",
        "half an image",
        "half a PNG",
        "large image",
        "missing batch",
        "truncated batch",
    ],
)
def test_damage_is_named_and_the_cache_stays(tmp_path: Path, own_folders: Path, name: str) -> None:
    write(tmp_path / "sound", image_files())
    load_cifar10("test", tmp_path / "sound")
    before = {path.name: path.read_bytes() for path in own_folders.iterdir()}
    (tmp_path / "damaged").mkdir()
    message = damaged(name, tmp_path / "damaged")
    with pytest.raises(DataError, match=message) as error:
        load_cifar10("test", tmp_path / "damaged")
    assert str(tmp_path / "damaged") in str(error.value)
    assert "momentprop data get cifar10" in str(error.value)
    assert {path.name: path.read_bytes() for path in own_folders.iterdir()} == before


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"cifar10 is not there.*momentprop data get cifar10"):
        load_cifar10("train", tmp_path)
    with pytest.raises(DataError, match="no split 'validation'"):
        load_cifar10("validation", tmp_path)


def test_says_that_pillow_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    write(tmp_path, image_files())
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'momentprop\[data\]'"):
        load_cifar10("train", tmp_path)


@pytest.mark.skipif(
    not (Path(DATA) / "cifar10-jpeg.tar.xz").exists(), reason="MOMENTPROP_DATA names no folder with CIFAR-10"
)
def test_the_copy_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    for split, count in FULL_SIZE.items():
        monkeypatch.setitem(cifar10_images.PER_CLASS, split, count)
    train, test = load_cifar10("train", DATA), load_cifar10("test", DATA)
    assert train.labels.bincount().tolist() == [5000] * 10
    assert test.labels.bincount().tolist() == [1000] * 10
    # the published means of the three channels; JPEG moves them by less than a thousandth
    means = (train.images.double() / 255).mean((0, 2, 3))
    torch.testing.assert_close(means, torch.tensor([0.4914, 0.4822, 0.4465]).double(), atol=1e-3, rtol=0)
