"""Which public models agree with PyTorch after export to ONNX?

Converts every network of tests/support/zoo.py (public architectures from tiny configurations, random weights)
and exports it with mp.export_onnx, which compares ONNX Runtime with PyTorch for three batch sizes on ordinary
and extreme inputs. Each network has a process of its own and a time limit. Prints per network the largest
error, the seconds, and at which inputs errors are above 1e-5 by rounding, and groups what failed by its
cause. Results are kept in the JSON file, and a network is run again only if it is named or failed; `--all`
runs everything again.

    python benchmarks/onnx_zoo.py [--only NAME ...] [--fidelity auto] [--limit 600] [--all] [--workers 2]
"""

from __future__ import annotations

import argparse
import tempfile
import traceback
import warnings
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from zoo_examination import ZOO, load, warm_up
from zoo_run import Question, add_arguments, run_all, title

import momentprop as mp

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser, 600, ROOT / "benchmarks/results/onnx_zoo.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warm_up()
    examine = partial(_examine, fidelity=args.fidelity)
    question = Question((__doc__ or "").splitlines()[0], examine, "agrees", _line, ("traceback",))
    _print(run_all(question, ZOO, args))


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
        errors, rounding = made.options["errors"], made.options["rounding"]
        result |= {"status": "agrees", "error": max(errors.values(), default=0.0)}
        return result | ({"rounding": rounding} if rounding else {})
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
        told = f"  rounding: {', '.join(sorted(_kinds(r)))}" if _kinds(r) else ""
        return f"{name:42} agrees {r['tier']:9} {r['error']:.1e} {r['seconds']:6.1f} s{told}"
    return f"{name:42} {r['status']}: {' '.join(r['cause'].split())[:300]}"


def _kinds(r: dict[str, Any]) -> set[str]:
    """Inputs at which an output is further off than 1e-5, by rounding."""
    return {kind for by_kind in r.get("rounding", {}).values() for kind in by_kind}


def _print(results: dict[str, Any]) -> None:
    print(title())
    for name, result in results.items():
        print(_line(name, result))
    converted = [r for r in results.values() if r["status"] != "not converted"]
    agree = [r for r in converted if r["status"] == "agrees"]
    strictly = sum(not _kinds(r) for r in agree)
    print(
        f"{len(agree)} of {len(converted)} converted networks agree: {strictly} to 1e-5 everywhere, "
        f"{len(agree) - strictly} but for inputs at which rounding moves PyTorch's own outputs further"
    )
    causes = defaultdict(list)
    for name, result in results.items():
        if result["status"] != "agrees":
            causes[f"{result['status']}: {' '.join(result['cause'].split())[:100]}"].append(name)
    for cause, names in causes.items():
        print(f"  {cause}\n    {', '.join(names)}")


if __name__ == "__main__":
    main()
