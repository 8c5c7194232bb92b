"""Which of a network's outputs is meant."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import momentprop as mp
from momentprop.predict.outputs import chosen, leaves

X = torch.randn(6, 4)
LOGITS = mp.Moments(torch.randn(6, 3), 0.5)


@dataclass
class Fields:
    logits: Any = None
    hidden: Any = None


class Named(NamedTuple):
    hidden: Any
    logits: Any


class ModelOutput(OrderedDict[str, Any]):
    """Like that of transformers: entries are attributes too, and the absent ones are left out."""


CONTAINERS = [
    LOGITS,
    {"hidden": torch.zeros(6, 2), "logits": LOGITS},
    {"hidden": mp.Moments(torch.zeros(6, 2), 1.0), "logits": LOGITS},
    {"scores": LOGITS, "hidden": torch.zeros(6, 2)},
    ModelOutput(logits=LOGITS, hidden=(LOGITS, LOGITS)),
    Fields(LOGITS),
    Fields(LOGITS, LOGITS),
    Named(LOGITS, LOGITS),
    (LOGITS,),
    (LOGITS, torch.zeros(6, 2)),
    {"deep": {"inside": [LOGITS]}, "note": "text", "size": 3},
]


@pytest.mark.parametrize("output", CONTAINERS)
def test_classes_are_found_in_what_a_network_returns(output: Any) -> None:
    torch.testing.assert_close(mp.classify(output).probs, mp.classify(LOGITS).probs)
    torch.testing.assert_close(mp.regress(output, noise=0.1).std, mp.regress(LOGITS, noise=0.1).std)
    assert mp.fit_noise(output, LOGITS.mean + 1) > 0
    ensemble = mp.classify([output, output])
    torch.testing.assert_close(ensemble.probs, mp.classify(LOGITS).probs)


def test_the_user_says_which_output_is_meant() -> None:
    output = {"first": LOGITS, "others": (torch.zeros(6, 2), mp.Moments(torch.ones(6, 2), 1.0))}
    assert list(leaves(output)) == ["first", "others.0", "others.1"]
    for select in ("others.1", 2, "2", -1):
        assert chosen(output, select) is output["others"][1]
    torch.testing.assert_close(mp.classify(output, select="first").probs, mp.classify(LOGITS).probs)
    assert mp.regress(output, noise=0, select=2).batch_shape == (6, 2)
    with pytest.raises(mp.InputError, match=r"several outputs \(first, others.0, others.1\).*select="):
        mp.classify(output)
    for wrong in ("second", 3, -4):
        with pytest.raises(mp.InputError, match=f"no output {wrong!r}; it returns first, others.0"):
            mp.classify(output, select=wrong)
    with pytest.raises(mp.InputError, match="it returns one tensor"):
        mp.classify(LOGITS, select="logits")
    assert mp.classify(LOGITS, select=0)


def test_mean_and_noise_have_any_names() -> None:
    pair = {"location": LOGITS, "log_variance": mp.Moments(torch.zeros(6, 3), 0.0)}
    found = mp.regress(pair, heteroscedastic=True)
    torch.testing.assert_close(found.aleatoric, torch.ones(6, 3))
    with pytest.raises(ValueError, match="not 3 outputs"):
        mp.regress((LOGITS, LOGITS, LOGITS), heteroscedastic=True)


def test_a_converted_network_whose_output_is_a_dataclass() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2))
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Fields:
            hidden = self.body(x)
            return Fields(self.head(hidden), hidden)

    model = Model().eval()
    out = mp.convert(model, X)(X)
    torch.testing.assert_close(mp.classify(out).probs, mp.classify(out.logits).probs)
    assert mp.classify(model(X)).probs.shape == (6, 3)
    assert mp.classify(mp.monte_carlo(model, X, 20)).probs.shape == (6, 3)
