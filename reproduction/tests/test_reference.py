"""Networks trained and published by the paper's authors: our tier `paper` against their algorithm.

Their code is TensorFlow; here is its arithmetic for these networks once more, in NumPy and float64 and as
directly as it can be written: patches, a scan over each window from its last element to its first, and
the printed formulas with `- mean^2`. Nothing of the library is used in it.
"""

from __future__ import annotations

import math
import os
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import momentprop as mp

FOLDER = (
    Path(os.environ.get("MOMENTPROP_DATA", Path(__file__).parents[3] / "shared" / "data")) / "reference-cifar"
)
DROP = 0.3

needs_weights = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="the published weights are not here; set MOMENTPROP_DATA"
)


def pool_after_each() -> nn.Sequential:
    """The paper's CIFAR-10 network."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (16, 32, 64):
        layers += [
            nn.Conv2d(channels, width, 3, padding="same"),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(DROP),
        ]
        channels = width
    layers.append(nn.Flatten())
    features = 64 * 4 * 4
    for _ in range(2):
        layers += [nn.Linear(features, 128), nn.ReLU(), nn.Dropout(DROP)]
        features = 128
    return nn.Sequential(*layers, nn.Linear(128, 9)).eval()


def load(model: nn.Module, name: str) -> nn.Module:
    with np.load(FOLDER / f"{name}.npz") as weights:
        model.load_state_dict({k: torch.from_numpy(weights[k]) for k in weights.files})
    return model


def phi(x: np.ndarray) -> np.ndarray:
    return np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


Phi = np.vectorize(lambda x: 0.5 * math.erfc(-x / math.sqrt(2)))


def their_convolution(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    height, width = x.shape[2:]
    return sum(
        np.einsum("nchw,oc->nohw", padded[:, :, i : i + height, j : j + width], weight[:, :, i, j])
        for i, j in product(range(3), range(3))
    )


def their_relu(e: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    s = np.sqrt(np.maximum(v, 1e-14))
    a = e / s
    mean = e * Phi(a) + s * phi(a)
    return mean, (e * e + s * s) * Phi(a) + e * s * phi(a) - mean**2


def their_max(e1, v1, e2, v2):
    theta = np.sqrt(np.maximum(v1 + v2, 1e-14))
    a = (e1 - e2) / theta
    mean = e1 * Phi(a) + e2 * Phi(-a) + theta * phi(a)
    second = (v1 + e1**2) * Phi(a) + (v2 + e2**2) * Phi(-a) + (e1 + e2) * theta * phi(a)
    return mean, second - mean**2


def their_pool(e: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    windows = [(e[:, :, i::2, j::2], v[:, :, i::2, j::2]) for i, j in ((0, 0), (0, 1), (1, 0), (1, 1))]
    out = windows[3]
    for k in (2, 1, 0):
        out = their_max(*out, *windows[k])
    return out


def their_network(model: nn.Sequential, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """E and V of the logits. The variance is that of dropout without rescaling, then / (1-p)^2."""
    e, v = x, None
    scale = 1.0
    for layer in model:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            w, b = (p.detach().double().numpy() for p in (layer.weight, layer.bias))
            conv = isinstance(layer, nn.Conv2d)
            if v is not None:
                v = their_convolution(v, (w / scale) ** 2) if conv else v @ ((w / scale) ** 2).T
            e = their_convolution(e, w) + b[:, None, None] if conv else e @ w.T + b
            scale = 1.0
        elif isinstance(layer, nn.ReLU):
            e, v = (np.maximum(e, 0), None) if v is None else their_relu(e, v)
        elif isinstance(layer, nn.MaxPool2d):
            if v is None:
                e = np.maximum.reduce([e[:, :, i::2, j::2] for i, j in product((0, 1), (0, 1))])
            else:
                e, v = their_pool(e, v)
        elif isinstance(layer, nn.Dropout):
            old = 0.0 if v is None else v
            v = e**2 * DROP * (1 - DROP) + (1 - DROP) ** 2 * old + old * DROP * (1 - DROP)
            scale = 1 - DROP
        else:
            e, v = e.reshape(len(e), -1), v.reshape(len(v), -1)
    return e, v


@needs_weights
def test_paper_tier_is_the_authors_algorithm() -> None:
    """Logits' mean within 1e-3, variance within 1 % relative, in float32 on image-like inputs."""
    model = load(pool_after_each(), "pool_after_each")
    rng = np.random.default_rng(0)
    smooth = rng.random((12, 3, 8, 8)).repeat(4, axis=2).repeat(4, axis=3)
    images = np.clip(smooth + 0.1 * rng.standard_normal((12, 3, 32, 32)), 0, 1) * 2 - 1
    mean, variance = their_network(model, images)
    x = torch.from_numpy(images).float()
    out = mp.convert(model, x, fidelity="paper")(x)
    assert np.abs(out.mean.detach().numpy() - mean).max() < 1e-3
    assert np.abs(out.variance.detach().numpy() / variance - 1).max() < 1e-2


@needs_weights
def test_the_paper_understates_the_spread() -> None:
    """What the diagonal assumption costs on this network: about half the standard deviation."""
    model = load(pool_after_each(), "pool_after_each")
    x = torch.rand(8, 3, 8, 8).repeat_interleave(4, 2).repeat_interleave(4, 3) * 2 - 1
    mc = mp.monte_carlo(model, x, n_samples=500)
    ratio = (mp.convert(model, x, fidelity="paper")(x).std / mc.std).median().item()
    assert 0.3 < ratio < 0.7
