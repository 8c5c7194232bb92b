"""Turns figures into a recommendation, by thresholds that are stated with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from momentprop.validation.equivalence import Samples
from momentprop.validation.figures import Figures
from momentprop.validation.layers import LayerRow

GOOD, FAIR, POOR = "agrees", "usable with care", "does not agree"


@dataclass(frozen=True)
class Thresholds:
    """Holds what a tier must reach, all of it, to be called by a grade."""

    samples: float  # worth in MC samples
    std_ratio: float  # the median within 1/this .. this
    std_correlation: float
    mean_shift: float  # in units of MC's std

    def misses(self, worth: Samples, figures: Figures, noise: float) -> list[str]:
        """Say in words what is not reached; `noise` is the mean shift that sampling alone shows."""
        found = []
        if not worth.is_at_least(self.samples) and worth.bound != ">":
            found.append(f"it is worth {worth} MC samples, below {self.samples:g}")
        ratio = _number(figures, "std_ratio")
        if not 1 / self.std_ratio <= ratio <= self.std_ratio:
            found.append(f"its std is {ratio:.2f} times that of MC dropout")
        related = _number(figures, "std_correlation")
        # sampled stds scatter themselves: nothing correlates better with them than their limit
        if related < self.std_correlation * _number(figures, "std_correlation_limit"):
            found.append(f"its std correlates with {related:.2f}, below {self.std_correlation:g}")
        shift = _number(figures, "mean_shift")
        if shift > self.mean_shift + noise:
            found.append(f"its mean is {shift:.2f} std off, above {self.mean_shift:g}")
        return found


GRADES = {GOOD: Thresholds(50, 1.1, 0.95, 0.1), FAIR: Thresholds(10, 1.3, 0.8, 0.3)}


@dataclass(frozen=True)
class Verdict:
    """A recommendation, its reasons, and the grade of every tier."""

    recommendation: str  # a tier, or "mc"
    sentences: tuple[str, ...]
    grades: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join(self.sentences)


def judge(
    worths: Mapping[str, Samples],
    figures: Mapping[str, Figures],
    cost: Mapping[str, float],
    layers: Mapping[str, list[LayerRow]],
    n_samples: int,
) -> Verdict:
    """Choose among the tiers of the best grade the cheapest that is worth at least 0.8 times the best."""
    noise = 0.67 / math.sqrt(n_samples)  # the median of |N(0, 1)| / sqrt(T)
    missed = {
        grade: {t: limits.misses(worths[t], figures[t], noise) for t in worths}
        for grade, limits in GRADES.items()
    }
    grades = {t: next((g for g in GRADES if not missed[g][t]), POOR) for t in worths}
    for grade in GRADES:
        reached = [t for t in worths if grades[t] == grade]
        if reached:
            best = max(_as_number(worths[t]) for t in reached)
            close = [t for t in reached if _as_number(worths[t]) >= 0.8 * best]
            chosen = min(close, key=lambda t: cost.get(t, math.inf))
            return Verdict(
                chosen, _for_tier(chosen, grade, worths, figures, cost, missed[GOOD][chosen]), grades
            )
    return Verdict("mc", _for_sampling(worths, missed[FAIR], layers), grades)


def _for_tier(
    chosen: str,
    grade: str,
    worths: Mapping[str, Samples],
    figures: Mapping[str, Figures],
    cost: Mapping[str, float],
    missed: list[str],
) -> tuple[str, ...]:
    what = f"Use tier {chosen}" + ("." if grade == GOOD else ", with care.")
    says = (
        f"On these inputs one pass of it is worth {_amount(worths[chosen])} samples of MC dropout; "
        f"its std is {_number(figures[chosen], 'std_ratio'):.2f} times MC's (median)"
    )
    if figures[chosen].get("std_correlation") is not None:
        says += f" and follows it with correlation {_number(figures[chosen], 'std_correlation'):.3f}"
    found = [what, f"{says}."]
    if chosen in cost:
        found.append(f"It costs {cost[chosen]:.1f} plain passes.")
    if missed:
        found.append(f"Short of full agreement: {'; '.join(missed)}.")
    return tuple(found)


def _for_sampling(
    worths: Mapping[str, Samples], missed: Mapping[str, list[str]], layers: Mapping[str, list[LayerRow]]
) -> tuple[str, ...]:
    best = max(worths, key=lambda t: _as_number(worths[t]))
    found = ["Use MC dropout here.", f"The best tier, {best}, does not agree: {'; '.join(missed[best])}."]
    rows = layers.get(best) or next((r for r in layers.values() if r), [])
    if rows:
        worst = max(rows, key=lambda r: r.introduced)
        where = worst.module or "the model itself"
        found.append(f"Most of the error comes in at {where} ({worst.short_operator}).")
    return tuple(found)


def _as_number(worth: Samples) -> float:
    return 0.0 if worth.bound == "<" or math.isnan(worth.value) else worth.value


def _amount(worth: Samples) -> str:
    words = {">": "more than ", "<": "fewer than "}
    return words.get(worth.bound, "") + str(Samples(worth.value))


def _number(figures: Figures, name: str) -> float:
    value = figures.get(name)
    if value is None:  # undefined on these inputs: does not count against the tier
        return {"std_ratio": 1.0, "std_correlation": 1.0, "std_correlation_limit": 1.0}.get(name, 0.0)
    return value if isinstance(value, (int, float)) else value.value
