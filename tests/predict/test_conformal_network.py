"""Networks with calibrated sets and intervals."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import momentprop as mp
from momentprop.predict.decisions import ConformalIntervals, ConformalSets


def network(n: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, n)).eval()


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, values: Tensor) -> dict[str, Tensor]:
        hidden = self.body[:3](values)
        return {"hidden": hidden, "logits": self.body[3](hidden)}


X = torch.randn(400, 4, generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(3, (400,), generator=torch.Generator().manual_seed(2))
OLD, NEW = slice(0, 200), slice(200, 400)


def batches(y: Tensor, size: int = 64) -> list[Any]:
    return list(zip(X[OLD].split(size), y[OLD].split(size), strict=True))


@pytest.mark.parametrize("method", ["lac", "aps"])
def test_sets_are_those_of_the_tensors(method: str) -> None:
    bnn = mp.convert(network(), X[:2])
    sets = mp.conformal(bnn, batches(LABELS), 0.8, method=method)
    wanted = ConformalSets.fit(mp.classify(bnn(X[OLD])), LABELS[OLD], 0.8, method)
    found = sets.predict_set(X[NEW])
    assert torch.equal(found, wanted.sets(mp.classify(bnn(X[NEW]))))
    covered = found[torch.arange(200), LABELS[NEW]].float().mean().item()
    assert covered > 0.7  # 0.8 less 2.5 standard errors of old and new together
    assert repr(sets) == "Conformal(label sets, level=0.8, fitted on 200 inputs)"
    with pytest.raises(mp.InputError, match="predict_set"):
        sets.predict_interval(X)


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_intervals_hold_what_they_promise(noise: float) -> None:
    model = network()
    y = model(X).detach() + torch.randn(400, 3, generator=torch.Generator().manual_seed(3))
    bnn = mp.convert(model, X[:2])
    intervals = mp.conformal(bnn, batches(y), 0.8, noise=noise)
    low, high = intervals.predict_interval(X[NEW])
    wanted = ConformalIntervals.fit(mp.regress(bnn(X[OLD]), noise=noise), y[OLD], 0.8)
    torch.testing.assert_close(intervals.calibration.to_dict(), wanted.to_dict())
    covered = ((low <= y[NEW]) & (y[NEW] <= high)).float().mean(0)
    torch.testing.assert_close(covered, torch.full((3,), 0.8), rtol=0, atol=0.12)
    assert not low.requires_grad
    with pytest.raises(mp.InputError, match="predict_interval"):
        intervals.predict_set(X)


def test_inputs_and_outputs_with_names() -> None:
    bnn = mp.convert(Named(), X[:2])
    named = [{"values": x, "labels": y} for x, y in batches(LABELS)]
    sets, plain = mp.conformal(bnn, named), mp.conformal(mp.convert(network(), X[:2]), batches(LABELS))
    assert torch.equal(sets.predict_set(values=X[NEW]), plain.predict_set(X[NEW]))
    with pytest.raises(mp.InputError, match="no output 'other'"):
        mp.conformal(bnn, named, select="other")


def test_plain_networks_and_samples_are_calibrated_too() -> None:
    model = network()
    for other in (model, lambda x: mp.monte_carlo(model, x, 50)):
        assert mp.conformal(other, batches(LABELS)).predict_set(X[NEW]).shape == (200, 3)


@pytest.mark.parametrize(
    ("loader", "message"),
    [(X, "not a Tensor"), ([], "no data"), ([X], "batch 0 has no target"), ([{"input": X}], "no target")],
)
def test_data_without_targets(loader: Any, message: str) -> None:
    with pytest.raises(mp.InputError, match=message):
        mp.conformal(network(), loader)


def test_rooms_of_results_are_there_after_the_import() -> None:
    code = (
        "import sys, momentprop as mp; mp.decisions.ood_score; mp.metrics.accuracy; "
        "assert 'matplotlib' not in sys.modules; assert not hasattr(mp, 'plot')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    pytest.importorskip("matplotlib", reason="comes with the extra plots")
    assert callable(mp.plots.reliability_diagram)
