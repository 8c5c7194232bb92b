"""What figures show: their legends, their size."""

from __future__ import annotations

from io import BytesIO
from typing import Any


def legend_of(panel: Any) -> list[str]:
    return [text.get_text() for text in panel.get_legend().get_texts()]


def check_column(panel: Any, is_square: bool = False) -> None:
    """Check that the figure of a panel is as wide as a column, and keeps its text inside."""
    figure = panel.figure
    assert figure.get_size_inches()[0] == 3.4
    target = BytesIO()
    figure.savefig(target, format="png")
    assert target.getvalue().startswith(b"\x89PNG")
    width, height = figure.get_size_inches()
    drawn = figure.get_tightbbox()
    assert -0.01 <= drawn.x0 < drawn.x1 <= width + 0.01
    assert -0.01 <= drawn.y0 < drawn.y1 <= height + 0.01
    if not is_square:  # equal axes leave room at the sides
        assert panel.get_window_extent().width > 0.7 * width * figure.dpi
