"""The CIFAR-10 experiment from trainings to figures: on made-up images, and on the authors' network."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import momentprop as mp
from momentprop_reproduction.data import Images
from momentprop_reproduction.experiments import cifar, cifar_prediction, cifar_training
from momentprop_reproduction.experiments.cifar_prediction import SamplingSettings, gather, predict, sample
from momentprop_reproduction.experiments.cifar_training import TrainingSettings
from momentprop_reproduction.paper_network import CLASSES, KNOWN, network
from momentprop_reproduction.running.reproduction import reproduce
from momentprop_reproduction.running.units import Workspace

pytestmark = pytest.mark.usefixtures("one_thread")

DATA = Path(os.environ.get("MOMENTPROP_DATA", "no folder named"))
WEIGHTS = DATA / "reference-cifar" / "pool_after_each.npz"
needs_images = pytest.mark.skipif(
    not DATA.is_dir() or not any(DATA.glob("cifar*")), reason="no CIFAR-10 here; set MOMENTPROP_DATA"
)

TINY = cifar.Settings(
    n_members=2,
    n_shards=2,
    training=TrainingSettings(batch_size=32, max_epochs=3),
    sampling=SamplingSettings(n_samples=5, sizes=(1, 3, 6), n_repetitions=3, compile=False),
)


def made_up_images(split: str, root: Any = None) -> Images:
    """One colour a class, and noise."""
    generator = torch.Generator().manual_seed({"train": 0, "test": 1}[split])
    labels = torch.arange(10).repeat_interleave(12)
    colours = torch.randint(256, (10, 3, 1, 1), generator=torch.Generator().manual_seed(2))[labels]
    noise = torch.randint(-60, 60, (len(labels), 3, 32, 32), generator=generator)
    return Images((colours + noise).clamp(0, 255).to(torch.uint8), labels, CLASSES, "made up")


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cifar_training, cifar_prediction):
        monkeypatch.setattr(module, "load_cifar10", made_up_images)


def test_everything_from_training_to_figures(images: None, tmp_path: Path) -> None:
    record = reproduce(cifar, "cifar", TINY, tmp_path, command="momentprop reproduce cifar")
    summary = record["summary"]
    assert summary["data"] == "CIFAR-10, made up"
    assert set(summary["trainings"]) == {"five-0", "five-1", "ten-0", "ten-1"}
    assert (summary["n_known"], summary["n_novel"]) == (60, 60)
    assert summary["truth_samples"] == 18
    for n in ("1", "2"):
        assert set(summary["novelty"][n]) == set(summary["ten"][n]) == {"NN", "MC", "paper", "accurate"}
    assert np.array(summary["by_samples"]["aucs"]).shape == (3, 3)
    assert json.loads((tmp_path / "cifar.json").read_text())["summary"] == summary
    assert len(record["figures"]) == 7
    for name in record["figures"]:
        assert (tmp_path / name).stat().st_size > 10_000


def test_a_new_way_to_evaluate_leaves_trainings_and_predictions_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = {unit.name: unit.folder_name for unit in cifar.units(TINY)}
    monkeypatch.setattr(cifar, "_REVISION", -1)
    after = {unit.name: unit.folder_name for unit in cifar.units(TINY)}
    assert [name for name in before if before[name] != after[name]] == [cifar.EVALUATE]


def test_how_often_is_sampled_does_not_change_the_trainings() -> None:
    other = cifar.Settings(n_members=2, training=TINY.training)
    ours, theirs = ({u.folder_name for u in cifar.training_units(s).values()} for s in (TINY, other))
    assert ours == theirs


def test_nothing_in_a_folder_name_depends_on_where_the_images_are() -> None:
    elsewhere = cifar.Settings(root=Path("elsewhere"))
    assert [u.folder_name for u in cifar.units(elsewhere)] == [
        u.folder_name for u in cifar.units(cifar.Settings())
    ]


def trained_elsewhere(tmp_path: Path, setting: str) -> Workspace:
    """A workspace beside the saved weights of a network."""
    weights = network(len(KNOWN[setting])).state_dict()
    folders = {name: tmp_path / name for name in ("train", "use")}
    for folder in folders.values():
        folder.mkdir()
    Workspace(folders["train"]).save("weights", weights)
    return Workspace(folders["use"], {"train": folders["train"]})


def test_repetitions_are_disjoint_and_the_truth_is_all_of_them(images: None, tmp_path: Path) -> None:
    workspace = trained_elsewhere(tmp_path, "five")
    settings = SamplingSettings(sizes=(1, 4), n_repetitions=3, compile=False)
    sample(workspace, network_of="train", setting="five", seed=1, shard=0, n_shards=1, sampling=settings)
    entropy, log_probs = gather([workspace])
    assert entropy.shape == (3, 2, 120)
    assert not torch.equal(entropy[0], entropy[1])
    # entropy is concave: the mean of all has more than the mean of the repetitions'
    truth = mp.ClassPredictive(log_probs)
    assert (truth.entropy > entropy[:, 1].mean(0) - 1e-5).all()
    assert (entropy[:, 1].mean(0) > entropy[:, 0].mean(0) - 0.05).all()
    torch.testing.assert_close(truth.probs.sum(1), torch.ones(120))


def test_parts_of_the_images_do_not_share_masks(
    images: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    original = mp.monte_carlo

    def watched(model: Any, x: Any, n: int, seed: int, **options: Any) -> Any:
        drawn.append(seed)
        return original(model, x, n, seed, **options)

    monkeypatch.setattr(cifar_prediction.mp, "monte_carlo", watched)
    monkeypatch.setattr(cifar_prediction, "_AT_ONCE", 30)
    workspace = trained_elsewhere(tmp_path, "ten")
    common: dict[str, Any] = {"network_of": "train", "setting": "ten"}
    settings = SamplingSettings(sizes=(2,), n_repetitions=3, compile=False)
    for seed in (0, 1):
        predict(workspace, **common, seed=seed, n_samples=2, n_test=0, compile=False)
        for shard in (0, 1):
            sample(workspace, **common, seed=seed, shard=shard, n_shards=2, sampling=settings)
    assert len(drawn) == len(set(drawn)) == 2 * (4 + 2 * 2 * 3)


@needs_images
@pytest.mark.skipif(not WEIGHTS.is_file(), reason="the authors' weights are not here; set MOMENTPROP_DATA")
def test_on_the_authors_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it was tuned here. Horse is novel to it."""
    monkeypatch.setitem(KNOWN, "nine", tuple(name for name in CLASSES if name != "horse"))
    workspace = trained_elsewhere(tmp_path, "nine")
    with np.load(WEIGHTS) as weights:
        published = {name: torch.from_numpy(weights[name]) for name in weights.files}
    workspace.of("train").save("weights", published)
    common: dict[str, Any] = {"network_of": "train", "setting": "nine", "seed": 0}
    predict(workspace, **common, n_samples=50, n_test=200, compile=False)
    settings = SamplingSettings(sizes=(6, 60), n_repetitions=5, n_test=200, compile=False)
    shards = []
    for shard in range(2):
        folder = tmp_path / f"shard{shard}"
        folder.mkdir()
        shards.append(Workspace(folder, workspace.needs))
        sample(shards[-1], **common, shard=shard, n_shards=2, sampling=settings)
    predicted = workspace.load("log_probs")
    assert predicted is not None
    labels = predicted.pop("labels")
    entropy, truth = gather(shards)
    assert int((labels < 0).sum()) == 20
    found = cifar.evaluation.agreement(predicted, truth, labels)
    r = {name: row["known"]["entropy_r"]["value"] for name, row in found.items()}
    assert r["accurate"] > 0.997 > r["paper"] > r["NN"] > 0.8
    kl = {name: row["known"]["kl"] for name, row in found.items()}
    assert kl["accurate"] < kl["MC"] < kl["paper"] < kl["NN"]
    quality = cifar.evaluation.quality({name: p[None] for name, p in predicted.items()}, labels)
    assert quality["1"]["accurate"]["accuracy"]["value"] > 0.6
    assert quality["1"]["accurate"]["nll"]["value"] < quality["1"]["NN"]["nll"]["value"]
    # six samples are further from the truth than sixty
    of_truth = mp.ClassPredictive(truth).entropy
    errors = (entropy - of_truth).square().mean((0, 2))
    assert errors[0] > 5 * errors[1]
