"""Class probabilities from Gaussian logits: how accurate, how fast; and what an ensemble costs.

    python benchmarks/predictive.py [--out benchmarks/results/predictive.json] [--threads 1]

Four questions. How far is each method from the integral of softmax over normal logits, taken with 10^6
samples? How close is the mutual information of one pass to that of MC dropout (T = 4000) on the paper's
CIFAR-10 network, published weights, test images? What does `mp.classify` cost beside the accurate pass? And
what do five members cost as one graph, beside five calls? Needs the data of benchmarks/fidelity.py, and
shares its samples.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fidelity_networks import load_case
from fidelity_samples import load_samples
from predictive_formulas import FORMULAS
from torch import Tensor

import momentprop as mp
from momentprop.gaussian.logits import GaussianLogits
from momentprop.predict.classification import METHODS
from momentprop.sample import SampledMoments
from momentprop_reproduction.benchmarking.subject import paper_cnn
from momentprop_reproduction.benchmarking.turns import keep_freed_memory, take_turns

SAMPLES = 10**6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "predictive.json")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cases", type=int, default=18, help="random logits per number of classes")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    result: dict[str, Any] = {"threads": options.threads, "torch": torch.__version__}
    result["accuracy"] = accuracy(options.cases)
    result["mutual_information"] = mutual_information()
    result["classify_overhead"] = overhead()
    result["ensemble"] = ensemble()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


def accuracy(n_cases: int) -> dict[str, Any]:
    """Largest and mean error of a probability, by number of classes and method."""
    errors: dict[str, dict[str, list[Tensor]]] = {}
    for n_classes in (2, 5, 10, 100):
        generator = torch.Generator().manual_seed(n_classes)
        for case in range(n_cases if n_classes < 100 else n_cases // 2):
            mean, covariance = _random_logits(n_classes, case, generator)
            truth = _sampled(mean, covariance, generator)
            logits = GaussianLogits(
                mean[None].float(), covariance.diagonal()[None].float(), covariance[None].float()
            )
            for name, method in (METHODS | FORMULAS).items():
                found = method(logits).log_probs.exp()[0]
                errors.setdefault(str(n_classes), {}).setdefault(name, []).append((found - truth).abs())
    return {
        k: {
            name: {"max": torch.cat(e).max().item(), "mean": torch.cat(e).mean().item()}
            for name, e in by_method.items()
        }
        for k, by_method in errors.items()
    }


def _random_logits(n_classes: int, case: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Means of size 0.5, 1 or 3; standard deviations around 0.3, 1 or 3, a part of them common to all."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mean = normal(n_classes) * (0.5, 1.0, 3.0)[case % 3]
    a = normal(n_classes, n_classes) / math.sqrt(n_classes)
    own = torch.rand(n_classes, generator=generator, dtype=torch.float64)
    scale = (0.3, 1.0, 3.0)[case // 3 % 3]
    return mean, scale**2 * (0.5 * a @ a.T + 0.5 * torch.diag(own) + 0.3)


def _sampled(mean: Tensor, covariance: Tensor, generator: torch.Generator) -> Tensor:
    values, vectors = torch.linalg.eigh(covariance)
    root = (vectors * values.clamp_min(0).sqrt()).float()
    total = torch.zeros_like(mean)
    for _ in range(20):
        noise = torch.randn(SAMPLES // 40, len(mean), generator=generator) @ root.T
        for z in (mean.float() + noise, mean.float() - noise):
            total += z.softmax(-1).sum(0)
    return (total / SAMPLES).float()


def mutual_information() -> dict[str, Any]:
    """Ratio to that of MC dropout over the test images: median, and 5 to 95 %."""
    case = load_case("pool_after_each", False)
    samples = load_samples(case, "reference")
    (model, x), *_ = case.members
    truth = mp.classify(SampledMoments(samples.mean(0), samples.var(0), n_samples=len(samples), kept=samples))
    out = {}
    for tier in ("paper", "fast", "accurate"):
        bnn = mp.convert(model, x[:2], tier)
        with torch.no_grad():
            parts = [mp.classify(bnn(batch)) for batch in x.split(100)]
        ratio = torch.cat([p.epistemic for p in parts]) / truth.epistemic
        low, median, high = ratio.double().quantile(torch.tensor([0.05, 0.5, 0.95]).double()).tolist()
        out[tier] = {"median": median, "p05": low, "p95": high, "samples": len(samples), "inputs": len(x)}
    return out


def overhead(batch: int = 256) -> dict[str, float]:
    """Time of the accurate pass with `classify`, all measures taken, over that without; both compiled."""
    x = torch.randn(batch, 3, 32, 32)
    bnn = mp.convert(paper_cnn(10), x, "accurate")

    def predict(x: Tensor) -> tuple[Tensor, ...]:
        p = mp.classify(bnn(x))
        return p.probs, p.total, p.epistemic

    alone = torch.compile(bnn, fullgraph=True, dynamic=False)
    together = torch.compile(predict, fullgraph=True, dynamic=False)
    with torch.no_grad():
        times = take_turns({"alone": lambda: alone(x), "together": lambda: together(x)}, 40.0)
    return {
        "batch": batch,
        "classes": 10,
        "share_of_the_pass": times["together"].median / times["alone"].median - 1,
    }


def ensemble(count: int = 5, batch: int = 1) -> dict[str, Any]:
    """Time of one call of the stacked ensemble over that of so many calls, eager and compiled."""
    x = torch.randn(batch, 3, 32, 32)
    out: dict[str, Any] = {"members": count, "batch": batch}
    for tier in ("paper", "accurate"):
        torch._dynamo.reset()
        members = [mp.convert(paper_cnn(10), x, tier) for _ in range(count)]
        stacked = mp.Ensemble(members, stack=True)
        compiled = [torch.compile(m, fullgraph=True, dynamic=False) for m in members[:1]] * count
        as_one = torch.compile(stacked, fullgraph=True, dynamic=False)
        methods: dict[str, Callable[[], object]] = {
            "eager one by one": lambda members=members: [m(x) for m in members],  # type: ignore[misc]
            "eager stacked": lambda stacked=stacked: stacked(x),  # type: ignore[misc]
            "compiled one by one": lambda compiled=compiled: [m(x) for m in compiled],  # type: ignore[misc]
            "compiled stacked": lambda as_one=as_one: as_one(x),  # type: ignore[misc]
        }
        with torch.no_grad():
            times = take_turns(methods, 15.0)
        out[tier] = {
            mode: times[f"{mode} stacked"].median / times[f"{mode} one by one"].median
            for mode in ("eager", "compiled")
        }
    return out


if __name__ == "__main__":
    main()
