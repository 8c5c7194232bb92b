"""The tiers that ship: the rules and rewrites they use, and whether a sweep goes back."""

from __future__ import annotations

from dataclasses import dataclass

from momentprop.rules.registry import Lookup, Variant


@dataclass(frozen=True)
class Tier:
    """One way to propagate moments, between cheap and accurate."""

    name: str
    rules: Lookup
    rewrites: bool

    @property
    def sweeps(self) -> bool:
        """Whether a backward sweep gives the covariance of the outputs; if not, there are variances only."""
        return self.rules.linear

    def __str__(self) -> str:
        return self.name


PAPER = Tier("paper", Lookup((Variant.PAPER,)), rewrites=False)
FAST = Tier("fast", Lookup((Variant.CONTRAST,)), rewrites=True)
ACCURATE = Tier("accurate", Lookup(linear=True), rewrites=True)
ALL = (PAPER, FAST, ACCURATE)
AUTO = "auto"  # chosen by what is traced
NAMES = (AUTO, *(tier.name for tier in ALL))


def named(name: str) -> Tier:
    """The tier of this name."""
    for tier in ALL:
        if tier.name == name:
            return tier
    raise ValueError(f"no tier is called {name!r}; there are {', '.join(map(str, ALL))}")
