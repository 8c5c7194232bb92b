"""Lists what is compared: the plain network, MC dropout, the tiers, a saved network."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from momentprop import tiers

PLAIN, MC, SAVED = "plain", "mc", "saved"
TIERS = tuple(tier.name for tier in tiers.ALL)


@dataclass(frozen=True)
class Method:
    """Names a method to measure: `kind` is plain, mc, saved or a tier."""

    kind: str
    samples: int = 0

    @property
    def name(self) -> str:
        return f"MC, T = {self.samples}" if self.kind == MC else self.kind

    @property
    def slug(self) -> str:
        """Return the name in a form for the names of files."""
        return re.sub(r"\W+", "-", self.name)


def choose(kinds: Sequence[str], samples: Sequence[int]) -> list[Method]:
    """The methods of these kinds, plain first: it is what all others are divided by.

    >>> [m.name for m in choose(["saved", "mc"], [10, 50])]
    ['plain', 'MC, T = 10', 'MC, T = 50', 'saved']
    """
    known = (PLAIN, MC, *TIERS, SAVED)
    if unknown := [kind for kind in kinds if kind not in known]:
        raise ValueError(f"methods are {', '.join(known)}, not {', '.join(unknown)}")
    if any(n < 2 for n in samples):
        raise ValueError("MC dropout needs at least two samples")
    found: list[Method] = []
    for kind in known:
        if kind == MC and MC in kinds:
            found += [Method(MC, n) for n in samples]
        elif kind in kinds or kind == PLAIN:
            found.append(Method(kind))
    return found
