"""Where data is looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from copies import gal_folder, write
from momentprop_reproduction.data import load_uci
from momentprop_reproduction.data.errors import MissingDataError
from momentprop_reproduction.data.location import cache_folder, download_folder, search_path
from momentprop_reproduction.data.storing import write_arrays
from momentprop_reproduction.data.uci import read_gal_folder


def test_a_given_path_is_the_only_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOMENTPROP_DATA", str(tmp_path / "elsewhere"))
    assert search_path(tmp_path) == [tmp_path]


def test_the_variable_comes_before_the_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert search_path() == [download_folder()]
    monkeypatch.setenv("MOMENTPROP_DATA", str(tmp_path))
    assert search_path() == [tmp_path, download_folder()]
    arrays = read_gal_folder(write(tmp_path / "gal", gal_folder()))
    write_arrays(download_folder() / "uci" / "wine.npz", arrays)
    assert load_uci("wine").variant == "npz"
    write(tmp_path / "wine-quality-red" / "data", gal_folder())
    assert load_uci("wine").variant == "Gal's folder"


def test_a_named_folder_has_to_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingDataError, match=r"nowhere \(the given path\) does not exist"):
        search_path(tmp_path / "nowhere")
    monkeypatch.setenv("MOMENTPROP_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(MissingDataError, match=r"nowhere \(MOMENTPROP_DATA\) does not exist"):
        load_uci("yacht")


@pytest.mark.parametrize(
    ("platform", "expected"),
    [("linux", ".cache"), ("darwin", "Library/Caches"), ("win32", "AppData/Local")],
)
def test_the_cache_of_each_platform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str, expected: str
) -> None:
    for name in ("MOMENTPROP_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert cache_folder() == tmp_path / expected / "momentprop"
    monkeypatch.setenv("MOMENTPROP_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
