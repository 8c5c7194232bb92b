"""How close are the tiers to MC dropout on trained networks of the usual architectures?

Prints, per network and tier, the standard deviation over that of MC dropout with 2,000 samples (median and
5..95 % over held-out inputs and outputs), the correlation of the two, and the distance of the means in
standard deviations; beside them the two halves of the samples, which is how exactly this can be known.
Images have many logits: there, 40 of every input are compared. Networks and samples are cached.

    python benchmarks/architectures.py [--only NAME ...] [--quick] [--threads N] [--out FILE]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import shlex
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from architectures_training import DENSE, RECIPES, Trained, load
from images import CACHE, ROOT
from rich.console import Console
from rich.table import Table
from torch import Tensor

import momentprop as mp
from momentprop.validation.equivalence import correlation

TIERS = ("paper", "fast", "accurate")
BAR = (0.93, 1.07)  # of the accurate tier's std ratio, at the median
CHOSEN = 40  # logits of an image
SAMPLES, QUICK_SAMPLES = 2000, 200
QUICK = ("convnext", "lstm_tagger")
Pair = tuple[Tensor, Tensor]  # mean and variance [inputs, outputs]


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    result: dict[str, Any] = _provenance(args)
    result["networks"] = {}
    for name in args.only:
        start = time.perf_counter()
        network = result["networks"][name] = examine(name, args.quick)
        row, seconds = network["rows"]["accurate"]["std_ratio"], time.perf_counter() - start
        print(
            f"{name}: accurate has std / MC's {row['median']:.3f}; {seconds:.0f} s",
            file=sys.stderr,
            flush=True,
        )
        _write(result, args.out)
    _print(result)


def examine(name: str, quick: bool) -> dict[str, Any]:
    """Train or load one network, sample it or load its samples, and compare all tiers with them."""
    network = load(name, epochs=1 if quick else None)
    x = network.inputs[:4] if quick else network.inputs
    with torch.no_grad():
        plain = network.model(x).flatten(1)
    size = plain.shape[1]
    chosen = [int((i + 0.5) * size / CHOSEN) for i in range(CHOSEN)] if name in DENSE else list(range(size))
    first, second = _halves(name, network, x, (QUICK_SAMPLES if quick else SAMPLES) // 2)
    first, second = ((m[:, chosen], v[:, chosen]) for m, v in (first, second))
    truth = _joined(first, second, (QUICK_SAMPLES if quick else SAMPLES) // 2)
    shift = ((plain[:, chosen] - truth[0]).abs() / truth[1].sqrt()).median().item()
    rows: dict[str, Any] = {"plain": {"mean_shift": shift}}
    for tier in TIERS:
        rows[tier] = _beside(_tier(network, x, tier, chosen if name in DENSE else None), truth)
    rows["halves"] = _beside(first, second)
    median = rows["accurate"]["std_ratio"]["median"]
    return {
        "accuracy": network.accuracy,
        "chance": network.chance,
        "parameters": sum(p.numel() for p in network.model.parameters()),
        "inputs": len(x),
        "outputs": len(chosen),
        "bar_met": BAR[0] <= median <= BAR[1],
        "rows": rows,
    }


def _tier(network: Trained, x: Tensor, tier: str, chosen: list[int] | None) -> Pair:
    outputs = chosen if tier == "accurate" else None
    bnn = mp.convert(network.model, x[:2], tier, outputs=outputs)
    with torch.no_grad():
        parts = [bnn(batch) for batch in x.split(25)]
    mean, variance = (torch.cat([getattr(p, k).flatten(1) for p in parts]) for k in ("mean", "variance"))
    return (mean, variance) if chosen is None else (mean[:, chosen], variance[:, chosen])


def _halves(name: str, network: Trained, x: Tensor, n_samples: int) -> list[Pair]:
    """Moments of two sets of samples, from the cache where they are there."""
    digest = hashlib.sha256()
    for tensor in (*network.model.state_dict().values(), x):
        digest.update(tensor.detach().numpy().tobytes())
    found = []
    for seed in (0, 1):
        path = CACHE / "architectures" / f"{name}-{digest.hexdigest()[:12]}-seed{seed}-{n_samples}.pt"
        if not path.exists():
            mc = mp.monte_carlo(network.model, x, n_samples, seed, keep_samples=False)
            torch.save((mc.mean, mc.variance), path.with_suffix(".tmp"))
            path.with_suffix(".tmp").rename(path)
        mean, variance = torch.load(path, weights_only=True)
        found.append((mean.flatten(1), variance.flatten(1)))
    return found


def _joined(first: Pair, second: Pair, n: int) -> Pair:
    """Moments of the union of two sets of n samples each."""
    (m1, v1), (m2, v2) = first, second
    return (m1 + m2) / 2, ((n - 1) * (v1 + v2) + n / 2 * (m1 - m2) ** 2) / (2 * n - 1)


def _beside(ours: Pair, truth: Pair) -> dict[str, Any]:
    (mean, variance), (true_mean, true_variance) = ours, truth
    std, true_std = variance.double().sqrt(), true_variance.double().sqrt()
    quantiles = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
    low, median, high = (std / true_std).flatten().quantile(quantiles).tolist()
    return {
        "std_ratio": {"median": median, "p05": low, "p95": high},
        "std_correlation": correlation(std, true_std),
        "mean_shift": ((mean - true_mean).abs() / true_std).median().item(),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=tuple(RECIPES), metavar="NAME", help=", ".join(RECIPES))
    parser.add_argument("--quick", action="store_true", help="hardly trained, few inputs and samples")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    default = "benchmarks/results/architectures.json; with --quick, in the cache"
    parser.add_argument("--out", type=Path, help=f"JSON (default: {default})")
    args = parser.parse_args()
    args.only = args.only or (QUICK if args.quick else tuple(RECIPES))
    folder = CACHE / "architectures" if args.quick else ROOT / "benchmarks/results"
    args.out = args.out or folder / "architectures.json"
    return args


def _provenance(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "question": (__doc__ or "").splitlines()[0],
        "command": shlex.join(["python", "benchmarks/architectures.py", *sys.argv[1:]]),
        "data": "scikit-learn digits; synthetic sequences and segmentations",
        "machine": platform.machine(),
        "threads": args.threads,
        "versions": {"momentprop": mp.__version__, "python": platform.python_version()}
        | {name: version(name) for name in ("torch", "scikit-learn")},
        "seeds": {"training": 0, "samples": [0, 1]},
        "samples": QUICK_SAMPLES if args.quick else SAMPLES,
        "bar": BAR,
    }


def _print(result: dict[str, Any]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 110)
    machine = f"{result['machine']}, {result['threads']} thread(s), torch {result['versions']['torch']}"
    console.print(f"{machine}; {result['data']}; T = {result['samples']}", highlight=False)
    table = Table(title="Distance from MC dropout", title_justify="left", pad_edge=False)
    for column in ("network", "method"):
        table.add_column(column, no_wrap=True)
    for column in ("std / MC's [5..95 %]", "std corr.", "mean shift"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column(f"{BAR[0]}..{BAR[1]}")
    for name, network in result["networks"].items():
        notes = [name, f"accuracy {network['accuracy']:.3f}", f"(chance {network['chance']:.2f})"]
        notes.append(f"{network['inputs']} x {network['outputs']} outputs")
        for i, (method, row) in enumerate(network["rows"].items()):
            met = ("yes" if network["bar_met"] else "[bold red]NO[/]") if method == "accurate" else ""
            note = notes[i] if i < len(notes) else ""
            table.add_row(note, "MC, half : half" if method == "halves" else method, *_cells(row), met)
        table.add_section()
    console.print(table)


def _cells(row: dict[str, Any]) -> list[str]:
    shift = f"{row['mean_shift']:.3f}"
    if "std_ratio" not in row:
        return ["", "", shift]
    low, median, high = (row["std_ratio"][k] for k in ("p05", "median", "p95"))
    return [f"{median:.3f} [{low:.2f}..{high:.2f}]", f"{row['std_correlation']:.4f}", shift]


def _write(result: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
