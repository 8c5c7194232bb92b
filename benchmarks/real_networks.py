"""How close is the default to MC dropout on networks that others trained and published?

Prints, per network and tier, the standard deviation over that of MC dropout (median and 5..95 % over inputs
and outputs), the correlation of the two, the distance of the means in standard deviations of MC dropout, the
divergence of the predictive distribution with the number of samples it is worth, and the cost in plain passes
of the same run. Outputs whose spread is below a thousandth of the largest are left out of the first three;
outputs of a map are 1,024 of them, evenly spaced. Weights and code are the user's: packages and repositories
that are missing are skipped, and it is said how to get them. Samples are cached, and the run resumes.

    python benchmarks/real_networks.py --networks DIR [--only NAME ...] [--tiers auto accurate:8]

`accurate:8` asks for eight outputs of every sample: the largest, or evenly spaced ones of a map.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shlex
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from real_networks_audio import crepe, nisqa, pesto, pesto_logits
from real_networks_foreign import Foreign, NotHereError
from real_networks_others import ritnet, rxnmapper, semibin, sleep, supernnova, tiara
from real_networks_truth import Truth, sample
from rich.console import Console
from rich.table import Table
from torch import Tensor

import momentprop as mp
from momentprop.validation.equivalence import correlation, equivalent_samples
from momentprop.validation.outputs import evenly
from momentprop_reproduction.benchmarking.turns import take_turns

ROOT = Path(__file__).parents[1]
NETWORKS: dict[str, Callable[[Path], Foreign]] = {
    "CREPE tiny": crepe,
    "PESTO": pesto,
    "PESTO, logits": pesto_logits,
    "Tiara": tiara,
    "SemiBin2": semibin,
    "RXNMapper": rxnmapper,
    "SuperNNova": supernnova,
    "NISQA": nisqa,
    "RITnet": ritnet,
    "sleep staging": sleep,
}
BARS = {"std": (0.9, 1.1), "mean": 0.15}


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    result = _provenance(args)
    result["networks"] = _known(args.out)
    for name in args.only:
        start = time.perf_counter()
        row = result["networks"].setdefault(name, {})
        try:
            _examine(NETWORKS[name](args.networks), args, row)
        except NotHereError as error:
            row["skipped"] = str(error)
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    _print(result)


def _examine(network: Foreign, args: argparse.Namespace, row: dict[str, Any]) -> None:
    truth = sample(network, args.samples, args.cache)
    with torch.no_grad():
        plain = network.model(*network.inputs)
    row |= {"inputs": network.source, "shape": list(plain.shape), "samples": truth.n_samples}
    row |= {"plain_loop": truth.loop, "plain": _beside(truth, plain, None)}
    row.pop("skipped", None)
    row.setdefault("tiers", {})
    for tier in args.tiers:
        row["tiers"][tier] = _tier(network, truth, tier, plain)


def _tier(network: Foreign, truth: Truth, tier: str, plain: Tensor) -> dict[str, Any]:
    fidelity, _, chosen = tier.partition(":")
    outputs = _outputs(int(chosen), plain) if chosen else None
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        start = time.perf_counter()
        try:
            bnn = mp.convert(network.model, network.inputs, fidelity, outputs=outputs)
        except mp.MomentpropError as error:
            return {"error": re.sub(r'File "[^"]*/', 'File "', str(error))}
        seconds = time.perf_counter() - start
    with torch.no_grad():
        out = bnn(*network.inputs)
        times = take_turns(
            {"plain": lambda: network.model(*network.inputs), "ours": lambda: bnn(*network.inputs)}, 5.0
        )
    found = _beside(truth, out.mean, out.variance, out.indices if chosen else None)
    if not chosen:
        found |= _worth(truth, out)
    return found | {
        "fidelity": bnn.fidelity,
        "passes": times["ours"].median / times["plain"].median,
        "plain_seconds": times["plain"].median,
        "convert_seconds": seconds,
        "notes": [str(n.message) for n in notes if issubclass(n.category, mp.FidelityNote)],
    }


def _outputs(count: int, plain: Tensor) -> int | list[int]:
    """So many of the largest; of a map, so many of the elements that are compared."""
    elements = evenly(plain[0].numel(), 1024)
    if len(elements) == plain[0].numel():
        return min(count, len(elements))
    return elements[evenly(len(elements), count)].tolist()


def _beside(
    truth: Truth, mean: Tensor, variance: Tensor | None, indices: Tensor | None = None
) -> dict[str, Any]:
    """Moments of the outputs beside those of MC dropout; at the chosen outputs of every sample, if any."""
    varies = truth.varies
    if indices is not None:
        asked = torch.zeros_like(mean.flatten(1), dtype=torch.bool).scatter_(1, indices.flatten(1), True)
        varies = varies & truth.layout.values(asked.view_as(mean))
    true_mean, true_std = truth.mean[varies], truth.variance[varies].sqrt()
    off = (truth.layout.values(mean).double()[varies] - true_mean).abs() / true_std
    found: dict[str, Any] = {"compared": int(varies.sum()), "mean_off": off.median().item()}
    if variance is None:
        return found
    std = truth.layout.values(variance).double()[varies].sqrt()
    levels = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
    low, median, high = (std / true_std).quantile(levels).tolist()
    ratio = {"median": median, "p05": low, "p95": high}
    return {"std_ratio": ratio, "std_correlation": correlation(std, true_std)} | found


def _worth(truth: Truth, out: mp.Moments) -> dict[str, Any]:
    """Divergence of what a user predicts with, and the number of samples with the same divergence."""
    layout = truth.layout
    if not layout.is_classes:
        moments = [layout.values(part).double()[truth.varies] for part in (out.mean, out.variance)]
        ours = torch.stack(moments, -1).unsqueeze(0)
    elif layout.head is not None and layout.head[0] == "logits":
        ours = layout.probabilities(_classified(out).log_probs).flatten(0, 1)
    else:
        ours = layout.probabilities(out.mean).flatten(0, 1)
    if layout.is_classes:
        ours = ours.clamp_min(torch.finfo(torch.float32).tiny)
    kl = truth.kind.kl(truth.predictive, ours).mean().item()
    worth = equivalent_samples(kl, truth.curve)
    return {"kl": kl, "worth": worth.value, "worth_bound": worth.bound}


def _classified(out: mp.Moments) -> mp.ClassPredictive:
    """The predictive over classes; without covariance where samples take several rows of the batch."""
    try:
        return mp.classify(out)
    except ValueError:
        return mp.classify(mp.Moments(out.mean, out.variance))


def _known(path: Path) -> dict[str, Any]:
    """Rows of an earlier run, which this one adds to."""
    return json.loads(path.read_text())["networks"] if path.exists() else {}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--networks", type=Path, required=True, help="folder with checked-out repositories")
    parser.add_argument("--site", type=Path, help="folder with packages, as of `pip install --target`")
    parser.add_argument("--only", nargs="+", choices=tuple(NETWORKS), default=tuple(NETWORKS), metavar="NAME")
    parser.add_argument("--tiers", nargs="+", default=["auto"])
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--cache", type=Path, default=ROOT / "benchmarks/.cache/real_networks")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/real_networks.json")
    args = parser.parse_args()
    if args.site is not None:
        sys.path.append(str(args.site))
    return args


def _provenance(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "question": (__doc__ or "").splitlines()[0],
        "command": "python benchmarks/real_networks.py --networks DIR "
        + shlex.join(["--tiers", *args.tiers, "--samples", str(args.samples)]),
        "machine": platform.machine(),
        "threads": 1,
        "versions": {"momentprop": mp.__version__, "python": platform.python_version()}
        | {"torch": torch.__version__},
        "bars": BARS,
    }


def _print(result: dict[str, Any]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 150)
    table = Table(title="Distance from MC dropout", title_justify="left", pad_edge=False)
    for column in ("network", "tier", "std / MC's [5..95 %]", "corr.", "mean off (plain)", "KL", "worth T"):
        table.add_column(column, no_wrap=True)
    table.add_column("plain passes", justify="right")
    table.add_column("bars")
    for name, network in result["networks"].items():
        if "skipped" in network:
            table.add_row(name, "skipped", network["skipped"])
        for tier, row in network.get("tiers", {}).items():
            if "error" in row:
                table.add_row(name, tier, "refused")
            else:
                table.add_row(name, _named(tier, row), *_cells(row, network["plain"]))
        table.add_section()
    console.print(table)


def _named(tier: str, row: dict[str, Any]) -> str:
    return tier if tier.startswith(row["fidelity"]) else f"{tier} = {row['fidelity']}"


def _cells(row: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    low, median, high = (row["std_ratio"][k] for k in ("p05", "median", "p95"))
    met = BARS["std"][0] <= median <= BARS["std"][1] and row["mean_off"] < BARS["mean"]
    spread = (
        f"{median:.2f} [{low:.2f}..{high:.2f}]" if median > 0.005 else f"{median:.0e} [{low:.0e}..{high:.2f}]"
    )
    return [
        spread,
        f"{row['std_correlation']:.2f}",
        f"{row['mean_off']:.2f} ({plain['mean_off']:.2f})",
        f"{row['kl']:.2g}" if "kl" in row else "",
        f"{row['worth_bound']} {row['worth']:.0f}".strip() if "kl" in row else "",
        f"{row['passes']:.1f}",
        "yes" if met else "[bold red]NO[/]",
    ]


if __name__ == "__main__":
    main()
