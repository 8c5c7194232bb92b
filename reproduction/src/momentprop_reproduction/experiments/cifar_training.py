"""Trains as in the paper: NLL, the learning rate x 0.85 on plateaus, early stopping with the best weights.

Optimiser (Adam, 0.001), batch size (512) and initialisation are not in the paper; they are those of the
authors' published notebook. That notebook itself trains for 50 epochs at a constant rate on 60 % of nine
classes; where it differs from the paper, the paper is followed: 80 %, plateaus and early stopping.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from momentprop_reproduction.data import load_cifar10
from momentprop_reproduction.paper_network import (
    KNOWN,
    for_training,
    initialize,
    known_labels,
    network,
    normalize,
)
from momentprop_reproduction.running.training import seeded
from momentprop_reproduction.running.units import Workspace

_PART = 128  # images whose activations stay in the cache: a batch of 512 at once takes a fifth longer
_EVERY = 4  # epochs between two checkpoints
_LARGE = 1_000_003  # streams of random numbers of seeds apart from each other


@dataclass(frozen=True)
class TrainingSettings:
    """Holds what the weights depend on, besides data, classes and seed."""

    batch_size: int = 512
    learning_rate: float = 1e-3
    factor: float = 0.85  # of the learning rate
    patience: int = 5  # epochs without improvement before that
    stop_after: int = 10  # epochs without improvement
    max_epochs: int = 250
    validation_share: float = 0.2
    n_images: int = 0  # of the training set, 0 for all
    split_seed: int = 0  # one split for all members of an ensemble, which differ in weights, order and masks


@dataclass
class Schedule:
    """Holds what the validation NLL has decided so far.

    Both counts are Keras's: an epoch that is not the best so far counts, and a reduction starts its own
    count again.
    """

    learning_rate: float
    best: float = float("inf")
    best_epoch: int = 0
    since_best: int = 0
    since_reduction: int = 0
    history: dict[str, list[float]] = field(
        default_factory=lambda: {"train_nll": [], "validation_nll": [], "learning_rate": []}
    )

    def step(self, train_nll: float, validation_nll: float, settings: TrainingSettings) -> bool:
        """Take in one epoch; whether it is the best so far."""
        for name, value in (
            ("train_nll", train_nll),
            ("validation_nll", validation_nll),
            ("learning_rate", self.learning_rate),
        ):
            self.history[name].append(value)
        if validation_nll < self.best:
            self.best, self.best_epoch = validation_nll, self.epoch
            self.since_best = self.since_reduction = 0
            return True
        self.since_best += 1
        self.since_reduction += 1
        if self.since_reduction >= settings.patience:
            self.learning_rate *= settings.factor
            self.since_reduction = 0
        return False

    @property
    def epoch(self) -> int:
        """Count the epochs done."""
        return len(self.history["train_nll"])

    def ends(self, settings: TrainingSettings) -> bool:
        return self.since_best >= settings.stop_after or self.epoch >= settings.max_epochs


def train(
    workspace: Workspace,
    *,
    setting: str,
    seed: int,
    training: TrainingSettings,
    root: Path | None = None,
) -> dict[str, Any]:
    """The unit of work: one network. Saves `weights`; a checkpoint every few epochs, to go on from.

    Every epoch has random numbers of its own, so that an interrupted training ends with the same weights.
    """
    images, labels, variant = _known_images(setting, training, root)
    n_held = round(training.validation_share * len(images))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(training.split_seed))
    held, used = order[:n_held], order[n_held:]
    validation, shown = (images[held], labels[held]), (images[used], labels[used])

    with seeded(seed * _LARGE):
        model = network(len(KNOWN[setting]))
        initialize(model)
    fitted = _Fit(model, training)
    fitted.load(workspace)
    schedule = fitted.schedule
    while not schedule.ends(training):
        with seeded(seed * _LARGE + schedule.epoch + 1):
            train_nll = fitted.epoch(*shown)
        validation_nll = _validation(model, *validation)[0]
        if schedule.step(train_nll, validation_nll, training):
            fitted.keep_best()
        if schedule.epoch % _EVERY == 0:
            fitted.save(workspace)
        workspace.report(schedule.epoch, training.max_epochs, f"validation NLL {validation_nll:.3f}")
    model.load_state_dict(fitted.best)
    workspace.save("weights", model.state_dict())
    fitted.forget(workspace)
    nll, accuracy = _validation(model, *validation)
    return {
        "setting": setting,
        "seed": seed,
        "variant": variant,
        "n_train": len(used),
        "n_validation": len(held),
        "epochs": schedule.epoch,
        "best_epoch": schedule.best_epoch,
        "stopped_early": schedule.epoch < training.max_epochs,
        "validation_nll": nll,
        "validation_accuracy": accuracy,
        "history": schedule.history,
    }


class _Fit:
    """A network while it is trained: optimiser, schedule, best weights so far, and their checkpoint."""

    def __init__(self, model: nn.Sequential, settings: TrainingSettings) -> None:
        self.model, self.fast, self.settings = model, for_training(model), settings
        self.schedule = Schedule(settings.learning_rate)
        # Keras's epsilon, not PyTorch's 1e-8
        self.optimizer = torch.optim.Adam(model.parameters(), settings.learning_rate, eps=1e-7, fused=True)
        self.keep_best()

    def epoch(self, images: Tensor, labels: Tensor) -> float:
        """Train for one pass over the data; return the mean NLL over it."""
        self.optimizer.param_groups[0]["lr"] = self.schedule.learning_rate
        self.fast.train()
        total = 0.0
        for batch in torch.randperm(len(images)).split(self.settings.batch_size):
            self.optimizer.zero_grad()
            for part in batch.split(_PART):
                with torch.enable_grad():
                    loss = F.cross_entropy(self.fast(_inputs(images[part])), labels[part], reduction="sum")
                    (loss / len(batch)).backward()
                total += loss.item()
            self.optimizer.step()
        self.fast.eval()
        return total / len(images)

    def keep_best(self) -> None:
        self.best = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def save(self, workspace: Workspace) -> None:
        tensors = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        tensors |= {f"best.{k}": v for k, v in self.best.items()}
        for i, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"adam.{i}.{k}": v for k, v in state.items()}
        # infinity is no JSON, and before the first epoch there is nothing to save
        workspace.save("checkpoint", tensors, schedule=asdict(self.schedule))

    def load(self, workspace: Workspace) -> None:
        tensors = workspace.load("checkpoint")
        if tensors is None:
            return
        self.model.load_state_dict(_under("model.", tensors))
        self.best = _under("best.", tensors)
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in _under("adam.", tensors).items():
            i, key = name.split(".")
            state.setdefault(int(i), {})[key] = tensor
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        self.schedule = Schedule(**workspace.load_meta("checkpoint")["schedule"])

    def forget(self, workspace: Workspace) -> None:
        (workspace.folder / "checkpoint.safetensors").unlink(missing_ok=True)


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _known_images(setting: str, training: TrainingSettings, root: Path | None) -> tuple[Tensor, Tensor, str]:
    """Training images of the known classes, with their labels."""
    data = load_cifar10("train", root)
    labels = known_labels(data.labels, data.classes, setting)
    known = torch.nonzero(labels >= 0).squeeze(1)
    if training.n_images:  # spread over the set, which may be sorted by class
        chosen = torch.linspace(0, len(known) - 1, training.n_images).long()
        known = known[chosen]
    return data.images[known], labels[known], data.variant


def _inputs(images: Tensor) -> Tensor:
    return normalize(images).contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def _validation(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Mean NLL and accuracy, dropout off."""
    model.eval()
    logits = torch.cat([model(_inputs(part)) for part in images.split(_PART)])
    nll = F.cross_entropy(logits.double(), labels).item()
    return nll, (logits.argmax(1) == labels).double().mean().item()
