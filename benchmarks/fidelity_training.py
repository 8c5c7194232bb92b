"""The regression networks of the fidelity benchmark, trained from a seed, once, and their test inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from images import CACHE, DATA
from torch import Tensor, nn

from momentprop_reproduction.demo import toy
from momentprop_reproduction.running.training import fit, seeded

# drop probability by set: what the protocol's grid search tends to choose
UCI = {"naval": 0.005, "energy": 0.01, "yacht": 0.01, "boston": 0.05, "kin8nm": 0.005}
LENGTHSCALE = 0.01


class Residual(nn.Module):
    """x + relu(linear(dropout(x)))."""

    def __init__(self, width: int, drop_probability: float) -> None:
        super().__init__()
        self.dropout, self.linear = nn.Dropout(drop_probability), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.linear(self.dropout(x)))


def toy_network(quick: bool, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """The paper's toy, as trained by `momentprop demo`; inputs inside and outside the training range."""
    low, high = toy.TRAINING_RANGE
    epochs = 200 if quick else 2000

    def standardized(x: Tensor) -> Tensor:
        return (x - (low + high) / 2) / ((high - low) / 12**0.5)

    def train(model: nn.Module) -> None:
        x = low + (high - low) * torch.rand(200, 1)
        y = toy.curve(x) + toy.NOISE * torch.randn(200, 1)
        fit(model, F.mse_loss, standardized(x), y, epochs=epochs, batch_size=200, learning_rate=3e-3)

    model = _trained(f"toy_3x256-seed{seed}-epochs{epochs}", seed, toy.network, train)
    return model, standardized(torch.linspace(*toy.GRID_RANGE, 200).unsqueeze(1))


def dense_network(residual: bool, seed: int, quick: bool) -> tuple[nn.Module, Tensor]:
    """16 hidden layers of 128, dropout 0.1 before every layer but the first, one input and one output."""
    width, p, steps = 128, 0.1, 300 if quick else 1500

    def build() -> nn.Module:
        layers: list[nn.Module] = [nn.Linear(1, width), nn.ReLU()]
        for _ in range(15):
            plain = [nn.Dropout(p), nn.Linear(width, width), nn.ReLU()]
            layers += [Residual(width, p)] if residual else plain
        return nn.Sequential(*layers, nn.Dropout(p), nn.Linear(width, 1))

    def train(model: nn.Module) -> None:
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        for _ in range(steps):
            x = 4 * torch.rand(128, 1) - 2
            y = torch.sin(3 * x) + 0.3 * x + 0.1 * torch.randn_like(x)
            _step(optimizer, F.mse_loss(model(x), y))

    name = f"dense_16{'_residual' * residual}-seed{seed}-steps{steps}"
    return _trained(name, seed, build, train), torch.linspace(-2, 2, 100).unsqueeze(1)


def uci_network(name: str, quick: bool, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """One hidden layer of 50 after Gal & Ghahramani, on the first of the standard splits."""
    path = DATA / "uci" / f"{name}.npz"
    if not path.exists():
        raise SystemExit(f"uci/{path.name} is not in MOMENTPROP_DATA")
    with np.load(path) as data:
        features, target = (torch.from_numpy(data[k]).double() for k in ("features", "target"))
        train_index, test_index = (torch.from_numpy(data[k]).long() for k in ("train_0", "test_0"))
        tau = float(sorted(data["tau_values"])[1])
    p, epochs = UCI[name], 40 if quick else 400
    inputs, y = features[train_index], target[train_index]
    mean, std = inputs.mean(0), inputs.std(0, correction=0)
    std = torch.where(std <= 1e-9 * mean.abs(), 1.0, std)  # naval has constant features
    x = ((inputs - mean) / std).float()
    y = ((y - y.mean()) / y.std(correction=0)).float().unsqueeze(1)
    # Keras adds reg |W|^2 to the loss; Adam adds weight_decay W to the gradient
    reg = LENGTHSCALE**2 * (1 - p) / (2 * len(x) * tau)

    def build() -> nn.Module:
        hidden = [nn.Dropout(p), nn.Linear(x.shape[1], 50), nn.ReLU()]
        return nn.Sequential(*hidden, nn.Dropout(p), nn.Linear(50, 1))

    def train(model: nn.Module) -> None:
        groups: list[dict[str, Any]] = [
            {"params": [v for k, v in model.named_parameters() if k.endswith("weight")]},
            {"params": [v for k, v in model.named_parameters() if k.endswith("bias")], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.Adam(groups, 1e-3, weight_decay=2 * reg)
        for _ in range(epochs):
            for batch in torch.randperm(len(x)).split(128):
                _step(optimizer, F.mse_loss(model(x[batch]), y[batch]))

    model = _trained(f"uci_{name}-seed{seed}-p{p}-epochs{epochs}", seed, build, train)
    return model, ((features[test_index] - mean) / std).float()[:200]


def _trained(
    name: str, seed: int, build: Callable[[], nn.Module], train: Callable[[nn.Module], None]
) -> nn.Module:
    path = CACHE / "fidelity" / f"{name}.pt"
    with seeded(seed):
        model = build()
        if path.exists():
            model.load_state_dict(torch.load(path, weights_only=True))
        else:
            train(model.train())
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(model.state_dict(), path.with_suffix(".tmp"))
            path.with_suffix(".tmp").rename(path)
    return model.eval()


def _step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
