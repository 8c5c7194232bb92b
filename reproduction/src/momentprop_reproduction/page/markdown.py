"""Tables and numbers of the results page."""

from __future__ import annotations

import math
from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table in Markdown: the first column to the left, the others to the right.

    >>> print(table(["set", "NLL"], [["yacht", "1.25"]]))
    | set | NLL |
    |:--|--:|
    | yacht | 1.25 |
    """
    lines = [head, [":--"] + ["--:"] * (len(head) - 1), *rows]
    return "\n".join(
        "|" + "|".join(line) + "|" if i == 1 else "| " + " | ".join(line) + " |"
        for i, line in enumerate(lines)
    )


def number(value: float | None, digits: int = 3) -> str:
    """
    >>> number(0.12345), number(None), number(-0.0001)
    ('0.123', '-', '0.000')
    """
    if value is None:
        return "-"
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if float(text) == 0 else text


def with_error(value: float | None, error: float | None, digits: int = 2) -> str:
    """
    >>> with_error(2.4, 0.041), with_error(2.4, None)
    ('2.40 ± 0.04', '2.40')
    """
    return number(value, digits) + (f" ± {number(error, digits)}" if error is not None else "")


def interval(value: float | None, ends: Sequence[float] | None, digits: int = 3) -> str:
    """
    >>> interval(1.0, [0.9, 1.1], 2)
    '1.00 (0.90..1.10)'
    """
    if ends is None:
        return number(value, digits)
    return f"{number(value, digits)} ({number(ends[0], digits)}..{number(ends[1], digits)})"


def digits_of(error: float | None, least: int = 2) -> int:
    """Say how many digits show two of the error, at least `least`.

    >>> digits_of(0.041), digits_of(0.000046), digits_of(None), digits_of(0.0)
    (3, 6, 2, 2)
    """
    return max(least, 1 - math.floor(math.log10(error))) if error else least


def seconds(value: float | None) -> str:
    """
    >>> seconds(0.0123), seconds(75.0), seconds(None), seconds(7260)
    ('12.3 ms', '75 s', '-', '121 min')
    """
    if value is None:
        return "-"
    if value < 1:
        return f"{1000 * value:.3g} ms"
    return f"{value:.3g} s" if value < 600 else f"{value / 60:.0f} min"
