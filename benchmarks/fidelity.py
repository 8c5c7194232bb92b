"""How close are the tiers to converged MC dropout, and how many of its samples is each worth?

Prints, per network and tier, the standard deviation and the mean beside MC dropout's, the divergence of the
predictive distributions, and the number T of samples at which MC dropout diverges as much; for the paper's
network also what that costs. Networks and samples are cached: an interrupted run goes on where it was.

    python benchmarks/fidelity.py [--only NAME ...] [--quick] [--skip-timing] [--threads N]
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import fidelity_tables as tables
import torch
from fidelity_bars import check_network, check_pareto
from fidelity_evaluation import SIZES, evaluate
from fidelity_figure import draw
from fidelity_networks import NETWORKS, QUICK, Case, load_case
from fidelity_pareto import pareto
from fidelity_samples import SEEDS, load_samples, missing_work
from images import CACHE, ROOT
from predictives import POINTS, SOBOL_SEED
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

import momentprop as mp
from momentprop.validation.equivalence import Samples

PARETO_NETWORK = "pool_after_each"
COLUMNS = (TextColumn("{task.description}"), BarColumn(), "{task.percentage:.0f} %", TimeRemainingColumn())


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    sizes = [size for size in SIZES if size <= (100 if args.quick else 2000)]
    err = Console(stderr=True)
    result: dict[str, Any] = _provenance(args)
    result["networks"] = {}
    with Progress(*COLUMNS, console=err) as progress:
        cases = _load_cases(args.only, args.quick, progress)
        work = sum(map(missing_work, cases))
        sampling = progress.add_task("sampling", total=max(1.0, work))
        for case in cases:
            progress.update(sampling, description=f"sampling, {case.name}")
            reference, independent = (
                load_samples(case, role, lambda work: progress.advance(sampling, work)) for role in SEEDS
            )
            progress.update(sampling, description=f"evaluating, {case.name}")
            network = result["networks"][case.name] = evaluate(case, reference, independent, sizes)
            network["bar"] = check_network(case.name, network["rows"]["accurate"])
            _write(result, args.out)
            _say_done(progress, sampling, case.name, network["rows"]["accurate"])
        progress.update(sampling, description="samples", completed=max(1.0, work))
    timed = [case for case in cases if case.name == PARETO_NETWORK and not args.skip_timing]
    for case in timed:
        network = result["networks"][case.name]
        result["pareto"] = pareto(case, network, sizes, args.quick, err.print)
        result["pareto"]["bar"] = check_pareto(result["pareto"])
        _write(result, args.out)
    _print(result)
    draw(result["networks"], result.get("pareto"), args.figure)
    err.print(f"wrote {args.out.name} and {args.figure.name}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=NETWORKS, metavar="NAME", help=", ".join(NETWORKS))
    parser.add_argument(
        "--quick", action="store_true", help="few inputs and samples; compiling takes the most"
    )
    parser.add_argument("--skip-timing", action="store_true", help="leave out cost against fidelity")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    default = "benchmarks/results/fidelity.json, docs/images/fidelity.png; with --quick, in the cache"
    parser.add_argument("--out", type=Path, help=f"JSON (default: {default})")
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    args.only = args.only or (QUICK if args.quick else NETWORKS)
    quick = CACHE / "fidelity"
    args.out = args.out or (quick / "quick.json" if args.quick else ROOT / "benchmarks/results/fidelity.json")
    args.figure = args.figure or (quick / "quick.png" if args.quick else ROOT / "docs/images/fidelity.png")
    return args


def _load_cases(names: tuple[str, ...], quick: bool, progress: Progress) -> list[Case]:
    task = progress.add_task("networks", total=len(names))
    cases = []
    for name in names:
        progress.update(task, description=f"training or loading {name}")
        cases.append(load_case(name, quick))
        progress.advance(task)
    progress.update(task, description="networks")
    return cases


def _say_done(progress: Progress, task: TaskID, name: str, row: dict[str, Any]) -> None:
    """A line per network, for logs, which show no bars."""
    worth = Samples(row["t_eq"], row["t_eq_bound"])
    seconds = progress.tasks[task].time_remaining
    left = f"; about {seconds / 60:.0f} min of sampling left" if seconds else ""
    median = row["std_ratio"]["median"]
    progress.console.print(
        f"{name}: accurate has std / MC's {median:.3f}, T_eq {worth}{left}", soft_wrap=True
    )


def _provenance(args: argparse.Namespace) -> dict[str, Any]:
    packages = ("torch", "numpy", "matplotlib")
    return {
        "question": (__doc__ or "").splitlines()[0],
        "command": shlex.join(["python", "benchmarks/fidelity.py", *sys.argv[1:]]),
        "data": "JPEG re-encoded CIFAR-10; UCI sets, split 0",
        "machine": platform.machine(),
        "threads": args.threads,
        "versions": {"momentprop": mp.__version__, "python": platform.python_version()}
        | {name: version(name) for name in packages},
        "seeds": {"training": "0, 1, 2 (members)", "samples": SEEDS, "sobol": SOBOL_SEED},
        "quick": args.quick,
        "softmax_points": POINTS,
    }


def _print(result: dict[str, Any]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    versions = result["versions"]
    machine = f"{result['machine']}, {result['threads']} thread(s), torch {versions['torch']}"
    console.print(f"{machine}; {result['data']}{'; quick' * result['quick']}", highlight=False)
    tables.print_networks(console, result["networks"])
    checks = {name: network["bar"] for name, network in result["networks"].items()}
    if "pareto" in result:
        tables.print_pareto(console, result["pareto"])
        checks |= result["pareto"]["bar"]
    tables.print_bars(console, checks)


def _write(result: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_finite(result), indent=1, allow_nan=False)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.rename(path)


def _finite(value: Any) -> Any:
    """JSON has no infinity: the divergence of a distribution without spread becomes null."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    main()
