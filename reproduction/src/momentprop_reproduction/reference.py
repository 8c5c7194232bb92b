"""Networks that the paper's authors trained and published, ready to be named on a command line.

momentprop validate momentprop_reproduction.reference:pool_after_each --data images.npz
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from momentprop_reproduction.data.location import missing, search_path
from momentprop_reproduction.paper_network import network

_FOLDER = "reference-cifar"


def pool_after_each() -> nn.Sequential:
    """The paper's CIFAR-10 network for nine classes; weights from reference-cifar/ in MOMENTPROP_DATA."""
    model = network(9)
    places = search_path()
    for place in places:
        path = place / _FOLDER / "pool_after_each.npz"
        if path.is_file():
            with np.load(path, allow_pickle=False) as weights:
                model.load_state_dict({name: torch.from_numpy(weights[name]) for name in weights.files})
            return model.eval()
    raise missing(_FOLDER, [f"{_FOLDER}/pool_after_each.npz"], places)
