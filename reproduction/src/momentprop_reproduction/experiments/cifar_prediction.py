"""Predictions of trained CIFAR-10 networks on the test images: by every method, and by many samples.

This is where evaluation spends its time: MC dropout takes 20 seconds for 1,000 passes of 1,000 images.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import momentprop as mp
from momentprop_reproduction.data import load_cifar10
from momentprop_reproduction.paper_network import KNOWN, known_labels, network, normalize
from momentprop_reproduction.running.units import Workspace

METHODS = ("NN", "MC", "paper", "accurate")
_AT_ONCE = 100  # images whose moments stay in the cache


def has_compiler() -> bool:
    """Say whether torch.compile finds a C++ compiler; compiled, MC dropout takes half as long."""
    return shutil.which(os.environ.get("CXX", "g++")) is not None


@dataclass(frozen=True)
class SamplingSettings:
    """Says how often networks are sampled.

    All T passes of a repetition are new ones; so are those of the truth, which is the mean over all
    repetitions.
    """

    n_samples: int = 50  # of MC as a method
    sizes: tuple[int, ...] = (*range(1, 21), 25, 30, 35, 40, 50, 60, 70, 80, 90, 100, 125, 150, 175, 200)
    n_repetitions: int = 20
    n_test: int = 0  # of the test images, 0 for all
    compile: bool = field(default_factory=has_compiler)

    @property
    def truth_samples(self) -> int:
        return self.n_repetitions * self.sizes[-1]


def predict(
    workspace: Workspace,
    *,
    network_of: str,
    setting: str,
    seed: int,
    n_samples: int,
    n_test: int,
    compile: bool,
    root: Path | None = None,
) -> dict[str, Any]:
    """The unit of work: log-probabilities [images, classes] of every method, saved with the labels."""
    images, labels, variant = _test_images(setting, n_test, root)
    model = _trained(workspace, network_of, setting)
    example = normalize(images[:2])
    tiers = {tier: mp.convert(model, example, tier) for tier in ("paper", "accurate")}
    found: dict[str, list[Tensor]] = {name: [] for name in METHODS}
    with torch.no_grad():
        for i, part in enumerate(images.split(_AT_ONCE)):
            x = normalize(part)
            sampled = mp.monte_carlo(
                tiers["paper"], x, n_samples, _stream(seed, 0, i), keep_samples=True, compile=compile
            )
            outputs = {"NN": model(x), "MC": sampled} | {tier: bnn(x) for tier, bnn in tiers.items()}
            for name, output in outputs.items():
                method = "paper" if name == "paper" else "integrate"
                found[name].append(mp.classify(output, method).log_probs)
            workspace.report((i + 1) * _AT_ONCE, len(images))
    workspace.save(
        "log_probs", {name: torch.cat(parts) for name, parts in found.items()} | {"labels": labels}
    )
    return {"variant": variant, "n_test": len(images)}


def sample(
    workspace: Workspace,
    *,
    network_of: str,
    setting: str,
    seed: int,
    shard: int,
    n_shards: int,
    sampling: SamplingSettings,
    root: Path | None = None,
) -> dict[str, Any]:
    """The unit of work: entropies by T samples, for every T and repetition, and log-probabilities by all.

    Repetitions have no sample in common. Of one repetition, the first T samples count for each T. The images
    are every n-th of the test images, from `shard` on.
    """
    images, _, _ = _test_images(setting, sampling.n_test, root)
    model = _trained(workspace, network_of, setting)
    bnn = mp.convert(model, normalize(images[:2]), "paper")
    parts = images[shard::n_shards].split(_AT_ONCE)
    sizes = torch.tensor(sampling.sizes)
    entropies, log_probs = [], []
    for i, part in enumerate(parts):
        x, total, rows = normalize(part), torch.zeros(()), []
        for repetition in range(sampling.n_repetitions):
            stream = _stream(seed, 1 + shard * len(parts) + i, repetition)
            drawn = mp.monte_carlo(
                bnn, x, sampling.sizes[-1], stream, keep_samples=True, compile=sampling.compile
            )
            sums = drawn.samples.double().softmax(-1).cumsum(0)
            mean = sums[sizes - 1] / sizes[:, None, None]
            rows.append(torch.special.entr(mean).sum(-1).float())
            total = total + sums[-1]
            workspace.report(i * sampling.n_repetitions + repetition + 1, len(parts) * sampling.n_repetitions)
        entropies.append(torch.stack(rows))
        log_probs.append((total / sampling.truth_samples).log().float())
    workspace.save("samples", {"entropy": torch.cat(entropies, -1), "log_probs": torch.cat(log_probs)})
    return {"n_images": sum(map(len, parts)), "truth_samples": sampling.truth_samples}


def gather(workspaces: list[Workspace]) -> tuple[Tensor, Tensor]:
    """Join what all shards saved, in the images' order: entropies [repetitions, sizes, n] and log-probs."""
    shards = [shard for w in workspaces if (shard := w.load("samples")) is not None]
    if len(shards) < len(workspaces):
        raise FileNotFoundError(
            f"{len(workspaces) - len(shards)} of {len(workspaces)} shards have no samples"
        )
    n, first = sum(len(s["log_probs"]) for s in shards), shards[0]
    entropy = first["entropy"].new_empty(*first["entropy"].shape[:2], n)
    log_probs = first["log_probs"].new_empty(n, first["log_probs"].shape[1])
    for i, shard in enumerate(shards):
        entropy[..., i :: len(shards)] = shard["entropy"]
        log_probs[i :: len(shards)] = shard["log_probs"]
    return entropy, log_probs


def _test_images(setting: str, n_test: int, root: Path | None) -> tuple[Tensor, Tensor, str]:
    """Test images with their labels among the known classes, -1 for novel ones."""
    data = load_cifar10("test", root)
    images, labels = data.images, known_labels(data.labels, data.classes, setting)
    if n_test:  # spread over the set, which may be sorted by class
        chosen = torch.linspace(0, len(images) - 1, n_test).long()
        images, labels = images[chosen], labels[chosen]
    return images, labels, data.variant


def _trained(workspace: Workspace, unit: str, setting: str) -> nn.Sequential:
    model = network(len(KNOWN[setting]))
    weights = workspace.of(unit).load("weights")
    if weights is None:
        raise FileNotFoundError(f"{unit} has saved no weights")
    model.load_state_dict(weights)
    return model.eval()


def _stream(seed: int, part: int, repetition: int) -> int:
    """Seeds of masks: none serves two networks, parts of the images, or repetitions."""
    return (seed * 1_000 + part) * 1_000 + repetition
