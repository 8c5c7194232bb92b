"""Holds what stand-ins have in common: each is the rule of one node, made from its operator alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from momentprop.moments import is_moments, mean_of, variance_of
from momentprop.passes.stand_ins.site import Site
from momentprop.rules.linearization import Propagated


class AtMean:
    """Computes the operator at the means. Results are known."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.site.packed(self.site.run([mean_of(v) for v in self.site.values(args, kwargs)]))


class StandIn:
    """Gives the moments of an operator's results, and its linear part."""

    exactness: str

    def __init__(self, site: Site) -> None:
        self.site = site

    def __deepcopy__(self, memo: dict[int, Any]) -> StandIn:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Propagated:
        values = self.site.values(args, kwargs)
        return self.answer(values, [mean_of(v) for v in values])

    def answer(self, values: list[Any], means: list[Any]) -> Propagated:
        """Moments of all results that are real numbers, and the linear part."""
        raise NotImplementedError

    def variances(self, values: list[Any]) -> list[Tensor]:
        """Variances of the random inputs."""
        return [variance_of(values[places[0]]) for places in self.site.inputs]

    def in_order(self, values: list[Any], pulled: Sequence[Any]) -> list[Any]:
        """Cotangents of inputs, each where its input is first used. Only random ones are asked for."""
        first = {places[0]: c for places, c in zip(self.site.inputs, pulled, strict=True)}
        return [first.get(i) for i, v in enumerate(values) if is_moments(v)]
