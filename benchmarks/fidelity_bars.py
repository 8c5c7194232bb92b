"""What tier `accurate` should reach on every network, and whether it does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Bar:
    """Bounds on the std ratio to MC dropout (median; 5..95 %), and least values of what else matters."""

    median: tuple[float, float]
    spread: tuple[float, float] | None = None
    samples: float | None = None
    std_correlation: float | None = None


BARS = {
    "pool_after_each": Bar((0.97, 1.03), (0.9, 1.1), samples=200),
    "pool_after_each_bn": Bar((0.95, 1.05), samples=100),
    "two_conv_blocks_bn": Bar((0.95, 1.05), samples=100),
    "toy_3x256": Bar((0.98, 1.02), std_correlation=0.999),
    "dense_16": Bar((0.95, 1.05)),
    "dense_16_residual": Bar((0.95, 1.05)),
    "wide_resnet": Bar((0.93, 1.07), samples=50),
    "uci": Bar((0.97, 1.03), (0.9, 1.1)),
}
MOST_COST = {"K=1": 4.5, "K=9": 15.0}
LEAST_SPEED_UP = {"K=1": 40.0, "K=9": 10.0}


def check_network(name: str, row: dict[str, Any]) -> list[dict[str, Any]]:
    bar = BARS["uci" if name.startswith("uci_") else name]
    return list(_check(bar, row))


def check_pareto(pareto: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    checks = {}
    for key, most in MOST_COST.items():
        if key not in pareto:
            continue
        tier = pareto[key]["tiers"]["accurate"]
        bound, cost = tier["t_eq_bound"], tier["cost"]
        checks[f"pool_after_each, {key}"] = [
            _line("cost in plain passes", f"<= {most:g}", f"{cost:.2f}", cost <= most),
            _at_least("speed-up at equal fidelity", LEAST_SPEED_UP[key], tier["speed_up"], bound, 1),
        ]
    return checks


def _check(bar: Bar, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    low, median, high = (row["std_ratio"][k] for k in ("p05", "median", "p95"))
    least, most = bar.median
    yield _line("std ratio, median", f"{least:g}..{most:g}", f"{median:.3f}", least <= median <= most)
    if bar.spread:
        least, most = bar.spread
        met = least <= low and high <= most
        yield _line("std ratio, 5..95 %", f"{least:g}..{most:g}", f"{low:.3f}..{high:.3f}", met)
    if bar.samples is not None:
        yield _at_least("T_eq", bar.samples, row["t_eq"], row["t_eq_bound"])
    if bar.std_correlation is not None:
        yield _at_least("std correlation", bar.std_correlation, row["std_correlation"], digits=4)


def _at_least(what: str, least: float, value: float, bound: str = "", digits: int = 0) -> dict[str, Any]:
    """`value` may be a bound (">" or "<") only; where that leaves the answer open, it is None."""
    met: bool | None = value >= least
    if (bound == ">" and not met) or (bound == "<" and met):
        met = None
    return _line(what, f">= {least:g}", f"{bound} {value:.{digits}f}".strip(), met)


def _line(what: str, bar: str, measured: str, met: bool | None) -> dict[str, Any]:
    return {"what": what, "bar": bar, "measured": measured, "met": met}
