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
import contextlib
import importlib
import json
import logging
import platform
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from multiprocessing import get_all_start_methods
from multiprocessing import get_context as new_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/models"))  # before this directory, which has a zoo.py too

import torch  # noqa: E402
import vision  # noqa: E402
from catalogue import ZOO  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from zoo import load  # noqa: E402

import momentprop as mp  # noqa: E402
from momentprop.moments import is_moments  # noqa: E402
from momentprop.structure import flatten_output, split_inputs  # noqa: E402

BAND = (0.85, 1.15)  # of std / MC std, at the median
FEW = 64  # outputs per sample, up to which `auto` sweeps back
DETAILS = ("detail", "notes", "places", "traceback")
CHOSEN = 12  # outputs of networks with more, for which the accurate tier is asked too


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    _warm_up()
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


def _warm_up() -> None:
    """Import what tracing and the networks import, once for all of them; torch prints no graphs."""
    logging.disable(logging.CRITICAL)
    mp.convert(nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2)), torch.zeros(2, 2))
    vision.prepare()
    for name in ("transformers", "timm", "monai.networks.nets"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def examine(name: str, n_samples: int, fidelity: str) -> dict[str, Any]:
    """Convert one network and compare it with sampling."""
    result: dict[str, Any] = {}
    try:
        model, inputs = load(name)
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always")
            start = time.perf_counter()
            bnn = mp.convert(model, inputs, fidelity)
            result |= {"convert_seconds": round(time.perf_counter() - start, 2), "tier": bnn.fidelity}
            result["notes"] = [str(n.message) for n in notes if issubclass(n.category, mp.FidelityNote)]
        args, kwargs = split_inputs(inputs)
        start = time.perf_counter()
        with torch.no_grad():
            out = _moments(bnn(*args, **kwargs))
        result["forward_seconds"] = round(time.perf_counter() - start, 3)
        result |= _compare(model, bnn, inputs, out, n_samples)
    except mp.MissingRuleError as error:
        missing = Counter(f"{p.operator}: {p.reason}" for p in error.places)
        places = [str(p) for p in error.places]
        return result | {"status": "MissingRule", "missing": dict(missing), "places": places}
    except Exception as error:
        kind = type(error).__name__
        return result | {
            "status": kind,
            "detail": str(error)[:800],
            "traceback": traceback.format_exc()[-3000:],
        }
    return result


def _compare(model: Any, bnn: Any, inputs: Any, out: list[mp.Moments], n_samples: int) -> dict[str, Any]:
    args, kwargs = split_inputs(inputs)
    with torch.no_grad():
        plain = [v for v in flatten_output(model(*args, **kwargs))[0] if isinstance(v, Tensor)]
    shapes = [tuple(m.mean.shape) for m in out], [tuple(v.shape) for v in plain]
    if shapes[0] != shapes[1]:
        return {"status": "structure", "detail": f"converted {shapes[0]}, model {shapes[1]}"}
    mean, variance = (torch.cat([getattr(m, k).flatten() for m in out]) for k in ("mean", "variance"))
    if not (mean.isfinite().all() and variance.isfinite().all()):
        return {"status": "not finite", "detail": "NaN or infinite moments"}
    if variance.min() < 0:
        return {"status": "negative variance", "detail": f"{variance.min():.3g}"}
    sampled, oracle = _sample(model, bnn, inputs, n_samples)
    check = _loop(model, inputs, 64)
    few = sum(v[0].numel() for v in plain if v.dim()) <= FEW
    result = {"status": "ok", "oracle": oracle, "few": few, "outputs": mean.numel()}
    result |= _ratios(mean, variance, *sampled)
    if not few:
        result["chosen"] = _chosen(model, inputs, plain, sampled)
    if check is not None and oracle == "graph":  # the graph's samples beside the module's own
        result["loop_over_graph"] = _ratios(*check, *sampled)["median"]
        result["loop_mean_error"] = _ratios(*check, *sampled)["mean_error"]
    return result


def _chosen(model: Any, inputs: Any, plain: list[Tensor], sampled: tuple[Tensor, Tensor]) -> Any:
    """As `_ratios`, for a dozen elements of one output that has many, in tier `accurate`."""
    if len(plain) != 1:
        return None
    size = plain[0][0].numel()
    indices = [int((i + 0.5) * size / CHOSEN) for i in range(CHOSEN)]
    args, kwargs = split_inputs(inputs)
    try:
        bnn = mp.convert(model, inputs, "accurate", outputs=indices)
    except mp.MomentpropError as error:
        return {"error": str(error)[:400]}
    with torch.no_grad():
        out = _moments(bnn(*args, **kwargs))[0]

    def pick(values: Tensor) -> Tensor:
        return values.reshape(-1, size)[:, indices].flatten()

    return _ratios(pick(out.mean), pick(out.variance), *map(pick, sampled))


def _ratios(mean: Tensor, variance: Tensor, mc_mean: Tensor, mc_variance: Tensor) -> dict[str, Any]:
    """Standard deviation over MC's, and the distance of the means in standard deviations of MC's."""
    floor = 1e-6 * mc_variance.max() + 1e-30
    moving = mc_variance > floor  # outputs no noise reaches have no ratio
    std, mc_std = variance[moving].double().sqrt(), mc_variance[moving].double().sqrt()
    if not moving.any():
        return {"median": None, "low": None, "high": None, "mean_error": None}
    ratio = (std / mc_std).quantile(torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64))
    error = ((mean[moving] - mc_mean[moving]).abs() / mc_std).median()
    low, median, high = (round(float(q), 3) for q in ratio)
    return {"median": median, "low": low, "high": high, "mean_error": round(float(error), 3)}


def _sample(model: Any, bnn: Any, inputs: Any, n: int) -> tuple[tuple[Tensor, Tensor], str]:
    try:
        mc = _moments(mp.monte_carlo(bnn, inputs, n_samples=n, keep_samples=False))
        flat = [torch.cat([getattr(m, k).flatten() for m in mc]) for k in ("mean", "variance")]
        return (flat[0], flat[1]), "graph"
    except Exception:
        found = _loop(model, inputs, n)
        if found is None:
            raise
        return found, "loop"


def _loop(model: Any, inputs: Any, n: int) -> tuple[Tensor, Tensor] | None:
    """Mean and variance over forward passes of the module itself; None if it does not run armed."""
    args, kwargs = split_inputs(inputs)

    def draw() -> Tensor:
        leaves = flatten_output(model(*args, **kwargs))[0]
        return torch.cat([v.flatten().double() for v in leaves if isinstance(v, Tensor)])

    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        size = draw().numel()
        for whole in (True, False):  # networks with auxiliary heads return more while they train
            model.train()
            model.training = whole
            for module in model.modules():
                if isinstance(module, nn.modules.batchnorm._NormBase):
                    module.eval()
            try:
                samples = [draw() for _ in range(n)]
            except Exception:
                continue
            finally:
                model.eval()
            if samples[0].numel() == size:
                stacked = torch.stack(samples)
                return stacked.mean(0).float(), stacked.var(0).float()
    return None


def _moments(output: Any) -> list[mp.Moments]:
    leaves: list[Any] = []
    _walk(output, leaves.append)
    return leaves


def _walk(value: Any, keep: Callable[[Any], object]) -> None:
    if is_moments(value):
        keep(value)
    elif isinstance(value, dict):
        for part in value.values():
            _walk(part, keep)
    elif isinstance(value, list | tuple):
        for part in value:
            _walk(part, keep)


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
