"""Pieces of the page: tables, places of charts, and a template filled in. All text is escaped here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from momentprop.evaluate.estimates import Estimate
from momentprop.validation.findings import shown

Cell = tuple[str, float | str | None]  # markup, and what to sort by
Panel = tuple[str, str, str]  # key, title, markup


def number(value: float | Estimate | None) -> Cell:
    if isinstance(value, Estimate):
        text, _, interval = shown(value).partition(" ")
        return f'{text} <span class="interval">{escape(interval)}</span>', value.value
    if value is None or math.isnan(value):
        return "-", None
    return escape(shown(value)), value


def text(value: object) -> Cell:
    return escape(str(value)), str(value)


def table(header: list[str], rows: list[list[Cell]], text: Sequence[int] = (0,), chosen: str = "") -> str:
    def cell(i: int, content: Cell) -> str:
        markup, key = content
        style = ' class="text"' if i in text else ""
        return f'<td{style} data-value="{escape("" if key is None else str(key))}">{markup}</td>'

    head = "".join(
        f'<th scope="col"{" class=text" if i in text else ""}>{escape(h)}</th>' for i, h in enumerate(header)
    )
    lines = [
        f"<tr{' class=chosen' if chosen and row[0][1] == chosen else ''}>"
        + "".join(cell(i, c) for i, c in enumerate(row))
        + "</tr>"
        for row in rows
    ]
    return (
        '<div class="wide" tabindex="0" role="region" aria-label="Table"><table class="sortable">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>\n"
    )


def chart(title: str, key: str) -> str:
    head = f"<h3>{escape(title)}</h3>" if title else ""
    return f'{head}<div class="chart" data-chart="{escape(key)}"></div>\n'


def note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>\n'


def filled(parts: Mapping[str, str], panels: Sequence[Panel], charts: dict[str, Any]) -> str:
    """Fill the template with these parts, panels and charts."""
    parts = {
        **parts,
        "tabs": "".join(
            f'<button type="button" role="tab" id="tab-{key}" aria-controls="{key}">{escape(title)}</button>'
            for key, title, _ in panels
        ),
        "panels": "\n".join(
            f'<section class="panel" role="tabpanel" id="{key}" aria-labelledby="tab-{key}">'
            f"<h2>{escape(title)}</h2>\n{body}</section>"
            for key, title, body in panels
        ),
        "data": _embedded({"charts": charts}),
        "style": _read("page.css"),
        "library_style": _read("uPlot.min.css"),
        "library": _read("uPlot.iife.min.js"),
        "script": _read("page.js"),
    }
    first, *pieces = _read("page.html").split("{{")
    made = [first]
    for piece in pieces:  # in one pass: what is filled in is not looked at again
        name, _, rest = piece.partition("}}")
        made += [parts[name], rest]
    return "".join(made)


def _embedded(value: dict[str, Any]) -> str:
    """Write JSON that cannot end its script element."""

    def finite(v: Any) -> Any:
        if isinstance(v, dict):
            return {k: finite(u) for k, u in v.items()}
        if isinstance(v, list):
            return [finite(u) for u in v]
        if isinstance(v, float):
            return float(f"{v:.6g}") if math.isfinite(v) else None
        return v

    text = json.dumps(finite(value), allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _read(name: str) -> str:
    return (files("momentprop.validation") / "page_files" / name).read_text(encoding="utf-8")
