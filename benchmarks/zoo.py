"""Which public models convert, and how close is their spread to sampling?

Converts every network of tests/support/zoo.py (public architectures, tiny configurations, random weights),
each in a process of its own with a time limit, and prints per network: status, tier, seconds, the standard
deviation over that of MC dropout (median and 5..95 % over outputs), the distance of the means in standard
deviations, and what stood in the way where it did not convert. Results are kept in the JSON file, and a
network is run again only if it is named or failed; `--all` runs everything again.

    python benchmarks/zoo.py [--only NAME ...] [--samples 500] [--limit 180] [--all] [--out zoo.json]
"""

from __future__ import annotations

import argparse
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from zoo_examination import CHOSEN, ZOO, examine, warm_up
from zoo_run import Question, add_arguments, run_all, title

ROOT = Path(__file__).parents[1]
BAND = (0.85, 1.15)  # of std / MC std, at the median
DETAILS = ("detail", "notes", "places", "traceback")


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    warm_up()
    question = Question(
        (__doc__ or "").splitlines()[0],
        partial(examine, n_samples=args.samples, fidelity=args.fidelity),
        "ok",
        _line,
        () if args.details else DETAILS,
        {"samples": args.samples},
    )
    _print(run_all(question, ZOO, args))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser, 180, ROOT / "benchmarks/results/zoo.json")
    parser.add_argument("--samples", type=int, default=500, help="MC dropout samples (default 500)")
    parser.add_argument("--details", action="store_true", help="places and tracebacks into the file too")
    return parser.parse_args()


def _line(name: str, r: dict[str, Any]) -> str:
    if r["status"] == "ok":
        ratio = (
            f"{r['median']} [{r['low']}..{r['high']}] mean {r['mean_error']}" if r["median"] else "no spread"
        )
        if (r.get("chosen") or {}).get("median") is not None:
            ratio += "; accurate for {n}: {median} [{low}..{high}]".format(n=CHOSEN, **r["chosen"])
        return f"{name:42} ok {r['tier']:9} {r['convert_seconds']:6.1f} s  {ratio}"
    what = ", ".join(sorted({k.split(":")[0] for k in r.get("missing", {})})) or r.get(
        "detail", r.get("cause", "")
    )
    return f"{name:42} {r['status']}: {' '.join(what.split())[:160]}"


def _print(results: dict[str, Any]) -> None:
    print(title())
    for name, result in results.items():
        print(_line(name, result))
    converted = [r for r in results.values() if r["status"] == "ok"]
    few = [r for r in converted if r["few"] and r["median"] is not None]
    within = [r for r in few if BAND[0] <= r["median"] <= BAND[1]]
    print(f"{len(converted)} of {len(results)} convert")
    print(
        f"{len(within)} of {len(few)} with few outputs have std / MC's in {BAND[0]}..{BAND[1]} at the median"
    )
    missing = Counter(k.split(":")[0] for r in results.values() for k in r.get("missing", {}))
    for operator, count in missing.most_common():
        print(f"  {operator:48} missing in {count} networks")


if __name__ == "__main__":
    main()
