"""Batches as dictionaries, and models that return more than one tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import momentprop as mp
from momentprop.validation import latency


@pytest.fixture(autouse=True)
def _short_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "_SECONDS", 0.0)


@dataclass
class Output:
    hidden: Tensor
    logits: Tensor


class Tagger(nn.Module):
    """A model as in transformers: inputs by name, an output with fields."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop, self.head = nn.Embedding(11, 8), nn.Dropout(0.3), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, *, attention_mask: Tensor) -> Output:
        hidden = self.drop(self.embed(input_ids)) * attention_mask.unsqueeze(-1)
        return Output(hidden, self.head(hidden.sum(1)))


IDS, LABELS = torch.randint(11, (24, 5)), torch.randint(3, (24,))
MASK = (torch.rand(24, 5) > 0.2).float()


def named(rows: slice, **more: Any) -> dict[str, Any]:
    return {"input_ids": IDS[rows], "attention_mask": MASK[rows], **more}


def test_dictionaries_with_labels() -> None:
    model = Tagger()
    first, second = (named(rows, labels=LABELS[rows]) for rows in (slice(0, 10), slice(10, 24)))
    shuffled = {name: second[name] for name in ("labels", "attention_mask", "input_ids")}
    novel = [named(slice(0, 12), labels=LABELS[:12])]
    report = mp.validate(model, [first, shuffled], 200, novel, tiers=["fast"])
    assert (report.task, report.n_inputs, report.n_ood, report.outputs) == ("classification", 24, 12, (3,))
    assert report.worths["fast"].value > 20
    assert report.layers["fast"][-1].module == "head"
    pairs = [(named(slice(0, 24)), LABELS)]
    again = mp.validate(model, pairs, 200, tiers=["fast"], layers=False)
    assert again.figures["fast"]["accuracy"] == report.figures["fast"]["accuracy"]
    alone = mp.validate(model, [first], 20, tiers=["fast"], targets=False, layers=False)
    assert alone.task == "moments"


def test_the_output_is_chosen_by_name() -> None:
    batches = [named(slice(0, 24))]
    options: dict[str, Any] = {"tiers": ["fast"], "targets": False, "layers": False}
    for select in ("hidden", 0):
        assert mp.validate(Tagger(), batches, 20, select=select, **options).outputs == (5, 8)
    with pytest.raises(mp.InputError, match="no output 'loss'; it returns hidden, logits"):
        mp.validate(Tagger(), batches, 20, select="loss", **options)


def test_what_is_missing_is_named() -> None:
    with pytest.raises(mp.InputError, match=r"batch 0 of the data has no target; give .*`labels`"):
        mp.validate(Tagger(), [named(slice(0, 24))], 20)
    other = {"input_ids": IDS, "labels": LABELS}
    with pytest.raises(mp.InputError, match="the inputs input_ids, and another input_ids, attention_mask"):
        mp.validate(Tagger(), [named(slice(0, 24), labels=LABELS), other], 20, n_inputs=48)
