"""What would a user pick instead? MC dropout of other libraries beside ours and beside one converted pass.

Eager PyTorch, the paper's CNN with 10 classes: torch-uncertainty's `mc_dropout` wrapper and baal's
`ModelWrapper.predict_on_batch`, both as they come (samples as one large batch), our `mp.monte_carlo`, and the
tiers. Prints the median and 99th percentile over those of the plain network; all take turns. A library that
is not installed, or does not import, is a row that says so. They are no dependencies of ours: install them
into an environment of their own (`pip install torch-uncertainty lightning baal`).

    python benchmarks/peers.py [--batches 1 8 32 256] [--threads 1] [--samples 10 50] [--out peers.json]
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import momentprop as mp
from momentprop_reproduction.benchmarking.rows import machine
from momentprop_reproduction.benchmarking.subject import paper_cnn
from momentprop_reproduction.benchmarking.turns import keep_freed_memory, take_turns

Sample = Callable[[Tensor], object]
TIERS = ("paper", "fast", "accurate")


def torch_uncertainty(model: nn.Module, samples: int) -> Sample:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
    import vision  # lets torchvision import beside a CPU build of torch

    vision.prepare()
    from torch_uncertainty.methods import mc_dropout

    wrapped = mc_dropout(copy.deepcopy(model), samples).eval()

    def sample(x: Tensor) -> object:
        found = wrapped(x).view(samples, len(x), -1)
        return found.mean(0), found.var(0)

    return sample


def baal(model: nn.Module, samples: int) -> Sample:
    from baal.bayesian.dropout import MCDropoutModule
    from baal.modelwrapper import ModelWrapper, TrainingArgs

    wrapped = ModelWrapper(MCDropoutModule(copy.deepcopy(model)), TrainingArgs(use_cuda=False))
    wrapped.eval()

    def sample(x: Tensor) -> object:
        found = wrapped.predict_on_batch(x, samples)
        return found.mean(-1), found.var(-1)

    return sample


def ours(model: nn.Module, samples: int) -> Sample:
    bnn = mp.convert(model, torch.zeros(2, 3, 32, 32), "paper")
    return lambda x: mp.monte_carlo(bnn, x, samples, keep_samples=False)


PEERS = {"torch-uncertainty": torch_uncertainty, "baal": baal, "mp.monte_carlo": ours}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 256])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--samples", type=int, nargs="+", default=[10, 50])
    parser.add_argument("--seconds", type=float, default=10.0, help="per batch size")
    parser.add_argument("--out", type=Path, help="write JSON here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    keep_freed_memory()
    warnings.simplefilter("ignore")  # of the others' making
    model = paper_cnn()
    example = torch.zeros(2, 3, 32, 32)
    methods: dict[str, Any] = {"plain": model}
    methods |= {tier: mp.convert(model, example, tier).freeze() for tier in TIERS}
    errors: dict[str, str] = {}
    for name, make in PEERS.items():
        for samples in args.samples:
            title = f"{name}, T = {samples}"
            try:
                methods[title] = make(model, samples)
                with torch.no_grad():
                    methods[title](example)
            except Exception as error:
                methods.pop(title, None)
                errors[title] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    rows = []
    print(f"{'batch':>6} {'method':<28} {'median':>9} {'p99':>9}   over plain, {args.threads} thread(s)")
    with torch.no_grad():
        for batch in args.batches:
            x = torch.randn(batch, 3, 32, 32)
            bound = {name: lambda f=function, x=x: f(x) for name, function in methods.items()}
            times = take_turns(bound, args.seconds)
            for name, found in times.items():
                median, p99 = found.median / times["plain"].median, found.p99 / times["plain"].p99
                rows.append({"batch": batch, "method": name, "median_ratio": median, "p99_ratio": p99})
                rows[-1] |= {"median_seconds": found.median, "calls": len(found.seconds)}
                print(f"{batch:>6} {name:<28} {median:>9.2f} {p99:>9.2f}", flush=True)
    for title, reason in errors.items():
        print(f"{title}: not measured: {reason}")
    if args.out:
        versions = {name: version(name) for name in ("torch-uncertainty", "baal") if _installed(name)}
        about = {"machine": machine() | versions, "threads": args.threads, "errors": errors, "rows": rows}
        args.out.write_text(json.dumps(about, indent=1) + "\n")


def _installed(name: str) -> bool:
    try:
        version(name)
    except ModuleNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
