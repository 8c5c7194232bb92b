"""The report as one HTML file that loads nothing from elsewhere.

Tables stand in the markup, so that the page can be read without scripts; charts are drawn by uPlot (MIT),
which is embedded. Templates escape names out of the user's model, in the markup and in the data.
"""

from __future__ import annotations

import math
from importlib.resources import files
from typing import Any

from momentprop.evaluate.estimates import Estimate
from momentprop.validation import tables
from momentprop.validation.charts import charts
from momentprop.validation.equivalence import Samples
from momentprop.validation.findings import QUALITY, Findings, shown
from momentprop.validation.tables import Table
from momentprop.validation.verdict import FAIR, GOOD, GRADES
from momentprop.version import __version__

_CLASSES = {GOOD: "good", FAIR: "fair"}
_MOST_LAYERS = 30
_OUTPUT_COLUMNS = ("output", "std_ratio", "std_correlation", "mean_shift")


def page(report: Findings) -> str:
    """Write the whole page."""
    quality = tables.quality(report, [name for name in QUALITY if name != "ood_auroc"])
    novelty = tables.quality(report, ["ood_auroc"])
    panels = {
        "agreement": "Agreement",
        "quality": "Against targets" if quality.rows else "",
        "outputs": "Outputs",
        "layers": "Layer by layer" if report.layers or report.missing_layers else "",
        "novelty": "Novel inputs" if novelty.rows else "",
        "cost": "Cost" if report.latency else "",
        "method": "How it was measured",
    }
    worst_outputs = tables.recommended_first(report, report.worst_outputs)
    return _filled(
        "report.html",
        panels={key: title for key, title in panels.items() if title},
        charts=charts(report),
        grade_class=lambda tier: _CLASSES.get(report.verdict.grades.get(tier, ""), "poor"),
        grades=GRADES,
        report=report,
        agreement=tables.agreement(report),
        quality=quality,
        novelty=novelty,
        cost=tables.cost(report),
        outputs={tier: Table.of("", rows, _OUTPUT_COLUMNS) for tier, rows in worst_outputs.items()},
        layers=tables.worst_layers(report, _MOST_LAYERS),
    )


def failure_page(model: str, error: Exception) -> str:
    """Write the page of a model that cannot be converted: which operators stand in the way, and where."""
    rows = [[p.operator, p.module or "(model)", p.source, p.reason] for p in getattr(error, "places", ())]
    return _filled(
        "failure.html",
        panels={"reason": "What stands in the way"},
        charts={},
        model=model,
        error=str(error),
        places=Table("", ["operator", "module", "place", "reason"], rows),
        version=__version__,
    )


def _filled(template: str, charts: dict[str, Any], **parts: Any) -> str:
    """Fill a template with these parts; it finds the files that it embeds by `file(name)`."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        loader=FunctionLoader(_read),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"shown": shown, "sorted_by": _sorted_by}
    return environment.get_template(template).render(charts=_finite(charts), file=_read, **parts)


def _sorted_by(value: Any) -> Any:
    """Return what the page sorts a cell by."""
    return value.value if isinstance(value, (Estimate, Samples)) else "" if value is None else value


def _finite(value: Any) -> Any:
    """Write numbers of charts in six digits, and those that JSON does not know as null."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _read(name: str) -> str:
    return (files("momentprop.validation") / "page_files" / name).read_text(encoding="utf-8")
