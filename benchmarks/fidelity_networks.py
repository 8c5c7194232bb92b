"""The networks of the fidelity benchmark, each with its inputs and the number of samples taken as truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from fidelity_training import UCI, dense_network, toy_network, uci_network
from images import DATA, first_of_each_class
from torch import Tensor, nn
from wide_resnet import trained_wide_resnet

DROP = 0.3


@dataclass(frozen=True)
class Case:
    """One or several networks (trained from different seeds), whose results are pooled."""

    name: str
    members: list[tuple[nn.Module, Tensor]]  # network and inputs
    has_classes: bool  # outputs are logits
    n_reference: int  # samples of converged MC dropout
    n_independent: int  # further samples, to see how MC dropout converges

    @property
    def n_inputs(self) -> int:
        return sum(len(x) for _, x in self.members)


def pool_after_each(batch_norm: bool = False, n_outputs: int = 9) -> nn.Sequential:
    """The paper's CIFAR-10 network."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (16, 32, 64):
        norm = [nn.BatchNorm2d(width, eps=1e-3)] if batch_norm else []
        layers += [nn.Conv2d(channels, width, 3, padding="same"), nn.ReLU(), *norm]
        layers += [nn.MaxPool2d(2), nn.Dropout(DROP)]
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), *_dense(64 * 4 * 4, 128, n_outputs)).eval()


def two_conv_blocks_bn() -> nn.Sequential:
    layers: list[nn.Module] = []
    channels = 3
    for width in (8, 16):
        for _ in range(2):
            layers += [nn.Conv2d(channels, width, 3, padding="same"), nn.ReLU()]
            layers += [nn.BatchNorm2d(width, eps=1e-3), nn.Dropout(DROP)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), *_dense(16 * 8 * 8, 100, 9)).eval()


def _dense(features: int, width: int, n_outputs: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for _ in range(2):
        layers += [nn.Linear(features, width), nn.ReLU(), nn.Dropout(DROP)]
        features = width
    return [*layers, nn.Linear(width, n_outputs)]


def first_output(model: nn.Sequential) -> nn.Sequential:
    """The network cut to its first output."""
    last = model[-1]
    assert isinstance(last, nn.Linear)
    head = nn.Linear(last.in_features, 1)
    with torch.no_grad():
        head.weight.copy_(last.weight[:1])
        head.bias.copy_(last.bias[:1])
    return nn.Sequential(*list(model)[:-1], head).eval()


def load_case(name: str, quick: bool) -> Case:
    """Training what is not in the cache."""
    return _LOADERS[name](name, quick)


def _published(build: Callable[[], nn.Module], name: str, quick: bool) -> Case:
    path = DATA / "reference-cifar" / f"{name}.npz"
    if not path.exists():
        raise SystemExit(f"reference-cifar/{path.name} is not in MOMENTPROP_DATA")
    model = build()
    with np.load(path) as weights:
        model.load_state_dict({k: torch.from_numpy(weights[k]) for k in weights.files})
    images, _ = first_of_each_class("test", 3 if quick else 50)
    return Case(name, [(model, images)], True, *((400, 400) if quick else (4000, 4000)))


def _wide_resnet(name: str, quick: bool) -> Case:
    images, _ = first_of_each_class("test", 2 if quick else 10)
    return Case(name, [(trained_wide_resnet(), images)], True, *((400, 400) if quick else (4000, 2000)))


def _toy(name: str, quick: bool) -> Case:
    return Case(name, [toy_network(quick)], False, *((400, 400) if quick else (20_000, 4000)))


def _deep(residual: bool, name: str, quick: bool) -> Case:
    members = [dense_network(residual, seed, quick) for seed in range(1 if quick else 3)]
    return Case(name, members, False, *((400, 400) if quick else (10_000, 4000)))


def _uci(name: str, quick: bool) -> Case:
    member = uci_network(name.removeprefix("uci_"), quick)
    return Case(name, [member], False, *((400, 400) if quick else (20_000, 4000)))


_LOADERS: dict[str, Callable[[str, bool], Case]] = {
    "pool_after_each": partial(_published, pool_after_each),
    "pool_after_each_bn": partial(_published, partial(pool_after_each, True)),
    "two_conv_blocks_bn": partial(_published, two_conv_blocks_bn),
    "toy_3x256": _toy,
    "dense_16": partial(_deep, False),
    "dense_16_residual": partial(_deep, True),
    "wide_resnet": _wide_resnet,
    **{f"uci_{name}": _uci for name in UCI},
}
NETWORKS = tuple(_LOADERS)
QUICK = tuple(name for name in NETWORKS if name not in ("wide_resnet", *(f"uci_{n}" for n in list(UCI)[2:])))
