"""Whole sessions as users have them: every line is one that documentation may show."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import momentprop as mp
from momentprop.validation import latency


@pytest.fixture(autouse=True)
def _short_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "_SECONDS", 0.0)


def network(n_outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, n_outputs))


def trained(model: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
    loss = nn.MSELoss() if y.is_floating_point() else nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(100):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return model.eval()


def test_classification_with_novelty() -> None:
    x, x_new = torch.randn(300, 4), 6 * torch.randn(100, 4) + 3
    y = x[:, :3].argmax(1)
    model = trained(network(3), x[:100], y[:100])
    val = DataLoader(TensorDataset(x[100:], y[100:]), batch_size=50)

    network_ = mp.convert(model, x[:2])
    p = mp.classify(network_(x[100:]))
    assert p.label.shape == p.total.shape == p.epistemic.shape == (200,)
    assert mp.metrics.accuracy(p, y[100:]).value > 0.7
    stop = mp.Threshold.at(p.epistemic, keep=0.95)
    novel = mp.classify(network_(x_new))
    assert stop.rejects(p.epistemic).float().mean() <= 0.05
    assert stop.rejects(novel.epistemic).shape == (100,)
    auroc = mp.metrics.auroc(p.epistemic, novel.epistemic)
    assert 0 <= auroc.low <= auroc.value <= auroc.high <= 1
    sets = mp.conformal(network_, val, level=0.9)
    assert sets.predict_set(x_new).shape == (100, 3)
    report = mp.validate(model, val, 50, ood_loader=DataLoader(TensorDataset(x_new), batch_size=50))
    assert report.verdict.recommendation in report.worths


def test_regression() -> None:
    x = torch.randn(400, 4)
    y = x[:, :2].sin() + 0.3 * torch.randn(400, 2)
    model = trained(network(2), x[:200], y[:200])
    xv, yv, xt, yt = x[200:300], y[200:300], x[300:], y[300:]
    val = DataLoader(TensorDataset(xt, yt), batch_size=50)

    network_ = mp.convert(model, x[:2])
    noise = mp.fit_noise(network_(xv), yv)
    t = mp.regress(network_(xt), noise=noise)
    torch.testing.assert_close(t.total, t.epistemic + t.aleatoric)
    torch.testing.assert_close(t.std, t.total.sqrt())
    low, high = t.interval(0.95)
    assert mp.metrics.coverage(low, high, yt).value > 0.8
    assert mp.metrics.nll(t, yt).value == pytest.approx(t.nll(yt).mean().item(), rel=1e-5)
    intervals = mp.conformal(network_, val, level=0.9, noise=noise)
    low, high = intervals.predict_interval(xt)
    assert mp.metrics.coverage(low, high, yt).value >= 0.9  # of the data it was chosen on
    assert mp.validate(model, val, 50).verdict.recommendation


def test_predictions_in_batches() -> None:
    """A loop over a loader whose answers become one table."""
    x = torch.randn(90, 4)
    network_ = mp.convert(network(3).eval(), x[:2])
    parts = [mp.classify(network_(batch)).cpu() for (batch,) in DataLoader(TensorDataset(x), batch_size=40)]
    p = mp.ClassPredictive.cat(parts)
    assert len(p) == 90
    torch.testing.assert_close(p.probs, mp.classify(network_(x)).probs)
    doubtful = p[p.total > p.total.median()]
    assert 0 < len(doubtful) < 90
    assert set(doubtful.to_dict()) >= {"probs", "label", "total", "aleatoric", "epistemic", "abstain"}
