"""CIFAR-10 with known and novel classes (Brach, Sick & Duerr, section 4.3): all of the paper's results.

Two settings: "ten", networks of all ten classes; "five", networks of five classes, to which the other five
are novel. Five networks each, for ensembles. What compares methods on one network takes the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import momentprop as mp
from momentprop_reproduction.experiments import cifar_evaluation as evaluation
from momentprop_reproduction.experiments.cifar_prediction import (
    METHODS,
    SamplingSettings,
    gather,
    predict,
    sample,
)
from momentprop_reproduction.experiments.cifar_training import TrainingSettings, train
from momentprop_reproduction.running.units import Unit, Workspace

SETTINGS = ("five", "ten")
EVALUATE = "cifar-evaluate"
_REVISION = (
    1  # of the evaluation; a new number makes it anew, and leaves trainings and predictions as they are
)


@dataclass(frozen=True)
class Settings:
    """Holds what the results depend on. `root` only says where the images are."""

    seed: int = 0
    n_members: int = 5
    n_shards: int = 10  # of the test images, for the many samples
    training: TrainingSettings = field(default_factory=TrainingSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    root: Path | None = None

    def quick(self) -> Settings:
        return replace(
            self,
            n_members=2,
            n_shards=2,
            training=replace(self.training, n_images=2000, max_epochs=3),
            sampling=SamplingSettings(
                n_samples=10, sizes=(1, 2, 5, 10, 20), n_repetitions=4, n_test=400, compile=False
            ),
        )


def units(settings: Settings) -> list[Unit]:
    """List all units; the evaluation needs all others, which thus run before it."""
    trainings = training_units(settings)
    predictions = [_prediction(settings, *key, unit) for key, unit in trainings.items()]
    shards = _shards(settings, trainings["five", 0])
    # what the first network waits for goes first, so that the long sampling runs beside other trainings
    order = [trainings["five", 0], *shards, *trainings.values(), *predictions]
    evaluate = partial(
        _evaluate, n_members=settings.n_members, sampling=settings.sampling, revision=_REVISION
    )
    return [*dict.fromkeys(order), Unit(EVALUATE, evaluate, needs=(*predictions, *shards), work=1)]


def training_units(settings: Settings) -> dict[tuple[str, int], Unit]:
    """List one unit for each setting and member. Their folders depend only on what the weights depend on."""
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
            work=20 if setting == "ten" else 10,
        )
        for member in range(settings.n_members)
        for setting in SETTINGS
    }


def _prediction(settings: Settings, setting: str, member: int, training: Unit) -> Unit:
    return Unit(
        f"cifar-predict-{setting}-{member}",
        partial(
            predict,
            network_of=training.name,
            setting=setting,
            # masks of their own for every network
            seed=2 * (settings.seed + member) + SETTINGS.index(setting),
            n_samples=settings.sampling.n_samples,
            n_test=settings.sampling.n_test,
            compile=settings.sampling.compile,
            root=settings.root,
        ),
        needs=(training,),
        work=1.5,
    )


def _shards(settings: Settings, training: Unit) -> list[Unit]:
    return [
        Unit(
            f"cifar-sample-{shard}",
            partial(
                sample,
                network_of=training.name,
                setting="five",
                seed=2 * settings.seed,
                shard=shard,
                n_shards=settings.n_shards,
                sampling=settings.sampling,
                root=settings.root,
            ),
            needs=(training,),
            work=6,
        )
        for shard in range(settings.n_shards)
    ]


def predictions(
    workspaces: Mapping[str, Workspace], setting: str, n_members: int
) -> tuple[dict[str, Tensor], Tensor]:
    """Log-probabilities [members, images, classes] by method, and labels, -1 for novel classes."""
    members = [
        workspaces[f"cifar-predict-{setting}-{member}"].load("log_probs") for member in range(n_members)
    ]
    found = [member for member in members if member is not None]
    if len(found) < n_members:
        raise FileNotFoundError(f"{n_members - len(found)} of {n_members} networks have no predictions")
    return {name: torch.stack([m[name] for m in found]) for name in METHODS}, found[0]["labels"]


def _evaluate(
    workspace: Workspace, *, n_members: int, sampling: SamplingSettings, revision: int
) -> dict[str, Any]:
    """Compute all numbers. `revision` only makes a new unit of a new way to compute them."""
    workspaces = {name: workspace.of(name) for name in workspace.needs}
    ten, ten_labels = predictions(workspaces, "ten", n_members)
    five, labels = predictions(workspaces, "five", n_members)
    entropy, truth = gather([w for name, w in workspaces.items() if name.startswith("cifar-sample-")])
    first = {name: values[0] for name, values in five.items()}
    by_samples = evaluation.auc_by_samples(entropy, labels, sampling.sizes)
    novelty = evaluation.novelty(five, labels)
    many = mp.ClassPredictive(truth.double()).entropy
    by_samples["less_truth"] = {
        name: evaluation.auc_difference(mp.ClassPredictive(p.double()).entropy, many, labels)
        for name, p in first.items()
    }
    for name in ("NN", "paper", "accurate"):
        auc = novelty["1"][name]["value"]
        by_samples.setdefault("catch_up", {})[name] = evaluation.catch_up(by_samples, auc)
        by_samples.setdefault("least_margin", {})[name] = evaluation.least_margin(by_samples, auc)
    return {
        "n_samples": sampling.n_samples,
        "truth_samples": sampling.truth_samples,
        "n_members": n_members,
        "n_known": int((labels >= 0).sum()),
        "n_novel": int((labels < 0).sum()),
        "ten": evaluation.quality(ten, ten_labels),
        "five": evaluation.quality(five, labels),
        "agreement": {
            "few": evaluation.agreement({k: v for k, v in first.items() if k != "MC"}, first["MC"], labels),
            "truth": evaluation.agreement(first, truth, labels),
        },
        "novelty": novelty,
        "by_samples": by_samples,
        "filter": {
            "five": evaluation.filtering(five, labels),
            "ten": evaluation.filtering(ten, ten_labels),
        },
    }


def summarize(results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return what the results page shows: the evaluation, how trainings went, whether targets are met."""
    trainings = {name: r for name, r in results.items() if name.startswith("cifar-train-")}
    found = results[EVALUATE]
    return {
        "data": "CIFAR-10, " + " / ".join(sorted({r["variant"] for r in trainings.values()})),
        "trainings": {
            name.removeprefix("cifar-train-"): {k: v for k, v in r.items() if k not in ("history", "variant")}
            for name, r in trainings.items()
        },
        "targets": targets(found),
        **found,
    }


def targets(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Say what the accurate tier was asked for, what it gives, and whether that is enough.

    Accuracy and NLL are means over test images: "at least as good" is missed where the 95 % interval of the
    difference to MC, image by image, lies on the wrong side of zero. `as_measured` goes by the value alone.
    """
    truth, ten = found["agreement"]["truth"]["accurate"], found["ten"]["1"]["accurate"]
    made = {
        f"entropy's correlation with MC's, {kind} classes": _target(truth[kind]["entropy_r"], at_least=0.998)
        for kind in ("known", "novel")
    }
    margin = found["by_samples"]["least_margin"]["accurate"]
    made["AUC - (MC's mean - its std over repetitions), smallest over T"] = _target(
        {"value": margin, "low": margin, "high": margin}, at_least=0
    )
    below = {
        end: -ten["nll_above_mc"][of] for end, of in (("value", "value"), ("low", "high"), ("high", "low"))
    }
    made["MC's NLL - NLL, ten classes"] = _target(below, at_least=0, within=True)
    made["accuracy - MC's, ten classes"] = _target(ten["right_above_mc"], at_least=0, within=True)
    return made


def _target(estimate: Mapping[str, float], *, at_least: float, within: bool = False) -> dict[str, Any]:
    """Say whether a target is met; with `within`, it is as long as the interval reaches the bound."""
    return {
        "value": estimate["value"],
        "interval": [estimate["low"], estimate["high"]],
        "wanted": f"at least {at_least:g}" + (" within its 95 % interval" if within else ""),
        "met": estimate["high" if within else "value"] >= at_least,
        "as_measured": estimate["value"] >= at_least,
    }


def figures(results: Mapping[str, dict[str, Any]], workspaces: Mapping[str, Workspace]) -> dict[str, Any]:
    """Figures 4 to 9 of the paper."""
    from momentprop_reproduction.experiments import cifar_figures

    found = results[EVALUATE]
    five, labels = predictions(workspaces, "five", found["n_members"])
    shards = [w for name, w in workspaces.items() if name.startswith("cifar-sample-")]
    return cifar_figures.draw(found, five, gather(shards)[1], labels)
