"""The tiers that ship: which variants of the rules are used, which rewrites, and whether a sweep goes back."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tier:
    """One way to propagate moments, between cheap and accurate.

    `sweeps` says that a backward sweep gives the outputs' covariance; without it there are variances only.
    """

    name: str
    rewrites: bool
    sweeps: bool

    def __str__(self) -> str:
        return self.name


PAPER = Tier("paper", rewrites=False, sweeps=False)
FAST = Tier("fast", rewrites=True, sweeps=False)
ACCURATE = Tier("accurate", rewrites=True, sweeps=True)
ALL = (PAPER, FAST, ACCURATE)
AUTO = "auto"  # chosen by what is traced
NAMES = (AUTO, *(tier.name for tier in ALL))


def named(name: str) -> Tier:
    """The tier of this name."""
    for tier in ALL:
        if tier.name == name:
            return tier
    raise ValueError(f"no tier is called {name!r}; there are {', '.join(map(str, ALL))}")
