"""Lets torchvision's models import where its compiled operators do not load; or breaks their import."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

_LIBRARIES: list[torch.library.Library] = []


def prepare() -> None:
    """Import torchvision; where its compiled part does not load, declare the operators its import asks for.

    The ordinary wheel is linked against CUDA, so with a CPU build of torch its library of operators (NMS and
    other box operations) stays unloaded and the import fails at their registration. The classification and
    segmentation networks call none of them. transformers and others try to import torchvision too wherever it
    is installed.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES.append(library)  # declarations live as long as this object
        importlib.import_module("torchvision")


def unfit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a torchvision built for another torch, for whatever tries to import it."""
    (folder / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(folder)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("torchvision", "torchmetrics")]:
        monkeypatch.delitem(sys.modules, name)
