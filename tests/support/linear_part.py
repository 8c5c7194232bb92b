"""A rule's linear part and noise at given arguments, in a form that tests can compute with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from momentprop.moments import Moments, is_moments
from momentprop.rules.linearization import Diagonal, Linearization, Noise, Scaled
from momentprop.rules.registry import Rule


class Together:
    """All elements belong to one sample."""

    batch_first = False

    def __call__(self, rows: Tensor) -> Tensor:
        return rows.flatten(1)[None]


class PerSample:
    """The first dimension of a value is the batch."""

    batch_first = True

    def __call__(self, rows: Tensor) -> Tensor:
        return rows.flatten(2).transpose(0, 1)


@dataclass(frozen=True)
class LinearPart:
    """What a rule returned for its arguments: moments of the output, linear map and noise."""

    out: Any
    inputs: list[Moments]  # the random arguments
    linearization: Linearization

    @property
    def outputs(self) -> list[Moments]:
        return flat(self.out)

    @property
    def gain(self) -> Any:
        """The gain of an element-by-element map; None stands for 1."""
        assert isinstance(self.linearization.map, Scaled), "the rule's map is not element by element"
        return self.linearization.map.gain

    @property
    def noise(self) -> Tensor:
        """Variance of the noise that each element of the first output has for itself."""
        total = torch.zeros_like(self.outputs[0].mean)
        for noise in self.linearization.noise:
            total = total + noise.variance if isinstance(noise, Diagonal) else total
        return total

    @property
    def others(self) -> list[Noise]:
        """Noise that reaches several elements at once."""
        return [noise for noise in self.linearization.noise if not isinstance(noise, Diagonal)]

    @property
    def noise_variance(self) -> Tensor:
        """Variance of all noise in the first output, element by element."""
        out = self.outputs[0]
        if not self.others:
            return self.noise
        shared = noise_covariance(self.others, unit_rows(out.mean), Together())
        return self.noise + shared[0].diagonal().reshape(out.shape)

    def pull(self, cotangent: Any) -> list[Any]:
        """Cotangents of the random arguments, as the rule's own map returns them."""
        map = self.linearization.map
        if isinstance(map, Scaled):
            return [cotangent if map.gain is None else cotangent * map.gain]
        return list(map.pull(cotangent))

    def pulled(self, rows: Tensor, index: int = 0) -> list[Tensor]:
        """Cotangents of the random arguments from those of one output: zeros where the map says None."""
        cotangent: Any = rows
        if isinstance(self.out, (list, tuple)):
            cotangent = [rows if i == index else None for i in range(len(self.out))]
        found = self.pull(cotangent)
        assert len(found) == len(self.inputs), "the linear part returns one cotangent for each random input"
        return [
            torch.zeros(len(rows), *x.shape, dtype=rows.dtype) if c is None else c
            for c, x in zip(found, self.inputs, strict=True)
        ]


def linear_part(rule: Rule, *args: Any, **kwargs: Any) -> LinearPart:
    """What a rule returns for these arguments; it has to come with a linear part."""
    result = rule.propagate(*args, **kwargs)
    assert result.linearize is not None, f"{rule} has no linear part"
    return LinearPart(result.moments, random_arguments((args, kwargs)), result.linearize())


def noise_covariance(noises: Any, rows: Tensor, split: Any) -> Any:
    """What sources of noise add to the covariance of the outputs whose cotangents these are, per sample."""
    return sum(noise.covariance(rows, split) for noise in noises)


def unit_rows(value: Tensor) -> Tensor:
    """One cotangent for each element of a value."""
    n = value.numel()
    return torch.eye(n, dtype=value.dtype).reshape(n, *value.shape)


def random_arguments(args: Any) -> list[Moments]:
    return [leaf for leaf in pytree.tree_leaves(args, is_leaf=is_moments) if is_moments(leaf)]


def flat(out: Any) -> list[Any]:
    """Outputs of an operator as a list; most have one."""
    return list(out) if isinstance(out, (list, tuple)) else [out]
