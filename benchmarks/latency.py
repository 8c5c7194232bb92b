"""What does a converted network cost, in plain passes? The paper's CNN, 10 classes.

Prints, for several batch sizes and in one run, the median time of each method divided by that of the
compiled plain network, beside the ratio of multiply-adds, which is the limit. Machines are noisy, so the
methods take turns and only ratios are reported. A short check of the compiled tiers; `momentprop bench`
measures every runtime.

    python benchmarks/latency.py [--threads 1] [--out latency.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable

import torch

import momentprop as mp
from momentprop_reproduction.benchmarking.subject import paper_cnn
from momentprop_reproduction.benchmarking.turns import keep_freed_memory, take_turns
from momentprop_reproduction.benchmarking.work import multiply_adds

TIERS = ("paper", "fast", "accurate")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=20.0, help="per batch size")
    parser.add_argument("--samples", type=int, default=50, help="of MC dropout")
    parser.add_argument("--out", help="write JSON here")
    args = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    model = paper_cnn()
    start = time.perf_counter()
    tiers = {tier: mp.convert(model, torch.zeros(1, 3, 32, 32), fidelity=tier) for tier in TIERS}
    conversion = (time.perf_counter() - start) / len(tiers)
    single = paper_cnn(1)
    tiers["accurate, K=1"] = mp.convert(single, torch.zeros(1, 3, 32, 32), fidelity="accurate")
    x = torch.randn(8, 3, 32, 32)
    plain_work = multiply_adds(lambda: model(x))
    limits = {tier: multiply_adds(lambda bnn=bnn: bnn(x)) / plain_work for tier, bnn in tiers.items()}
    machine = f"{platform.machine()}, {args.threads} thread(s), torch {torch.__version__}"
    print(f"{machine}; convert takes {conversion:.1f} s; 10 outputs unless it says K=1")
    print("time in units of one compiled plain pass, each method compiled")
    mc = f"MC T={args.samples}"
    names = [*tiers, mc]
    print(f"{'batch':>16} " + " ".join(f"{name:>13}" for name in names))
    print(f"{'multiply-adds':>16} " + " ".join(f"{limits[tier]:>13.2f}" for tier in tiers))
    rows = []
    with torch.no_grad():
        for batch in args.batches:
            torch._dynamo.reset()
            x = torch.randn(batch, 3, 32, 32)
            plain = torch.compile(model, fullgraph=True, dynamic=False)

            def sample(x: torch.Tensor = x) -> object:
                return mp.monte_carlo(tiers["paper"], x, n_samples=args.samples, compile=True)

            methods: dict[str, Callable[[], object]] = {"plain": lambda x=x, f=plain: f(x), mc: sample}
            for tier, bnn in tiers.items():
                compiled = torch.compile(bnn.freeze(), fullgraph=True, dynamic=False)
                methods[tier] = lambda x=x, f=compiled: f(x)
            times = take_turns(methods, args.seconds)
            ratios = {name: times[name].median / times["plain"].median for name in methods}
            rows.append({"batch": batch, "ratios": ratios})
            print(f"{batch:>16} " + " ".join(f"{ratios[name]:>13.2f}" for name in names), flush=True)
    if args.out:
        result = {"machine": machine, "convert_seconds": conversion, "multiply_adds": limits, "rows": rows}
        with open(args.out, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
