"""Which public models agree with PyTorch after export to ONNX?

Converts every network of tests/models/zoo.py (public architectures from tiny configurations, random weights)
and exports it with mp.export_onnx, which compares ONNX Runtime with PyTorch for three batch sizes on ordinary
and extreme inputs. Each network has a process of its own and a time limit. Prints per network the largest
error and the seconds, and groups what failed by its cause. Results are kept in the JSON file, and a network
is run again only if it is named or failed; `--all` runs everything again.

    python benchmarks/onnx_zoo.py [--only NAME ...] [--fidelity auto] [--limit 600] [--all] [--out zoo.json]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import sys
import tempfile
import time
import traceback
import warnings
from collections import defaultdict
from multiprocessing import get_all_start_methods
from multiprocessing import get_context as new_context
from pathlib import Path
from typing import Any

import torch
from zoo_examination import ZOO, load, warm_up

import momentprop as mp

ROOT = Path(__file__).parents[1]


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    warm_up()
    chosen = [
        name
        for name, entry in ZOO.items()
        if (not args.only or any(part in name for part in args.only))
        and (not entry.needs or importlib.util.find_spec(entry.needs))
    ]
    results: dict[str, Any] = json.loads(args.out.read_text())["networks"] if args.out.exists() else {}
    for i, name in enumerate(chosen, 1):
        if results.get(name, {}).get("status") == "agrees" and not (args.only or args.all):
            continue
        results[name] = _run(name, args)
        print(f"[{i}/{len(chosen)}] {_line(name, results[name])}", file=sys.stderr, flush=True)
        _write(results, args)
    _print({name: results[name] for name in ZOO if name in results})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="networks whose names contain one of these")
    parser.add_argument("--limit", type=float, default=600, help="seconds per network (default 600)")
    parser.add_argument("--fidelity", default="auto", help="tier (default auto)")
    parser.add_argument("--all", action="store_true", help="run again what is in the file already")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/onnx_zoo.json")
    return parser.parse_args()


def _run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One network in a process of its own: a crash or a hang loses nothing else."""
    context: Any = new_context("fork" if "fork" in get_all_start_methods() else "spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(send, name, args.fidelity))
    start = time.perf_counter()
    process.start()
    send.close()
    try:
        found = receive.recv() if receive.poll(args.limit) else None
    except EOFError:
        process.join()
        return {"status": "crash", "cause": f"exit code {process.exitcode}"}
    if found is None:
        process.kill()
        return {"status": "time limit", "cause": f"more than {args.limit:.0f} s"}
    process.join()
    return found | {"seconds": round(time.perf_counter() - start, 1)}


def _work(send: Any, name: str, fidelity: str) -> None:
    torch.set_num_threads(1)
    send.send(_examine(name, fidelity))


def _examine(name: str, fidelity: str) -> dict[str, Any]:
    try:
        model, inputs = load(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bnn = mp.convert(model, inputs, fidelity)
    except Exception as error:
        return {
            "status": "not converted",
            "cause": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}",
        }
    result: dict[str, Any] = {"tier": bnn.fidelity}
    try:
        with tempfile.TemporaryDirectory() as folder:
            made = mp.export_onnx(bnn, Path(folder) / "model.onnx")
            result["bytes"] = (Path(folder) / "model.onnx").stat().st_size
        return result | {"status": "agrees", "error": max(made.options["errors"].values(), default=0.0)}
    except mp.DisagreementError as error:
        return result | {"status": "disagrees", "cause": str(error)[:1500]}
    except Exception as error:
        cause = f"{type(error).__name__}: {str(error)[:600]}"
        return result | {
            "status": "not exported",
            "cause": cause,
            "traceback": traceback.format_exc()[-2000:],
        }


def _line(name: str, r: dict[str, Any]) -> str:
    if r["status"] == "agrees":
        return f"{name:42} agrees {r['tier']:9} {r['error']:.1e} {r['seconds']:6.1f} s"
    return f"{name:42} {r['status']}: {' '.join(r['cause'].split())[:300]}"


def _print(results: dict[str, Any]) -> None:
    print(f"{platform.machine()}, 1 thread, torch {torch.__version__}, momentprop {mp.__version__}")
    for name, result in results.items():
        print(_line(name, result))
    converted = [r for r in results.values() if r["status"] != "not converted"]
    agree = [r for r in converted if r["status"] == "agrees"]
    print(f"{len(agree)} of {len(converted)} converted networks agree")
    causes = defaultdict(list)
    for name, result in results.items():
        if result["status"] != "agrees":
            causes[f"{result['status']}: {' '.join(result['cause'].split())[:100]}"].append(name)
    for cause, names in causes.items():
        print(f"  {cause}\n    {', '.join(names)}")


def _write(results: dict[str, Any], args: argparse.Namespace) -> None:
    header = {
        "question": (__doc__ or "").splitlines()[0],
        "machine": platform.machine(),
        "threads": 1,
        "versions": {"momentprop": mp.__version__, "torch": torch.__version__},
    }
    # tracebacks name files of this machine
    kept = {name: {k: v for k, v in r.items() if k != "traceback"} for name, r in results.items()}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(header | {"networks": kept}, indent=1) + "\n")


if __name__ == "__main__":
    main()
