"""Inputs whose batch is another dimension than the first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import momentprop as mp


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.drop, self.out = nn.GRU(4, 5), nn.Dropout(0.3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.drop(self.rnn(x)[0][-1]))


def test_time_first() -> None:
    torch.manual_seed(0)
    model, series = Tagger().train(), torch.randn(7, 20, 4)
    labels = torch.randint(3, (20,))
    saved = mp.convert(model, series, batch_dim=1)
    report = mp.validate(
        model,
        [(series[:, :12], labels[:12]), (series[:, 12:], labels[12:])],
        200,
        [(series + 3, labels)],
        saved=saved,
        batch_dim=1,
    )
    assert (report.n_inputs, report.model) == (20, "Tagger")
    assert report.worths["accurate"].value > 20
    assert all(module.training for module in model.modules())
    with pytest.raises(ValueError, match="one for each of 1 inputs"):
        mp.validate(model, [(series, labels)], batch_dim=(1, 0))
