"""Are we as fast as we set out to be? Bars on what `momentprop bench` measured on the paper's CNN.

    momentprop bench --out benchmarks/results/speed.json --figure docs/images/speed.png
    momentprop bench momentprop_reproduction.benchmarking.subject:paper_regression --input-shape 3,32,32
        --no-memory --method accurate --runtime compiled --out benchmarks/results/speed_regression.json
    python benchmarks/speed_bars.py [--speed speed.json] [--regression speed_regression.json] [--threads 2]

Prints every bar with what was measured, and exits with status 1 if one is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from momentprop_reproduction.benchmarking.rows import Result

RESULTS = Path(__file__).parent / "results"
BATCHES = (1, 32, 256)


@dataclass(frozen=True)
class Bar:
    """At most (or at least) so much, for batch 1, 32 and 256."""

    title: str
    values: tuple[float | None, ...]
    at_least: bool = False

    def met(self, value: float, bar: float) -> bool:
        return value >= bar if self.at_least else value <= bar


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--speed", type=Path, default=RESULTS / "speed.json")
    parser.add_argument("--regression", type=Path, default=RESULTS / "speed_regression.json")
    parser.add_argument("--threads", type=int, help="default: every number that was measured")
    args = parser.parse_args()
    speed = Result.from_dict(json.loads(args.speed.read_text()))
    single = None
    if args.regression.exists():
        single = Result.from_dict(json.loads(args.regression.read_text()))
    missed = 0
    for threads in [args.threads] if args.threads else sorted({row.threads for row in speed.rows}):
        print(f"{speed.model}, {threads} thread{'s' * (threads > 1)}; measured / bar, batch 1, 32, 256")
        for bar, found in measured(speed, single, threads):
            cells = []
            for value, limit in zip(found, bar.values, strict=True):
                if limit is None:
                    cells.append("-")
                elif value is None:
                    cells.append(f"? / {limit:g}")
                    missed += 1
                else:
                    missed += not bar.met(value, limit)
                    cells.append(f"{value:.2f} / {limit:g}{'' if bar.met(value, limit) else ' MISSED'}")
            print(f"  {bar.title:<58}" + "".join(f"{cell:>20}" for cell in cells))
    print("all bars met" if not missed else f"{missed} bars missed or not measured")
    sys.exit(missed > 0)


def measured(
    speed: Result, single: Result | None, threads: int
) -> list[tuple[Bar, tuple[float | None, ...]]]:
    def ratios(result: Result | None, runtime: str, method: str) -> tuple[float | None, ...]:
        return tuple(value(result, runtime, method, batch, "median_ratio") for batch in BATCHES)

    def value(result: Result | None, runtime: str, method: str, batch: int, name: str) -> float | None:
        rows = result.of(threads=threads, runtime=runtime, method=method, batch=batch) if result else []
        found: float | None = getattr(rows[0], name) if rows else None
        return found

    paper = ratios(speed, "compiled", "paper")
    sampled = ratios(speed, "compiled", "MC, T = 50")
    over = tuple(mc / p if mc and p else None for mc, p in zip(sampled, paper, strict=True))
    bars: list[tuple[Bar, tuple[float | None, ...]]] = [
        (Bar("paper, compiled, over plain (limit 1.85)", (2.2, 2.2, 2.2)), paper),
        (Bar("fast, compiled, over plain", (2.2, 2.2, 2.2)), ratios(speed, "compiled", "fast")),
        (Bar("paper, ONNX Runtime, over plain", (4, 3, 3)), ratios(speed, "onnx", "paper")),
        (Bar("fast, ONNX Runtime, over plain", (4, 3, 3)), ratios(speed, "onnx", "fast")),
        (
            Bar("accurate, 10 outputs, compiled, over plain", (15, 15, 18)),
            ratios(speed, "compiled", "accurate"),
        ),
        (
            Bar("accurate, 1 output, compiled, over plain", (4, 4.5, 4.5)),
            ratios(single, "compiled", "accurate"),
        ),
        (Bar("MC T = 50 over paper, both compiled", (15, 18, 18), at_least=True), over),
    ]
    if threads == speed.settings["threads"][0]:  # where memory was measured
        for method in ("paper", "fast"):
            for runtime in speed.settings["runtimes"]:
                peak = value(speed, runtime, method, 256, "peak_ratio")
                title = f"peak memory of {method} over plain, {runtime}"
                bars.append((Bar(title, (None, None, 2.5)), (None, None, peak)))
    return bars


if __name__ == "__main__":
    main()
