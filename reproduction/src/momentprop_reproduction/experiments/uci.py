"""Table 1 of the paper (Brach, Sick & Duerr, section 4.2): nine UCI regression sets, 2,145 networks.

For every set and split a network with one hidden layer, chosen from a grid of drop probabilities and noise
levels after Gal & Ghahramani (2016); `uci_set` has the protocol. Tested are the network as it is (NN), MC
dropout (MC), both tiers (`paper`, `accurate`), and the accurate tier with jumps (`jumps`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from momentprop_reproduction.experiments.uci_evaluation import GAUSSIAN, METHODS, REVISION
from momentprop_reproduction.experiments.uci_set import run_set
from momentprop_reproduction.running.units import Unit, Workspace

# with the minutes each takes on one core: the longest first, so that two workers finish together
SETS = {
    "naval": 16.0,
    "protein": 14.0,
    "kin8nm": 8.0,
    "power": 7.5,
    "wine": 1.6,
    "concrete": 1.1,
    "energy": 0.9,
    "boston": 0.6,
    "yacht": 0.4,
}


@dataclass(frozen=True)
class Settings:
    """Holds what the results depend on; `root` only says where the data is.

    `n_splits` None means all that a set has; `epoch_factor` multiplies the epochs of the set.
    """

    seed: int = 0
    sets: tuple[str, ...] = tuple(SETS)
    n_splits: int | None = None
    epoch_factor: float = 10
    n_samples: int = 10_000
    validation_samples: int = 10_000
    root: Path | None = None

    def quick(self) -> Settings:
        """Shrink a run to seconds: two small sets, two splits, a quarter of the epochs, fewer samples."""
        return replace(
            self,
            sets=("boston", "yacht"),
            n_splits=2,
            epoch_factor=2.5,
            n_samples=2000,
            validation_samples=500,
        )


def units(settings: Settings) -> list[Unit]:
    """List one unit per set."""
    return [
        Unit(
            f"uci-{name}",
            partial(
                run_set,
                name=name,
                seed=settings.seed,
                n_splits=settings.n_splits,
                epoch_factor=settings.epoch_factor,
                n_samples=settings.n_samples,
                validation_samples=settings.validation_samples,
                root=settings.root,
            ),
            work=SETS[name],
            revision=REVISION,
        )
        for name in settings.sets
    ]


def summarize(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The table: by set, mean and standard error over splits of each method.

    `nll_difference` is that to MC dropout; in units of the standard error of MC's, it should be within -1..1.

    Args:
        results: what the units returned, by their names.
    """
    return {"sets": {result["set"]: _row(result) for result in results.values()}}


def figures(
    results: Mapping[str, Mapping[str, Any]], workspaces: Mapping[str, Workspace] | None = None
) -> dict[str, Any]:
    """Matplotlib figures by name; everything in them is in the results."""
    from momentprop_reproduction.experiments.uci_figures import (
        table_figure,  # needs matplotlib, the rest does not
    )

    return {"uci": table_figure(summarize(results)["sets"])}


def _row(result: Mapping[str, Any]) -> dict[str, Any]:
    splits = result["methods"]
    table = {
        method: {
            measure: _over_splits([split[method][measure] for split in splits]) for measure in ("rmse", "nll")
        }
        for method in (*METHODS, GAUSSIAN)
    }
    sampled = table["MC"]["nll"]
    for row in table.values():
        difference = row["nll"]["mean"] - sampled["mean"]
        error = sampled["standard_error"]
        row["nll_difference"] = {"mean": difference, "in_errors": difference / error if error else None}
    kept = ("variant", "n", "n_features", "n_hidden", "epochs", "drop_probability", "tau", "std", "seconds")
    return {
        "n_splits": len(splits),
        "methods": table,
        **{key: result[key] for key in kept},
    }


def _over_splits(values: Sequence[float]) -> dict[str, Any]:
    error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return {"mean": fmean(values), "standard_error": error, "values": list(values)}
