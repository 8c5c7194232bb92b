"""Files are whole or not there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from momentprop.errors import DataError
from momentprop_reproduction.data.storing import read_arrays, replacing, write_arrays


def test_arrays_come_back(tmp_path: Path) -> None:
    arrays = {"a": np.arange(6).reshape(2, 3), "text": np.array("words")}
    for compressed in (False, True):
        write_arrays(tmp_path / "x.npz", arrays, compressed=compressed)
        found = read_arrays(tmp_path / "x.npz", "")
        assert found.keys() == arrays.keys()
        assert all(np.array_equal(found[key], arrays[key]) for key in arrays)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_while_writing_leaves_the_file(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")

    def fail() -> None:
        with replacing(path) as file:
            file.write(b"half of")
            raise error

    with pytest.raises(error):
        fail()
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    with replacing(path) as file:
        file.write(b"after")
        file.flush()
        assert path.read_bytes() == b"before"
    assert path.read_bytes() == b"after"


def test_objects_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Object arrays cannot be saved"):
        write_arrays(tmp_path / "x.npz", {"a": np.array([print], dtype=object)})
    assert list(tmp_path.iterdir()) == []


def test_other_files_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(DataError, match="holds a single array"):
        read_arrays(tmp_path / "one.npy", "get another")
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(DataError, match=r"text\.npz is damaged.*get another"):
        read_arrays(tmp_path / "text.npz", "get another")
