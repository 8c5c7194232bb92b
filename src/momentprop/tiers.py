"""The tiers that ship: the rules and passes they use, and where a sweep goes back to."""

from __future__ import annotations

from dataclasses import dataclass

from momentprop.engine.cut import Cut
from momentprop.engine.fused import Finder
from momentprop.engine.jump import jumps
from momentprop.engine.selection import ALL_OUTPUTS, Selection
from momentprop.engine.tracking import tracked
from momentprop.passes.canonical import CANONICAL
from momentprop.passes.rewrites import REWRITES
from momentprop.passes.runner import Pass
from momentprop.rules.registry import Lookup, Variant


@dataclass(frozen=True)
class Tier:
    """One way to propagate moments, between cheap and accurate."""

    name: str
    rules: Lookup
    passes: tuple[Pass, ...]
    cut: Cut | None = None  # None: no backward sweep, so variances only
    fusions: tuple[Finder, ...] = ()  # operators in place of rules, where it sweeps
    heads: bool = True  # a final softmax or sigmoid is integrated, not left to its rule

    @property
    def sweeps(self) -> bool:
        """Say whether a backward sweep gives the covariance of the outputs."""
        return self.cut is not None

    def __str__(self) -> str:
        return self.name


PAPER = Tier("paper", Lookup((Variant.PAPER,)), passes=CANONICAL, heads=False)
FAST = Tier("fast", Lookup((Variant.CONTRAST,)), passes=(*CANONICAL, *REWRITES))
ACCURATE = Tier(
    "accurate",
    Lookup(linear=True),
    passes=(*CANONICAL, *REWRITES),
    cut=Cut.everything(),
    fusions=(jumps, tracked),
)
ALL = (PAPER, FAST, ACCURATE)
AUTO = "auto"  # chosen by what is traced
NAMES = (AUTO, *(tier.name for tier in ALL))


def named(name: str) -> Tier:
    """The tier of this name."""
    for tier in ALL:
        if tier.name == name:
            return tier
    raise ValueError(f"no tier is called {name!r}; there are {', '.join(map(str, ALL))}")


@dataclass(frozen=True)
class Request:
    """Holds what is asked of a network besides its inputs. Networks with equal requests can run as one."""

    tier: Tier
    selection: Selection = ALL_OUTPUTS
    unsupported: str = "error"
    jumps: int = 0
