"""CIFAR-10 with known and novel classes (Brach, Sick & Duerr, section 4.3): all of the paper's results.

Two settings: "ten", networks of all ten classes; "five", networks of five classes, to which the other five
are novel. Five networks each, for ensembles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from momentprop.experiments.cifar_training import TrainingSettings, train
from momentprop.experiments.units import Unit


@dataclass(frozen=True)
class Settings:
    """What the results depend on. `root` only says where the images are."""

    seed: int = 0
    n_members: int = 5
    training: TrainingSettings = field(default_factory=TrainingSettings)
    root: Path | None = None


def training_units(settings: Settings) -> dict[tuple[str, int], Unit]:
    """One for each setting and member. Their folders depend on nothing but what the weights depend on."""
    return {
        (setting, member): Unit(
            f"cifar-train-{setting}-{member}",
            partial(
                train,
                setting=setting,
                seed=settings.seed + member,
                training=settings.training,
                root=settings.root,
            ),
            work=2.0 if setting == "ten" else 1.0,
        )
        for member in range(settings.n_members)
        for setting in ("five", "ten")
    }


def units(settings: Settings) -> Sequence[Unit]:
    return list(training_units(settings).values())
