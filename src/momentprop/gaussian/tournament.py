"""The maximum of n independent Gaussians, as a tournament.

The maximum of two halves, of two halves of the winners, and so on, each taken as Gaussian for the next round.
"""

from __future__ import annotations

import torch
from torch import Tensor

from momentprop.gaussian.normal import max_response


def tournament(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of the maximum over the last dimension, and every element's chance, [..., n]."""
    places = _order(mean.shape[-1])
    index = [places.index(i) for i in range(mean.shape[-1])]
    chances = torch.ones_like(mean)[..., None, :]  # [..., n, 1] after the first round, then twice as long
    chances = chances.mT
    while mean.shape[-1] > 1:
        half = mean.shape[-1] // 2
        pairs = [t[..., :half] for t in (mean, variance)] + [
            t[..., half : 2 * half] for t in (mean, variance)
        ]
        won = max_response(*pairs)
        wins = won[2][..., None]
        first, second = chances[..., :half, :] * wins, chances[..., half : 2 * half, :] * (1 - wins)
        merged = torch.cat([first, second], -1)
        rest_mean, rest_variance = mean[..., 2 * half :], variance[..., 2 * half :]
        if rest_mean.shape[-1]:  # one without a partner goes on, its chances padded
            rest = chances[..., 2 * half :, :]
            merged = torch.cat([merged, torch.nn.functional.pad(rest, (0, rest.shape[-1]))], -2)
        mean = torch.cat([won[0], rest_mean], -1)
        variance = torch.cat([won[1], rest_variance], -1)
        chances = merged
    return mean[..., 0], variance[..., 0], chances[..., 0, index]


def _order(n: int) -> list[int]:
    """Tell which element each place of a tournament's chances belongs to; -1 where there is none."""
    places: list[list[int]] = [[i] for i in range(n)]
    while len(places) > 1:
        half = len(places) // 2
        merged = [places[i] + places[half + i] for i in range(half)]
        if len(places) % 2:
            merged.append(places[-1] + [-1] * len(places[-1]))
        places = merged
    return places[0]
