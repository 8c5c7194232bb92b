"""A catalogue of small real dropout networks: public architectures from tiny configurations, random weights.

`load(name)` gives (model in eval mode, inputs as `mp.convert` takes them). Packages are imported only when a
model that needs them is built.
"""

from __future__ import annotations

import importlib

import torch

import vision
from catalogue import ZOO, Built

FAMILIES = (
    "zoo_dense",
    "zoo_recurrent",
    "zoo_attention",
    "zoo_images",
    "zoo_torchvision",
    "zoo_text",
    "zoo_signals",
    "zoo_timm",
    "zoo_segmentation",
    "zoo_monai",
)

for _family in FAMILIES:
    importlib.import_module(_family)


def load(name: str) -> Built:
    """The network in eval mode and its inputs; the same numbers every time."""
    entry = ZOO[name]
    if entry.needs:
        vision.prepare()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, inputs = entry.build()
    return model.eval(), inputs
