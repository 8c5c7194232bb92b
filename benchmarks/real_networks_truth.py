"""MC dropout of a published network, in files of a hundred samples, so that a run can go on later."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from predictives import Classes, Gaussian, Predictive, convergence
from real_networks_foreign import Foreign
from torch import Tensor, nn

import momentprop as mp
from momentprop.validation.equivalence import SIZES
from momentprop.validation.outputs import Layout

A_FILE = 100  # samples
LOOP = 300  # passes of the user's own module, beside which the samples are checked


class Probabilities(Classes):
    """Class probabilities, of samples that are probabilities already.

    Nothing has probability 0: a softmax in float32 says so of what is below 1e-38 or so.
    """

    def of_samples(self, samples: Tensor) -> Tensor:
        return samples.double().mean(-3).clamp_min(torch.finfo(torch.float32).tiny)


@dataclass(frozen=True)
class Truth:
    """Moments of the elements that are compared, and how fast the predictive of few samples converges."""

    layout: Layout
    mean: Tensor  # [inputs, elements]
    variance: Tensor
    kind: Predictive
    predictive: Tensor
    curve: dict[int, float]
    n_samples: int
    loop: dict[str, float]  # the plain loop's moments beside these

    @property
    def varies(self) -> Tensor:
        return _varies(self.variance)


def sample(network: Foreign, n_samples: int, cache: Path) -> Truth:
    """Take n samples for the truth, and half as many others for the convergence of small numbers."""
    layout = layout_of(network)
    cache = cache / _digest(network)
    cache.mkdir(parents=True, exist_ok=True)
    count = -(-n_samples // A_FILE)
    parts = [_part(network, layout, seed, cache) for seed in range(count + -(-count // 2))]
    values, rows = (torch.cat([p[i] for p in parts[:count]]) for i in (0, 1))
    mean, variance = values.double().mean(0), values.double().var(0)
    others = torch.cat([p[1] for p in parts[count:]])
    kind: Predictive = Probabilities()
    if not layout.is_classes:
        kind, known = Gaussian(), _varies(variance)
        rows, others = (part[:, known].unsqueeze(1) for part in (rows, others))
    predictive = kind.of_samples(rows)
    curve = convergence(kind, predictive, others, SIZES)
    loop = _loop(network, layout, mean, variance, cache)
    return Truth(layout, mean, variance, kind, predictive, curve, len(values), loop)


def _varies(variance: Tensor) -> Tensor:
    """Elements whose spread is above a thousandth of the largest, and so known."""
    return variance > 1e-6 * variance.max()


def layout_of(network: Foreign) -> Layout:
    """Say which elements are compared, and what is a distribution over classes."""
    with torch.no_grad():
        plain = network.model(*network.inputs)
    task = "classification" if network.head is not None else "regression"
    return Layout.of(plain, task, network.head)


def rows_of(layout: Layout, samples: Tensor) -> Tensor:
    """Samples as what their predictive is made of: probabilities [samples, rows, K], or numbers."""
    return layout.probabilities(samples).flatten(1, 2) if layout.is_classes else layout.values(samples)


def _part(network: Foreign, layout: Layout, seed: int, cache: Path) -> tuple[Tensor, Tensor]:
    path = cache / f"samples-{seed}.pt"
    if not path.exists():
        samples = _samples(network, seed)
        _save((layout.values(samples).clone(), rows_of(layout, samples).float().clone()), path)
    values, rows = torch.load(path, weights_only=True)
    return values, rows


def _samples(network: Foreign, seed: int) -> Tensor:
    """By `mp.monte_carlo`; by a plain loop where the network cannot be traced or unrolled."""
    try:
        samples: Tensor = mp.monte_carlo(
            network.model, network.inputs, A_FILE, seed, keep_samples=True
        ).samples
    except mp.MomentpropError:
        return _by_loop(network, A_FILE, seed + 1)
    return samples


def _by_loop(network: Foreign, count: int, seed: int) -> Tensor:
    """Outputs of the user's own module with its dropout on."""
    torch.manual_seed(seed)
    for part in network.model.modules():
        part.training = not isinstance(part, nn.modules.batchnorm._BatchNorm)
    with torch.no_grad():
        samples = torch.stack([network.model(*network.inputs) for _ in range(count)])
    network.model.eval()
    return samples


def _loop(network: Foreign, layout: Layout, mean: Tensor, variance: Tensor, cache: Path) -> dict[str, float]:
    """How far the moments of the user's own module, in a plain loop with its dropout on, are from these."""
    path = cache / "loop.pt"
    if not path.exists():
        _save(layout.values(_by_loop(network, LOOP, 0)), path)
    values = torch.load(path, weights_only=True).double()
    varies = _varies(variance)
    shift = ((values.mean(0) - mean)[varies].square() / variance[varies]).mean().sqrt().item()
    ratio = (values.var(0)[varies] / variance[varies]).sqrt().median().item()
    expected = (1 / LOOP + 1 / A_FILE / max(1, len(list(cache.glob("samples-*"))) * 2 // 3)) ** 0.5
    return {"passes": LOOP, "std_ratio": ratio, "mean_off_rms": shift, "mean_off_expected": expected}


def _digest(network: Foreign) -> str:
    digest = hashlib.sha256(str(network.head).encode())
    for tensor in (*network.model.state_dict().values(), *network.inputs):
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]


def _save(value: Any, path: Path) -> None:
    torch.save(value, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)
