"""Lets torchvision's models import where its compiled operators do not load."""

from __future__ import annotations

import importlib
import importlib.util
import sys

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
