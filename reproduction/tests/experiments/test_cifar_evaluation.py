"""The numbers of the CIFAR-10 experiment, against cases whose answer is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import momentprop as mp
from momentprop_reproduction.experiments import cifar_evaluation as evaluation
from momentprop_reproduction.experiments.cifar import targets

N_KNOWN, N_NOVEL = 60, 40
LABELS = torch.cat([torch.arange(N_KNOWN) % 5, torch.full((N_NOVEL,), -1)])


def made_up(n_members: int = 3, scale: float = 2.0, seed: int = 0) -> torch.Tensor:
    """Members that are more often right than not about known classes, and less sure about novel ones."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n_members, len(LABELS), 5, generator=generator)
    logits[:, :N_KNOWN] += scale * nn.functional.one_hot(LABELS[:N_KNOWN], 5)
    return logits.log_softmax(-1)


def methods(n_members: int = 3) -> dict[str, torch.Tensor]:
    return {name: made_up(n_members, seed=i) for i, name in enumerate(("NN", "MC", "paper", "accurate"))}


def test_an_ensemble_is_that_of_the_public_api() -> None:
    models = [
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 5)).eval() for _ in range(3)
    ]
    x = torch.randn(6, 4)
    members = [mp.convert(model, x) for model in models]
    theirs = mp.classify(mp.Ensemble(members)(x))
    ours = evaluation.ensemble(torch.stack([mp.classify(member(x)).log_probs for member in members]))
    torch.testing.assert_close(ours.probs.float(), theirs.probs)
    torch.testing.assert_close(ours.entropy.float(), theirs.entropy)


def test_quality_is_that_of_known_classes_only() -> None:
    log_probs = methods()
    found = evaluation.quality(log_probs, LABELS)
    log_probs["NN"][:, N_KNOWN:] = torch.randn(3, N_NOVEL, 5).log_softmax(-1)
    assert evaluation.quality(log_probs, LABELS) == found
    assert set(found) == {"1", "3", "members"}
    first = log_probs["NN"][0, :N_KNOWN]
    target = LABELS[:N_KNOWN]
    assert found["1"]["NN"]["nll"]["value"] == pytest.approx(nn.functional.nll_loss(first, target).item())
    assert found["1"]["NN"]["accuracy"]["value"] == pytest.approx(
        (first.argmax(1) == target).double().mean().item()
    )
    assert found["members"]["NN"]["nll"][0] == pytest.approx(found["1"]["NN"]["nll"]["value"])
    # probabilities, not log-probabilities, are averaged: by Jensen better than the members' mean
    assert found["3"]["NN"]["nll"]["value"] < sum(found["members"]["NN"]["nll"]) / 3


def test_differences_to_mc_are_image_by_image() -> None:
    found = evaluation.quality(methods(), LABELS)["1"]
    assert found["MC"]["nll_above_mc"] == {"value": 0, "low": 0, "high": 0, "level": 0.95}
    above = found["accurate"]["nll_above_mc"]
    assert above["value"] == pytest.approx(found["accurate"]["nll"]["value"] - found["MC"]["nll"]["value"])
    assert above["low"] < above["value"] < above["high"]
    right = found["accurate"]["right_above_mc"]["value"]
    assert right == pytest.approx(found["accurate"]["accuracy"]["value"] - found["MC"]["accuracy"]["value"])


def test_agreement_is_perfect_with_itself_and_apart_for_known_and_novel() -> None:
    reference, other = made_up(1)[0], made_up(1, seed=1)[0]
    mixed = torch.where((LABELS >= 0)[:, None], reference, other)
    found = evaluation.agreement({"same": reference, "mixed": mixed}, reference, LABELS)
    for kind in ("known", "novel"):
        same = found["same"][kind]
        assert (same["entropy_r"]["value"], same["probability_r"]["value"]) == pytest.approx((1, 1))
        assert same["kl"] == pytest.approx(0, abs=1e-7)
    assert found["mixed"]["known"] == found["same"]["known"]
    assert found["mixed"]["novel"]["entropy_r"]["value"] < 0.9
    assert found["mixed"]["novel"]["kl"] > 0.1


def test_auc_is_the_chance_that_a_novel_image_has_the_larger_entropy() -> None:
    log_probs = methods()
    found = evaluation.novelty(log_probs, LABELS)
    entropy = mp.ClassPredictive(log_probs["MC"][0]).entropy
    known, novel = entropy[:N_KNOWN, None], entropy[None, N_KNOWN:]
    assert found["1"]["MC"]["value"] == pytest.approx((novel > known).double().mean().item())
    assert found["members"]["MC"][0] == pytest.approx(found["1"]["MC"]["value"])
    assert len(found["members"]["MC"]) == 3


def test_auc_by_samples_and_where_it_catches_up() -> None:
    clean = torch.cat([torch.zeros(N_KNOWN), torch.ones(N_NOVEL)])
    noise = torch.randn(4, 3, len(LABELS)) * torch.tensor([3.0, 1.0, 0.1])[:, None]
    found = evaluation.auc_by_samples(clean + noise, LABELS, (1, 5, 50))
    assert found["mean"][0] < found["mean"][1] < found["mean"][2] == pytest.approx(1)
    assert len(found["aucs"]) == 4
    assert found["std"][2] < 1e-6 < found["std"][0]

    made = {"sizes": [1, 2, 5, 10], "mean": [0.6, 0.72, 0.69, 0.75], "std": [0.05, 0.01, 0.01, 0.002]}
    assert evaluation.catch_up(made, 0.7) == 10  # at 5 it is below again
    assert evaluation.catch_up(made, 0.65) == 2
    assert evaluation.catch_up(made, 0.5) == 1
    assert evaluation.catch_up(made, 0.8) is None
    assert evaluation.least_margin(made, 0.749) == pytest.approx(0.749 - 0.748)
    assert evaluation.least_margin(made, 0.74) < 0


def test_auc_differences_have_a_narrower_interval_than_aucs() -> None:
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(len(LABELS), generator=generator) - (LABELS >= 0).float()
    score = reference + 0.1 * torch.randn(len(LABELS), generator=generator)
    found = evaluation.auc_difference(score, reference, LABELS)
    ours, theirs = (evaluation._auc(s, LABELS) for s in (score, reference))
    assert found["value"] == pytest.approx(ours.value - theirs.value)
    assert 0 < found["high"] - found["low"] < 0.5 * (ours.high - ours.low)
    same = evaluation.auc_difference(reference, reference, LABELS)
    assert (same["value"], same["low"], same["high"]) == (0, 0, 0)


def test_filtering_counts_novel_images_as_wrong() -> None:
    found = evaluation.filtering(methods(), LABELS)
    assert found["cutoff"][0] == 0
    assert found["cutoff"][-1] == pytest.approx(math.log(5))
    everything = found["1"]["NN"]
    known = evaluation.quality(methods(), LABELS)["1"]["NN"]["accuracy"]["value"]
    assert everything["accuracy"][-1] == pytest.approx(known * N_KNOWN / len(LABELS))
    assert everything["coverage"][-1] == 1
    assert everything["accuracy_at_coverage"]["1.0"] == everything["accuracy"][-1]
    assert everything["accuracy"][0] is None  # no entropy is exactly zero
    assert everything["coverage"] == sorted(everything["coverage"])


def test_targets_say_whether_they_are_met() -> None:
    def found(r: float, margin: float, above: float) -> dict:
        interval = {"value": above, "low": above - 0.01, "high": above + 0.01}
        entropy = {"entropy_r": {"value": r, "low": r - 0.001, "high": r + 0.001}}
        return {
            "agreement": {"truth": {"accurate": {"known": entropy, "novel": entropy}}},
            "by_samples": {"least_margin": {"accurate": margin}},
            "ten": {"1": {"accurate": {"nll_above_mc": interval, "right_above_mc": interval}}},
        }

    assert all(t["met"] for t in targets(found(0.9981, 0.0, 0.0)).values())
    assert [t["met"] for t in targets(found(0.9979, -1e-4, 0.02)).values()] == [
        False,
        False,
        False,
        False,
        True,
    ]
    *_, nll, accuracy = targets(found(0.9981, 0.0, -0.02)).values()
    assert nll["met"]
    assert not accuracy["met"]  # clearly less often right
    *_, nll, accuracy = targets(found(0.9981, 0.0, 0.005)).values()
    assert (nll["met"], nll["as_measured"]) == (True, False)
    assert nll["interval"] == pytest.approx([-0.015, 0.005])
    assert (accuracy["met"], accuracy["as_measured"]) == (True, True)
