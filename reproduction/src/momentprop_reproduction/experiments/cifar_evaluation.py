"""The paper's numbers on CIFAR-10, from predictions: quality, agreement with MC, novelty, filtering.

Predictions are log-probabilities [members, images, classes] by method. An ensemble averages its members'
probabilities, as `mp.classify` does for a list of outputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import momentprop as mp
from momentprop.evaluate import metrics
from momentprop.predict.decisions import selective_curve

LogProbs = Mapping[str, Tensor]
_CUTOFFS = 60  # of a filter curve


def ensemble(log_probs: Tensor) -> mp.ClassPredictive:
    """The mixture of all members, [members, images, classes]."""
    return mp.ClassPredictive(log_probs.double().logsumexp(0) - math.log(len(log_probs)))


def by_size(log_probs: LogProbs) -> dict[str, dict[str, mp.ClassPredictive]]:
    """The first member alone, and all of them, by method: {"1": {...}, "5": {...}}."""
    n_members = len(next(iter(log_probs.values())))
    return {
        str(n): {name: ensemble(values[:n]) for name, values in log_probs.items()}
        for n in sorted({1, n_members})
    }


def quality(log_probs: LogProbs, labels: Tensor) -> dict[str, Any]:
    """Accuracy and NLL, with their intervals: of the first member, of each member, of the ensemble.

    `nll_above_mc` is the difference to MC image by image, whose interval is much narrower than those of the
    two: below zero is better than MC.
    """
    known = labels >= 0
    target = labels[known]
    found: dict[str, Any] = {}
    for n, predicted in by_size({name: values[:, known] for name, values in log_probs.items()}).items():
        reference = predicted["MC"].nll(target)
        found[n] = {
            name: {
                "accuracy": metrics.accuracy(p.probs, target).to_dict(),
                "nll": metrics.nll(p.log_probs, target).to_dict(),
                "nll_above_mc": _mean_interval(p.nll(target) - reference),
                "right_above_mc": _mean_interval(
                    (p.label == target).double() - (predicted["MC"].label == target).double()
                ),
            }
            for name, p in predicted.items()
        }
    found["members"] = {
        name: {
            "accuracy": [
                metrics.accuracy(member.exp(), target).value for member in values[:, known].double()
            ],
            "nll": [metrics.nll(member, target).value for member in values[:, known].double()],
        }
        for name, values in log_probs.items()
    }
    return found


def agreement(predicted: LogProbs, reference: Tensor, labels: Tensor) -> dict[str, Any]:
    """Correlate one network with MC: Pearson's r of the entropy and of the first class's probability.

    Images of known and of novel classes are kept apart. The mean KL divergence from MC's probabilities is
    given too.
    """
    truth = mp.ClassPredictive(reference.double())
    found: dict[str, Any] = {}
    for name, values in predicted.items():
        p = mp.ClassPredictive(values.double())
        kl = (truth.probs * (truth.log_probs - p.log_probs)).sum(1)
        found[name] = {
            kind: {
                "entropy_r": metrics.pearson(p.entropy[rows], truth.entropy[rows]).to_dict(),
                "probability_r": metrics.pearson(p.probs[rows, 0], truth.probs[rows, 0]).to_dict(),
                "kl": kl[rows].mean().item(),
            }
            for kind, rows in (("known", labels >= 0), ("novel", labels < 0))
        }
    return found


def novelty(log_probs: LogProbs, labels: Tensor) -> dict[str, Any]:
    """AUC of the entropy for telling novel from known classes: first member, ensemble, and every member."""
    found: dict[str, Any] = {
        n: {name: _auc(p.entropy, labels).to_dict() for name, p in predicted.items()}
        for n, predicted in by_size(log_probs).items()
    }
    found["members"] = {
        name: [_auc(mp.ClassPredictive(member.double()).entropy, labels).value for member in values]
        for name, values in log_probs.items()
    }
    return found


def auc_by_samples(entropy: Tensor, labels: Tensor, sizes: tuple[int, ...]) -> dict[str, Any]:
    """AUC of MC with T samples, from entropies [repetitions, sizes, images]."""
    aucs = torch.tensor([[_auc(row, labels).value for row in rows] for rows in entropy], dtype=torch.float64)
    spread = aucs.std(0) if len(aucs) > 1 else torch.zeros_like(aucs[0])
    return {
        "sizes": list(sizes),
        "aucs": aucs.tolist(),
        "mean": aucs.mean(0).tolist(),
        "std": spread.tolist(),
    }


def catch_up(by_samples: Mapping[str, Any], auc: float) -> int | None:
    """The T from which on MC's mean AUC is at least `auc`; None if it is not with the most samples either."""
    reached = None
    for size, mean in zip(reversed(by_samples["sizes"]), reversed(by_samples["mean"]), strict=True):
        if mean < auc:
            break
        reached = size
    return reached


def least_margin(by_samples: Mapping[str, Any], auc: float) -> float:
    """The smallest over T of `auc` - (MC's mean AUC - its std over repetitions): not below MC if >= 0."""
    pairs = zip(by_samples["mean"], by_samples["std"], strict=True)
    return min(auc - (mean - std) for mean, std in pairs)


def auc_difference(score: Tensor, reference: Tensor, labels: Tensor) -> dict[str, float]:
    """AUC by one score less AUC by another on the same images, with DeLong's (1988) interval.

    Both scores see the same images, so that most of what is chance in the two AUCs cancels.
    """
    known, novel = labels >= 0, labels < 0
    # the AUC is the mean over novel images of the share of known ones below, and the other way round
    below = _share_below(score[known], score[novel]) - _share_below(reference[known], reference[novel])
    above = _share_below(reference[novel], reference[known]) - _share_below(score[novel], score[known])
    half = 1.96 * (below.var() / len(below) + above.var() / len(above)).sqrt().item()
    value = below.mean().item()
    return metrics.Estimate(value, value - half, value + half).to_dict()


def filtering(log_probs: LogProbs, labels: Tensor) -> dict[str, Any]:
    """Accuracy on the images whose entropy is at most a cut-off; an image of a novel class is never right.

    The cut-offs go from 0 to log K, the largest entropy there is; accuracy is None where no image is left.
    """
    n_classes = next(iter(log_probs.values())).shape[-1]
    cutoffs = torch.linspace(0, math.log(n_classes), _CUTOFFS + 1).tolist()
    found: dict[str, Any] = {"cutoff": cutoffs}
    for n, predicted in by_size(log_probs).items():
        found[n] = {}
        for name, p in predicted.items():
            curve = selective_curve(p.entropy, p.label == labels)
            points = [curve.at_cutoff(cutoff) for cutoff in cutoffs]
            found[n][name] = {
                "accuracy": [point.accuracy if point.kept else None for point in points],
                "coverage": [point.coverage for point in points],
                "accuracy_at_coverage": {
                    str(share): curve.at_coverage(share).accuracy for share in (0.25, 0.5, 0.75, 1.0)
                },
                "area": curve.area,
            }
    return found


def _auc(score: Tensor, labels: Tensor) -> metrics.Estimate:
    return metrics.auroc(score[labels >= 0], score[labels < 0])


def _share_below(values: Tensor, points: Tensor) -> Tensor:
    """Return for each point the share of the values below it; ties count half."""
    ordered = values.sort().values
    below = torch.searchsorted(ordered, points) + torch.searchsorted(ordered, points, right=True)
    return below.double() / (2 * len(values))


def _mean_interval(values: Tensor) -> dict[str, float]:
    """The mean, -+ 1.96 standard errors."""
    half = 1.96 * (values.std() / math.sqrt(len(values))).item()
    mean = values.mean().item()
    return metrics.Estimate(mean, mean - half, mean + half).to_dict()
