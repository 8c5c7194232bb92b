"""Inputs whose batch is another dimension than the first."""

from __future__ import annotations

from typing import Any

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


@pytest.mark.parametrize("wrong", [(1, 0), None, (None,), 3, "1", {"x": 1}])
def test_what_is_no_dimension_of_the_inputs_is_refused(wrong: Any) -> None:
    series, labels = torch.randn(7, 20, 4), torch.randint(3, (20,))
    with pytest.raises(mp.InputError, match=r"compares samples of a batch(.*)one for each of 1 inputs, not"):
        mp.validate(Tagger(), [(series, labels)], batch_dim=wrong)
