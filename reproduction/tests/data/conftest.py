from pathlib import Path

import pytest

from copies import PER_CLASS
from momentprop_reproduction.data import images


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test sees the data or the cache of the machine, unless it asks for MOMENTPROP_DATA itself."""
    monkeypatch.delenv("MOMENTPROP_DATA", raising=False)
    monkeypatch.setenv("MOMENTPROP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """CIFAR-10 has 5 + 2 images of each class."""
    for split, count in PER_CLASS.items():
        monkeypatch.setitem(images.PER_CLASS, split, count)
