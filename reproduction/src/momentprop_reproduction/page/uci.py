"""The UCI sets on the results page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from momentprop_reproduction.experiments.published import GAL, GAL_SOURCE, PAPER, PAPER_SOURCE
from momentprop_reproduction.page.markdown import digits_of, interval, number, seconds, table, with_error

_METHODS = {"NN": "NN", "MC": "MC", "paper": "MP, paper tier", "accurate": "MP, accurate tier"}
_JUMPS = {"jumps": "MP, accurate tier, jumps"}  # of the same moments: another distribution
_OURS = {"paper": "paper tier", "accurate": "accurate tier", "jumps": "accurate tier with jumps"}
_GAUSSIAN = "MC as one Gaussian"

Sets = Mapping[str, dict[str, Any]]


def section(record: dict[str, Any], images: str) -> str:
    sets: Sets = dict(sorted(record["summary"]["sets"].items()))
    n_samples = record["settings"]["n_samples"]
    variants = ", ".join(sorted({row["variant"] for row in sets.values()}))
    pictures = "\n\n".join(f"![{name}]({images}/{name})" for name in record["figures"])
    return f"""## UCI regression (section 4.2, Table 1)

Gal & Ghahramani's protocol on their splits (copy: {variants}): for every split a grid over drop probability
and tau, chosen by the validation likelihood of MC dropout, then a new network on the whole training part.
Mean ± standard error over the splits, in units of the raw target. MC has T = {n_samples:,} and the likelihood
of the mixture; NN is N(f(x), 1/tau), MP is N(mean, variance + 1/tau), and with jumps a mixture of the same
mean and variance in which the 16 inputs and units that matter most are kept or dropped. "Paper" is
{PAPER_SOURCE};
only figures quoted in this project's plan were at hand, and all others of its table are left blank.
"Gal" is {GAL_SOURCE}, grid search, trained by other software.

### Test negative log-likelihood

{_nll(sets)}

Difference: NLL of the tier less that of MC, in standard errors of MC's; below 0 is better than MC, and the
aim is within -1..1. Last column: MC's own mean and variance in one Gaussian, as exact moments would have it.
{_verdict(sets)}

### Test RMSE

{_rmse(sets)}

### Standard deviations and run time

std / MC: over all test points of all splits, median (5..95 %); r: correlation with MC's std within a split,
averaged. Time: one prediction of the first split's test set, MC by `mp.monte_carlo`.

{_spread(sets)}

{_choices(sets)}

{pictures}
"""


def _nll(sets: Sets) -> str:
    head = ["set", *(_METHODS | _JUMPS).values(), *(f"difference, {name}" for name in _OURS.values())]
    head += ["paper's MC", "paper's MP", "Gal's MC", _GAUSSIAN]
    rows = []
    for name, row in sets.items():
        methods = row["methods"]
        printed = PAPER.get(name, {})
        rows.append(
            [
                name,
                *_measured(methods, "nll", _METHODS | _JUMPS),
                *(number(methods[tier]["nll_difference"]["in_errors"], 2) for tier in _OURS),
                *(_printed(printed.get(method, {}).get("nll")) for method in ("MC", "MP")),
                _printed(GAL[name]["nll"]),
                _mean(methods[_GAUSSIAN]["nll"], digits_of(methods["MC"]["nll"]["standard_error"])),
            ]
        )
    return table(head, rows)


def _rmse(sets: Sets) -> str:
    rows = [
        [name, *_measured(row["methods"], "rmse", _METHODS), _printed(GAL[name]["rmse"])]
        for name, row in sets.items()
    ]
    return table(["set", *_METHODS.values(), "Gal's MC"], rows)


def _spread(sets: Sets) -> str:
    head = ["set", "std / MC, paper tier", "r", "std / MC, accurate tier", "r"]
    head += ["time, MC", *_OURS.values(), "MC / accurate"]
    rows = []
    for name, row in sets.items():
        cells = [name]
        for tier in ("paper", "accurate"):
            std = row["std"][tier]
            cells.append(interval(std["ratio_median"], [std["ratio_5"], std["ratio_95"]], 2))
            cells.append(number(std["correlation"]))
        times = row["seconds"]["predict"]
        cells += [seconds(times[method]) for method in ("MC", *_OURS)]
        rows.append([*cells, f"{times['MC'] / times['accurate']:,.0f}"])
    return table(head, rows)


def _choices(sets: Sets) -> str:
    """Networks per set, and what the grid chose how often."""
    head = [
        "set",
        "observations",
        "splits",
        "epochs",
        "chosen drop probability (splits)",
        "chosen tau (splits)",
    ]
    rows = [
        [
            name,
            f"{row['n']:,}",
            str(row["n_splits"]),
            str(row["epochs"]),
            _counts(row["drop_probability"]),
            _counts(row["tau"]),
        ]
        for name, row in sets.items()
    ]
    return table(head, rows)


def _verdict(sets: Sets) -> str:
    """Say which sets miss the aim, by tier."""
    sentences = []
    for tier, name_of_tier in _OURS.items():
        differences = {
            name: row["methods"][tier]["nll_difference"]["in_errors"] for name, row in sets.items()
        }
        missed = [f"{name} ({number(d, 2)})" for name, d in differences.items() if d is None or abs(d) > 1]
        kept = len(sets) - len(missed)
        rest = f"; not on {', '.join(missed)}" if missed else ""
        sentences.append(
            f"The {name_of_tier} is within one standard error on {kept} of {len(sets)} sets{rest}."
        )
    return "\n".join(sentences)


def _measured(methods: Mapping[str, Any], measure: str, chosen: Iterable[str]) -> list[str]:
    """Write the figures of these methods with as many digits as MC's error needs."""
    digits = digits_of(methods["MC"][measure]["standard_error"])
    return [_mean(methods[method][measure], digits) for method in chosen]


def _mean(over_splits: Mapping[str, Any], digits: int) -> str:
    return with_error(over_splits["mean"], over_splits["standard_error"], digits)


def _printed(figure: tuple[float, float | None] | None) -> str:
    return "" if figure is None else with_error(*figure)


def _counts(values: Iterable[float]) -> str:
    return ", ".join(f"{value:g} ({n})" for value, n in sorted(Counter(values).items()))
