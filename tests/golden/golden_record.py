"""The moments of every network in every tier as plain numbers, and a command that writes them on record."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

import momentprop as mp

sys.path.insert(0, str(Path(__file__).parent))
from golden_networks import NETWORKS

FILE = Path(__file__).parent / "moments.json"
TIERS = ("paper", "fast", "accurate")


def moments_of(name: str, tier: str) -> dict[str, list[float]]:
    """Mean, variance, covariance and jumps of every output, flat, by name; a refusal as its error's name."""
    model, inputs, options = NETWORKS[name]()
    if tier != "accurate":
        options = {k: v for k, v in options.items() if k not in ("outputs", "jumps")}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            network = mp.convert(model, inputs, tier, **options)
    except mp.MomentpropError as error:
        return {type(error).__name__: []}
    with torch.no_grad():
        outputs = network(inputs)
    found: dict[str, list[float]] = {}
    for i, out in enumerate(pytree.tree_leaves(outputs, is_leaf=lambda value: isinstance(value, mp.Moments))):
        parts: dict[str, Any] = {"mean": out.mean, "variance": out.variance, "covariance": out.covariance}
        parts["jumps"] = None if out.jumps is None else out.jumps.effects
        parts["logits"] = None if out.logits is None else out.logits.moments.variance
        for part, value in parts.items():
            if value is not None:
                found[f"{part} {i}"] = value.flatten().tolist()
    return found


def _lines(name: str, tiers: dict[str, Any]) -> str:
    rows = [f"  {json.dumps(tier)}: {json.dumps(parts)}" for tier, parts in tiers.items()]
    return f"{json.dumps(name)}: {{\n" + ",\n".join(rows) + "\n}"


def main() -> None:
    names = sys.argv[1:] or list(NETWORKS)
    record = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name in names:
        record[name] = {tier: moments_of(name, tier) for tier in TIERS}
        print(name, {t: list(v)[:3] for t, v in record[name].items()}, flush=True)
    FILE.write_text("{\n" + ",\n".join(_lines(n, record[n]) for n in NETWORKS if n in record) + "\n}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
