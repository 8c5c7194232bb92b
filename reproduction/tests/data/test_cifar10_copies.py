"""CIFAR-10: every kind of copy gives the same images; damage is named, and leaves the cache as it was."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from copies import PER_CLASS, batch_files, encoded, image_files, pixels, write, write_batches, write_tar
from momentprop.errors import DataError
from momentprop_reproduction.data import images as cifar10_images
from momentprop_reproduction.data import load_cifar10
from momentprop_reproduction.data.errors import MissingDataError
from momentprop_reproduction.data.images import CLASSES

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


FILES = image_files()
JPEG = image_files("JPEG")
BATCHES = batch_files()


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def write_faulty_batches(folder: Path, files: dict[str, bytes]) -> None:
    write(folder / "cifar-10-batches-py", files)


# copies with one fault, and what the error has to say
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated tar.xz": (
        lambda folder: halve(COPIES["tar.xz of JPEG files"](folder)),
        "cifar10-jpeg.tar.xz is damaged or incomplete",
    ),
    "truncated tar.gz": (
        lambda folder: halve(COPIES["tar.gz of batches"](folder)),
        "cifar-10-python.tar.gz is damaged or incomplete",
    ),
    "tar cut between files": (
        lambda folder: write_tar(folder / "cifar10-jpeg.tar.xz", dict(list(FILES.items())[:-3])),
        r"each class has 5 train images, but there are 2 of airplane",
    ),
    "no archive at all": (
        lambda folder: (folder / "cifar10-jpeg.tar.xz").write_bytes(b"<html>not found</html>"),
        "is damaged or incomplete",
    ),
    "archive of something else": (
        lambda folder: write_tar(folder / "cifar10-jpeg.tar.xz", {"train/readme.txt": b"hello"}),
        "neither cifar-10-batches-py/ nor train",
    ),
    "missing class folder": (
        lambda folder: write(folder, {k: v for k, v in FILES.items() if not k.startswith("train/dog/")}),
        "there are 0 of dog",
    ),
    "missing split": (
        lambda folder: write(folder, {k: v for k, v in FILES.items() if k.startswith("train/")}),
        "each class has 2 test images, but there are 0 of airplane, 0 of",
    ),
    "unknown class": (
        lambda folder: write(folder, FILES | {"train/zebra/0000.png": FILES["train/dog/0000.png"]}),
        "train/zebra is not a class of CIFAR-10",
    ),
    "text for an image": (
        lambda folder: write(folder, FILES | {"train/dog/0002.jpg": b"This is not an image."}),
        r"train/dog/0002\.jpg is damaged or not an image",
    ),
    "half an image": (
        lambda folder: write(folder, JPEG | {"train/dog/0002.jpg": JPEG["train/dog/0002.jpg"][:-200]}),
        r"train/dog/0002\.jpg is damaged or not an image",
    ),
    "half a PNG": (
        lambda folder: write(folder, FILES | {"train/dog/0002.png": FILES["train/dog/0002.png"][:60]}),
        r"train/dog/0002\.png is damaged or not an image",
    ),
    "large image": (
        lambda folder: write(
            folder, FILES | {"train/dog/0002.png": encoded(np.zeros((3, 40, 32), np.uint8))}
        ),
        "32x40, not 32x32",
    ),
    "missing batch": (
        lambda folder: write_faulty_batches(
            folder, {k: v for k, v in BATCHES.items() if k != "data_batch_3"}
        ),
        "it has no data_batch_3",
    ),
    "truncated batch": (
        lambda folder: write_faulty_batches(
            folder, BATCHES | {"data_batch_3": BATCHES["data_batch_3"][:-500]}
        ),
        "data_batch_3 is damaged",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_and_the_cache_stays(tmp_path: Path, own_folders: Path, name: str) -> None:
    write(tmp_path / "sound", image_files())
    load_cifar10("test", tmp_path / "sound")
    before = {path.name: path.read_bytes() for path in own_folders.iterdir()}
    (tmp_path / "damaged").mkdir()
    damage, message = DAMAGE[name]
    damage(tmp_path / "damaged")
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
