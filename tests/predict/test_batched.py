"""Predictive distributions as batches."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

import momentprop as mp
from momentprop.sample import SampledMoments

SAMPLES = torch.randn(5, 4, 3)


def jumping() -> mp.Moments:
    jumps = mp.Jumps(torch.rand(2, 4, 3), torch.full((2, 4, 3), 0.1))
    return mp.Moments(torch.randn(4, 3), 3.0, jumps=jumps)


def sampled() -> SampledMoments:
    return SampledMoments(SAMPLES.mean(0), SAMPLES.var(0), n_samples=5, kept=SAMPLES)


PREDICTIVES = {
    "classes": lambda: mp.classify(mp.Moments(torch.randn(4, 3), 0.5)),
    "classes by the paper": lambda: mp.classify(mp.Moments(torch.randn(4, 3), 0.5), "paper"),
    "pixels": lambda: mp.classify(mp.Moments(torch.randn(4, 3, 2, 2), 0.5)),
    "normal": lambda: mp.regress(mp.Moments(torch.randn(4, 3), 0.5), noise=0.1),
    "samples": lambda: mp.regress(sampled(), noise=0.1),
    "jumps": lambda: mp.regress(jumping(), noise=0.1),
}
VALUES = ("log_probs", "probs_variance", "aleatoric", "total", "mean", "std", "weights")


def values(predictive: Any) -> dict[str, Any]:
    found = {name: getattr(predictive, name, None) for name in VALUES}
    return {name: value for name, value in found.items() if value is not None}


@pytest.mark.parametrize("name", PREDICTIVES)
def test_an_index_chooses_inputs(name: str) -> None:
    p = PREDICTIVES[name]()
    assert len(p) == 4
    assert p
    for index in (slice(1, 3), [2, 0], torch.tensor([True, False, True, True])):
        wanted = {k: v[:, index] if k == "weights" else v[index] for k, v in values(p).items()}
        torch.testing.assert_close(values(p[index]), wanted)
    torch.testing.assert_close(values(p[-1]), values(p[3:]))
    assert [len(one) for one in p] == [1] * 4
    with pytest.raises(IndexError, match="outside a batch of 4"):
        p[4]
    with pytest.raises(TypeError, match="inputs of the batch"):
        p[0, 1]


@pytest.mark.parametrize("name", PREDICTIVES)
def test_parts_put_together_are_the_whole(name: str) -> None:
    p = PREDICTIVES[name]()
    torch.testing.assert_close(values(type(p).cat([p[:1], p[1:]])), values(p))
    torch.testing.assert_close(values(type(p).cat(list(p))), values(p))


def test_what_one_part_does_not_know_is_lost() -> None:
    known, plain = PREDICTIVES["classes"](), PREDICTIVES["classes by the paper"]()
    both = mp.ClassPredictive.cat([known, plain])
    assert len(both) == 8
    assert both.aleatoric is None


def test_components_must_fit() -> None:
    normal, samples = PREDICTIVES["normal"](), PREDICTIVES["samples"]()
    with pytest.raises(ValueError, match="numbers of components"):
        mp.RegressionPredictive.cat([normal, samples])
    weighted = mp.RegressionPredictive(
        samples.means, samples.epistemics, samples.aleatorics, torch.full_like(samples.means, 0.2)
    )
    both = mp.RegressionPredictive.cat([samples, weighted])
    torch.testing.assert_close(both[:4].std, both[4:].std)


@pytest.mark.parametrize("name", PREDICTIVES)
def test_devices_types_and_files(name: str) -> None:
    p = PREDICTIVES[name]()
    torch.testing.assert_close(values(p.cpu()), values(p))
    assert p.to(torch.float64).total.dtype == torch.float64
    assert not p.detach().total.requires_grad
    file = io.BytesIO()
    torch.save(p, file)
    file.seek(0)
    torch.testing.assert_close(values(torch.load(file, weights_only=True)), values(p))


@pytest.mark.parametrize("name", ["normal", "samples", "jumps"])
def test_targets_as_pytorch_has_them(name: str) -> None:
    p, y = PREDICTIVES[name](), torch.randn(4, 3)
    theirs = p.distribution()
    torch.testing.assert_close(theirs.log_prob(y), p.log_prob(y))
    torch.testing.assert_close(theirs.mean, p.mean)
    torch.testing.assert_close(theirs.variance, p.total)


def test_labels_as_pytorch_has_them() -> None:
    p, target = PREDICTIVES["pixels"](), torch.randint(3, (4, 2, 2))
    torch.testing.assert_close(p.distribution().log_prob(target), p.log_prob(target))
    torch.testing.assert_close(p.distribution().entropy(), p.total)
