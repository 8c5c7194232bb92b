"""One network of the catalogue: converted, and compared with sampling. Used by zoo.py and onnx_zoo.py."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))  # before this directory, with its zoo.py

import torch
from torch import Tensor, nn

import momentprop as mp
import vision
from catalogue import ZOO
from momentprop.capture.records import flatten_output
from momentprop.capture.signature import split_inputs
from momentprop.moments import is_moments
from zoo import load

__all__ = ["CHOSEN", "ZOO", "examine", "load", "warm_up"]

FEW = 64  # outputs per sample, up to which `auto` sweeps back from all of them
CHOSEN = 12  # outputs of networks with more, for which the accurate tier is asked too


def warm_up() -> None:
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
    """All moments of an output, in the order of its structure."""
    if is_moments(output):
        return [output]
    parts = (
        output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else ()
    )
    return [moments for part in parts for moments in _moments(part)]
