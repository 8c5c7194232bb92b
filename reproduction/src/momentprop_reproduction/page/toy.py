"""The toy regression on the results page."""

from __future__ import annotations

from typing import Any

from momentprop_reproduction.experiments.published import NOTEBOOK_SOURCE
from momentprop_reproduction.page.markdown import interval, number, seconds, table


def section(record: dict[str, Any], images: str) -> str:
    summary, settings = record["summary"], record["settings"]
    low, high = summary["training_range"]
    truth = f"MC T={settings['truth_samples']:,}"
    rows = [
        [
            name,
            number(row["rmse"]),
            number(row["nll"]),
            interval(row["std_ratio_inside"], row["std_ratio_inside_range"], 2),
            interval(row["std_ratio_outside"], row["std_ratio_outside_range"], 2),
            seconds(row["seconds"]),
        ]
        for name, row in summary["methods"].items()
    ]
    head = ["method", "RMSE", "NLL", "std / truth inside", "std / truth outside", "time"]
    return f"""## Toy regression (section 4.1, figure 3)

Three dense layers of 256 with ReLU and dropout 0.3, trained for {settings["epochs"]:,} epochs
on the curve of the authors' notebook ({NOTEBOOK_SOURCE}), on {low:.0f}..{high:.1f}.
RMSE and NLL are those of 1,000 fresh observations inside that range; the predictive is
N(mean, variance + {summary["noise"]}²), for samples their mixture. std / truth: standard deviation over that
of {truth}, median and 5..95 % over the inputs drawn in the figure. Time: one prediction of all of
them, the shortest of {settings["repeats"]}.
No numbers that the paper may print for this experiment were at hand.

{table(head, rows)}

![Means and bands of two standard deviations]({images}/{record["figures"][0]})
"""
