"""The batches' unpickler: reads what Python 2 and numpy wrote, and runs nothing."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from copies import batch_files, pickled, write
from momentprop.errors import DataError
from momentprop_reproduction.data import load_cifar10
from momentprop_reproduction.data.batches import read_pickle

# the file of that name as it is published (158 bytes, MD5 5ff9c542aee3614f3951f8cda6e48888)
BATCHES_META = bytes.fromhex(
    "80027d71012855136e756d5f63617365735f7065725f626174636871024d1027550b6c6162656c5f6e616d657371035d7104"
    "285508616972706c616e657105550a6175746f6d6f62696c6571065504626972647107550363617471085504646565727109"
    "5503646f67710a550466726f67710b5505686f727365710c550473686970710d5505747275636b710e6555076e756d5f7669"
    "73710f4d000c752e"
)
ROWS = np.arange(12, dtype=np.uint8).reshape(2, 6)


def names_in(content: bytes) -> set[str]:
    return {str(argument) for opcode, argument, _ in pickletools.genops(content) if opcode.name == "GLOBAL"}


def test_the_published_file() -> None:
    content = read_pickle(BATCHES_META, "batches.meta")
    assert content[b"label_names"][:3] == [b"airplane", b"automobile", b"bird"]
    assert content[b"num_vis"] == 3072


def test_the_copies_of_the_tests_are_like_the_published_ones() -> None:
    assert names_in(batch_files()["data_batch_1"]) == {
        "numpy.core.multiarray _reconstruct",
        "numpy ndarray",
        "numpy dtype",
    }


@pytest.mark.parametrize("array", [ROWS, np.asfortranarray(ROWS), ROWS[:0]], ids=["rows", "columns", "empty"])
def test_arrays_of_bytes(array: np.ndarray) -> None:
    found = read_pickle(pickled({"data": array}), "")[b"data"].values
    assert np.array_equal(found, array)
    assert found.shape == array.shape


def test_arrays_pickled_by_python_3() -> None:
    content = pickle.dumps({b"data": ROWS}, protocol=4)
    assert np.array_equal(read_pickle(content, "")[b"data"].values, ROWS)


class Calls:
    """Unpickling it calls a function."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("function", [os.mkdir, eval, getattr, np.load, np.frombuffer, io.open])
def test_every_other_name_is_refused(tmp_path: Path, function: Callable[..., object], protocol: int) -> None:
    trap = str(tmp_path / "sprung")
    argument = f"__import__('os').mkdir({trap!r})" if function is eval else trap
    content = pickle.dumps({"labels": [1], "data": Calls(function, argument)}, protocol)
    with pytest.raises(DataError, match=rf"asks for [\w.]+\.{function.__name__}, which no batch"):
        read_pickle(content, "data_batch_1")
    assert not Path(trap).exists()


def test_a_malicious_copy(tmp_path: Path) -> None:
    trap = pickle.dumps({"data": Calls(os.mkdir, str(tmp_path / "sprung"))}, 2)
    write(tmp_path / "cifar-10-batches-py", batch_files() | {"test_batch": trap})
    with pytest.raises(DataError, match=r"cifar-10-batches-py: test_batch asks for (posix|nt)\.mkdir"):
        load_cifar10("test", tmp_path)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    "array",
    [np.zeros(3), np.array([print], dtype=object), np.zeros(2, dtype=[("a", "u1")])],
    ids=["floats", "objects", "records"],
)
def test_other_arrays_are_refused(array: np.ndarray) -> None:
    with pytest.raises(DataError, match=r"where the images are bytes"):
        read_pickle(pickled({"data": array}), "data_batch_1")


def test_a_number_that_would_fill_the_memory_is_refused() -> None:
    with pytest.raises(DataError, match="numbers its objects as no pickler does"):
        read_pickle(pickle.PROTO + b"\x02}" + pickle.LONG_BINPUT + b"\xff\xff\xff\x7f.", "data_batch_1")


def readable(content: bytes) -> bool:
    """Whether it gives a dictionary. Otherwise it must give the error for damage, and no other."""
    try:
        value = read_pickle(content, "file")
    except DataError:
        return False
    return isinstance(value, dict)


@given(st.binary(max_size=200))
def test_no_bytes_are_mistaken_for_a_batch(content: bytes) -> None:
    assert not readable(content) or b"." in content  # a pickle ends with a dot


@given(st.data())
def test_a_changed_batch_is_read_or_refused(data: st.DataObject) -> None:
    content = bytearray(pickled({"labels": [0, 1], "data": ROWS}))
    assert readable(bytes(content))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    readable(bytes(content))
