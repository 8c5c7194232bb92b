"""The report as one HTML file that loads nothing from elsewhere.

Tables are written here, so that the page can be read without scripts; charts are drawn by uPlot (MIT), which
is embedded. Every name out of the user's model is escaped, in the markup and in the data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TypeVar

from momentprop.validation.charts import charts
from momentprop.validation.findings import AGREEMENT, LABELS, MC, QUALITY, Findings
from momentprop.validation.markup import Cell, Panel, chart, filled, note, number, table, text
from momentprop.validation.verdict import FAIR, GOOD, GRADES
from momentprop.version import __version__

_CLASSES = {GOOD: "good", FAIR: "fair"}
_MOST_LAYERS = 30
_Rows = TypeVar("_Rows")


def page(report: Findings) -> str:
    """Write the whole page."""
    verdict = report.verdict
    parts = {
        "model": escape(report.model),
        "facts": escape(_facts(report)),
        "partial": _partial(report),
        "grade": _CLASSES.get(verdict.grades.get(verdict.recommendation, ""), "poor"),
        "recommendation": escape(verdict.sentences[0] if verdict.sentences else ""),
        "reasons": escape(" ".join(verdict.sentences[1:])),
        "grades": "".join(
            f'<span class="{_CLASSES.get(grade, "poor")}">{escape(tier)}: <b>{escape(grade)}</b></span>'
            for tier, grade in verdict.grades.items()
        ),
        "footer": escape(_footer(report)),
    }
    return filled(parts, [panel for panel in _panels(report) if panel[2]], charts(report))


def failure_page(model: str, error: Exception) -> str:
    """Write the page of a model that cannot be converted: which operators stand in the way, and where."""
    places = getattr(error, "places", ())
    body = table(
        ["operator", "module", "place", "reason"],
        [[text(p.operator), text(p.module or "(model)"), text(p.source), text(p.reason)] for p in places],
        (0, 1, 2, 3),
    )
    parts = {
        "model": escape(model),
        "facts": "not validated",
        "partial": "",
        "grade": "poor",
        "recommendation": "This model cannot be converted.",
        "reasons": escape(str(error).splitlines()[0].rstrip(":") + "."),
        "grades": "",
        "footer": escape(f"momentprop {__version__}"),
    }
    advice = f"<h3>In full</h3><pre>{escape(str(error))}</pre>"
    return filled(parts, [("reason", "What stands in the way", (body if places else "") + advice)], {})


def _panels(report: Findings) -> list[Panel]:
    return [
        ("agreement", "Agreement", _agreement(report)),
        ("quality", "Against targets", _quality(report)),
        ("outputs", "Outputs", _outputs(report)),
        ("layers", "Layer by layer", _layers(report)),
        ("novelty", "Novel inputs", _novelty(report)),
        ("cost", "Cost", _cost(report)),
        ("method", "How it was measured", _method(report)),
    ]


def _agreement(report: Findings) -> str:
    return (
        "<p>Every method beside MC dropout. The worth in MC samples is the number of samples at which MC "
        "dropout itself is as far from all samples as this tier is.</p>"
        + _figures(report, AGREEMENT, [m for m in report.figures if m != MC])
        + note(f"{report.sampling_error}.")
        + chart("What a tier is worth", "convergence")
        + note("Where the curve of MC dropout crosses a tier's line stands the tier's worth in samples.")
    )


def _quality(report: Findings) -> str:
    names = [n for n in QUALITY if n != "ood_auroc" and any(n in f for f in report.figures.values())]
    if not names:
        return ""
    body = _figures(report, names, list(report.figures))
    found = charts(report)
    for title, key in (
        ("Reliability", "reliability"),
        ("Selective prediction", "selective"),
        ("Coverage of intervals", "coverage"),
    ):
        body += chart(title, key) if key in found else ""
    if report.task == "regression":
        body += note("The noise in the data is fitted on every second input; figures are of the others.")
    return body + note("In brackets: intervals of 95 %.")


def _outputs(report: Findings) -> str:
    body = chart("Std, place by place", "std")
    body += note("At most 1,000 places, evenly spaced over inputs and outputs.")
    for tier, rows in _recommended_first(report, report.worst_outputs):
        header = ["output", "std / MC std", "std correlation", "mean shift / std"]
        cells: list[list[Cell]] = [
            [
                (str(r.output), float(r.output)),
                *[number(v) for v in (r.std_ratio, r.std_correlation, r.mean_shift)],
            ]
            for r in rows
        ]
        body += f"<h3>Tier {escape(tier)}: outputs, worst first</h3>" + table(header, cells)
    return body


def _layers(report: Findings) -> str:
    if not report.layers and not report.missing_layers:
        return ""
    floor = 1 / math.sqrt(max(1, report.layer_samples))
    body = (
        "<p>Mean and variance of single elements at every node behind a dropout, as the forward sweep "
        f"of each tier has them, beside {report.layer_samples:,} samples of MC dropout on "
        f"{report.layer_inputs} inputs, run on the tier's own graph. The error is the relative error of the "
        "std plus the shift of the mean in std; what a node introduces is its error less the largest of its "
        "inputs'. Errors below about "
        f"{floor:.2f} are within the error of sampling. The last row is the output, for tier accurate with "
        "the covariance of the sweep back.</p>"
    )
    for tier, why in report.missing_layers.items():
        body += note(f"Tier {tier}: {why}.")
    header = ["module", "operator", "depth", "std / MC std", "std correlation", "mean shift", "introduced"]
    for tier, rows in _recommended_first(report, report.layers):
        worst = sorted(rows, key=lambda r: -r.introduced)[:_MOST_LAYERS]
        cells: list[list[Cell]] = [
            [
                (escape(r.module or "(model)"), r.module),
                (
                    f'<span title="{escape(f"{r.operator} {r.source}")}">{escape(r.short_operator)}</span>',
                    r.operator,
                ),
                (str(r.depth), float(r.depth)),
                *[number(v) for v in (r.std_ratio, r.std_correlation, r.mean_shift, r.introduced)],
            ]
            for r in worst
        ]
        body += f"<h3>Tier {escape(tier)}</h3>" + chart("", f"layers-{tier}") + table(header, cells, (0, 1))
        body += note(f"The {len(worst)} nodes of {len(rows)} that introduce most, worst first.")
    return body


def _recommended_first(report: Findings, by_tier: dict[str, _Rows]) -> list[tuple[str, _Rows]]:
    return sorted(by_tier.items(), key=lambda item: item[0] != report.verdict.recommendation)


def _novelty(report: Findings) -> str:
    if not any("ood_auroc" in f for f in report.figures.values()):
        return ""
    score = "the entropy of the classes" if report.task == "classification" else "the mean std of the outputs"
    methods = [m for m, f in report.figures.items() if "ood_auroc" in f]
    return (
        f"<p>How well {score} tells {report.n_ood} novel inputs from {report.n_inputs} known ones.</p>"
        + _figures(report, ["ood_auroc"], methods)
        + chart("ROC", "roc")
    )


def _cost(report: Findings) -> str:
    if not report.latency:
        return ""
    header = ["batch", "plain pass, ms", *report.latency[0].ratios]
    rows: list[list[Cell]] = [
        [
            (str(r.batch), float(r.batch)),
            number(1e3 * r.plain_seconds),
            *[(f"{v:.1f}", v) for v in r.ratios.values()],
        ]
        for r in report.latency
    ]
    return (
        "<p>Time in units of one plain pass, on this machine, not compiled; methods took turns.</p>"
        + table(header, rows)
        + note(report.machine)
    )


def _method(report: Findings) -> str:
    rows: list[list[Cell]] = [
        [
            (escape(name), name),
            (f"at least {t.samples:g}", t.samples),
            (f"{1 / t.std_ratio:.2f} to {t.std_ratio:.2f}", t.std_ratio),
            (f"at least {t.std_correlation:g}", t.std_correlation),
            (f"at most {t.mean_shift:g}", t.mean_shift),
        ]
        for name, t in GRADES.items()
    ]
    header = ["grade", "worth in MC samples", "std / MC std", "std correlation", "mean shift / std"]
    body = (
        "<p>A tier has the first of these grades all of whose limits it reaches. "
        "Limits allow for the error of sampling: stds of few samples scatter, and so do means.</p>"
        + table(header, rows)
    )
    body += (
        f"<p>MC dropout: {report.n_samples:,} samples for every input, seed {report.seed}. Its error with T "
        "samples is measured on disjoint blocks of T samples, each against all others, up to half of the "
        "samples: a worth beyond that shows as a bound. Classes: Kullback-Leibler divergence between "
        "predictive probabilities. Other outputs: between Gaussians of the same mean and variance, without "
        "noise of the data.</p>"
    )
    for tier, why in report.missing.items():
        body += f"<h3>Tier {escape(tier)} is missing</h3><pre>{escape(why)}</pre>"
    return body


def _figures(report: Findings, names: Sequence[str], methods: list[str]) -> str:
    used = [n for n in names if n == "t_eq" or any(n in report.figures[m] for m in methods)]
    rows: list[list[Cell]] = []
    for method in methods:
        cells: list[Cell] = [(escape(method), method)]
        for name in used:
            if name == "t_eq":
                worth = report.worths.get(method)
                cells.append(("-", None) if worth is None else (escape(str(worth)), worth.value))
            else:
                cells.append(number(report.figures[method].get(name)))
        rows.append(cells)
    return table(["method", *[LABELS[n] for n in used]], rows, chosen=report.verdict.recommendation)


def _facts(report: Findings) -> str:
    shape = " x ".join(map(str, report.outputs)) or "1"
    novel = f", {report.n_ood:,} novel inputs" if report.n_ood else ""
    return (
        f"{report.task}; {report.n_inputs:,} inputs{novel}; outputs {shape}; "
        f"{report.n_samples:,} samples of MC dropout"
    )


def _partial(report: Findings) -> str:
    if not report.partial:
        return ""
    return '<p class="partial"><strong>Partial.</strong> Sampling was interrupted; this is what was done.</p>'


def _footer(report: Findings) -> str:
    used = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return f"{used}. {report.machine}. Charts: uPlot, MIT licence."
