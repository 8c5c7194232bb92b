"""Does memory grow over many calls? The paper's CNN, 10 classes, every tier beside the plain network.

Prints by how much the resident memory of a process grows over all calls but the first tenth, eager, compiled
and in ONNX Runtime, each in a process of its own. (`momentprop bench` measures the peak of one call.)

    python benchmarks/memory.py [--calls 10000] [--batch 1]
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import momentprop as mp
from momentprop.exports.onnx_runtime import silent_exporter
from momentprop_reproduction.benchmarking.subject import paper_cnn

NETWORKS = ("plain", "paper", "fast", "accurate")
RUNTIMES = ("eager", "compiled", "onnx")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=1)
    args = parser.parse_args()
    print(f"KiB that {args.calls} calls with batches of {args.batch} add to a process")
    print(f"{'':>10}" + "".join(f"{runtime:>10}" for runtime in RUNTIMES))
    context = multiprocessing.get_context("spawn")
    for network in NETWORKS:
        print(f"{network:>10}", end="", flush=True)
        for runtime in RUNTIMES:
            with context.Pool(1) as pool:
                found = pool.apply(growth, (network, runtime, args.calls, args.batch))
            print(f"{found:>+10}", end="", flush=True)
        print()


def growth(network: str, runtime: str, calls: int, batch: int) -> int:
    """KiB, of this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(batch, 3, 32, 32)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        call = _prepared(network, runtime, x, Path(folder))
        for _ in range(calls // 10):
            call(x)
        before = _resident()
        for _ in range(calls - calls // 10):
            call(x)
        return _resident() - before


def _prepared(network: str, runtime: str, x: Tensor, folder: Path) -> Callable[[Tensor], object]:
    model = paper_cnn()
    prepared = model if network == "plain" else mp.convert(model, x[:1], fidelity=network).freeze()
    if runtime == "eager":
        return prepared
    if runtime == "compiled":
        return torch.compile(prepared, fullgraph=True, dynamic=False)
    import onnxruntime

    file = folder / "network.onnx"
    if network == "plain":
        with silent_exporter():
            torch.onnx.export(model, (x,), file, dynamo=True, verbose=False)
    else:
        mp.export_onnx(mp.convert(model, x[:1], fidelity=network), file)
    session = onnxruntime.InferenceSession(file)
    name = session.get_inputs()[0].name
    return lambda x: session.run(None, {name: x.numpy()})


def _resident() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 1024


if __name__ == "__main__":
    main()
