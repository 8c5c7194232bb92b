"""Which public models convert, and how close is their spread to sampling?

Converts every network of tests/models/zoo.py (public architectures from tiny configurations, random weights),
each in a process of its own with a time limit, and prints per network: status, tier, seconds, the standard
deviation over that of MC dropout (median and 5..95 % over outputs), the distance of the means in standard
deviations, and what stood in the way where it did not convert. Results are kept in the JSON file, and a
network is run again only if it is named or failed; `--all` runs everything again.

    python benchmarks/zoo.py [--only NAME ...] [--samples 500] [--limit 180] [--all] [--out zoo.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import Counter
from multiprocessing import get_all_start_methods
from multiprocessing import get_context as new_context
from pathlib import Path
from typing import Any

import torch
from zoo_examination import CHOSEN, ZOO, examine, warm_up

import momentprop as mp

ROOT = Path(__file__).parents[1]
BAND = (0.85, 1.15)  # of std / MC std, at the median
DETAILS = ("detail", "notes", "places", "traceback")


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    warm_up()
    chosen = [n for n in ZOO if not args.only or any(part in n for part in args.only)]
    results: dict[str, Any] = json.loads(args.out.read_text())["networks"] if args.out.exists() else {}
    for i, name in enumerate(chosen, 1):
        done = results.get(name, {}).get("status", "")
        if done == "ok" and not (args.only or args.all):
            continue
        results[name] = _run(name, args)
        print(f"[{i}/{len(chosen)}] {_line(name, results[name])}", file=sys.stderr, flush=True)
        _write(results, args)
    _print({name: results[name] for name in ZOO if name in results})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="networks whose names contain one of these")
    parser.add_argument("--samples", type=int, default=500, help="MC dropout samples (default 500)")
    parser.add_argument("--limit", type=float, default=180, help="seconds per network (default 180)")
    parser.add_argument("--fidelity", default="auto", help="tier (default auto)")
    parser.add_argument("--all", action="store_true", help="run again what is in the file already")
    parser.add_argument("--details", action="store_true", help="places and tracebacks into the file too")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/zoo.json")
    return parser.parse_args()


def _run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One network in a process of its own: a crash or a hang loses nothing else."""
    # a fork has everything imported already, as it was when the run began
    context: Any = new_context("fork" if "fork" in get_all_start_methods() else "spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(send, name, args.samples, args.fidelity))
    start = time.perf_counter()
    process.start()
    send.close()
    try:
        found = receive.recv() if receive.poll(args.limit) else None
    except EOFError:
        process.join()
        return {"status": "crash", "detail": f"exit code {process.exitcode}"}
    if found is None:
        process.kill()
        return {"status": "time limit", "detail": f"more than {args.limit:.0f} s"}
    process.join()
    return found | {"seconds": round(time.perf_counter() - start, 1)}


def _work(send: Any, name: str, n_samples: int, fidelity: str) -> None:
    torch.set_num_threads(1)
    send.send(examine(name, n_samples, fidelity))


def _line(name: str, r: dict[str, Any]) -> str:
    if r["status"] == "ok":
        ratio = (
            f"{r['median']} [{r['low']}..{r['high']}] mean {r['mean_error']}" if r["median"] else "no spread"
        )
        if (r.get("chosen") or {}).get("median") is not None:
            ratio += "; accurate for {n}: {median} [{low}..{high}]".format(n=CHOSEN, **r["chosen"])
        return f"{name:42} ok {r['tier']:9} {r['convert_seconds']:6.1f} s  {ratio}"
    what = ", ".join(sorted({k.split(":")[0] for k in r.get("missing", {})})) or r.get("detail", "")
    return f"{name:42} {r['status']}: {' '.join(what.split())[:160]}"


def _print(results: dict[str, Any]) -> None:
    print(f"{platform.machine()}, 1 thread, torch {torch.__version__}, momentprop {mp.__version__}")
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


def _write(results: dict[str, Any], args: argparse.Namespace) -> None:
    header = {
        "question": (__doc__ or "").splitlines()[0],
        "machine": platform.machine(),
        "threads": 1,
        "samples": args.samples,
        "versions": {"momentprop": mp.__version__, "torch": torch.__version__},
    }
    if not args.details:  # places name files of this machine
        results = {name: {k: v for k, v in r.items() if k not in DETAILS} for name, r in results.items()}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(header | {"networks": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
