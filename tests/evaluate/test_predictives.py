"""Metrics and decisions of what `classify` and `regress` give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import momentprop as mp
from momentprop.evaluate import metrics
from momentprop.predict.decisions import ConformalSets, Temperature, Threshold, ood_score

MOMENTS = mp.Moments(torch.randn(60, 3), 0.5)
P, LABELS = mp.classify(MOMENTS), torch.randint(3, (60,))
T, TARGETS = mp.regress(MOMENTS, noise=0.1), torch.randn(60, 3)


@pytest.mark.parametrize("metric", [metrics.accuracy, metrics.nll, metrics.brier, metrics.ece])
def test_metrics_of_classes(metric: Callable[..., Any]) -> None:
    assert metric(P, LABELS).value == pytest.approx(metric(P.probs.double(), LABELS).value, rel=1e-5)
    with pytest.raises(TypeError, match=r"what mp.classify makes .*, not Moments"):
        metric(MOMENTS, LABELS)


def test_reliability_of_classes() -> None:
    torch.testing.assert_close(
        metrics.reliability(P, LABELS), metrics.reliability(P.probs, LABELS), equal_nan=True
    )


def test_metrics_of_a_regression() -> None:
    assert metrics.rmse(T, TARGETS) == metrics.rmse(T.mean, TARGETS)
    gaussian = metrics.gaussian_nll(T.mean, T.std, TARGETS).value
    assert metrics.nll(T, TARGETS).value == pytest.approx(gaussian, rel=1e-5)


def test_decisions() -> None:
    sets = ConformalSets.fit(P, LABELS, 0.8)
    assert sets.to_dict() == ConformalSets.fit(P.probs, LABELS, 0.8).to_dict()
    assert torch.equal(sets.sets(P), sets.sets(P.probs))
    assert torch.equal(sets.size(P), sets.size(P.probs))
    temperature = Temperature.fit(P, LABELS)
    assert temperature == Temperature.fit(P.log_probs, LABELS)
    assert torch.equal(temperature.apply(P), temperature.apply(P.log_probs))
    with pytest.raises(TypeError, match="give probabilities"):
        ConformalSets.fit(MOMENTS, LABELS)  # type: ignore[arg-type]


def with_lost_row(value: float) -> Tensor:
    mean = MOMENTS.mean.clone()
    mean[2, 1] = value
    return mean


def test_rows_that_are_lost_abstain() -> None:
    p = mp.classify(mp.Moments(with_lost_row(torch.nan), 0.5))
    assert p.abstain.nonzero().tolist() == [[2]]
    assert p.to_dict()["abstain"][:4] == [False, False, True, False]
    stop = Threshold.at(ood_score(P), 1.0)
    assert stop.rejects(ood_score(p))[2]
    for lost in (torch.nan, torch.inf):
        t = mp.regress(mp.Moments(with_lost_row(lost), 0.5), noise=0.1)
        assert t.abstain.nonzero().tolist() == [[2, 1]]
    assert not P.abstain.any()
    assert not T.abstain.any()
