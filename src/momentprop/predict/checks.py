"""Checks what users give before anything is computed from it."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def double(value: Tensor) -> Tensor:
    """Convert to float64 (on the CPU for mps, which lacks it)."""
    value = value.detach()
    return (value.cpu() if value.device.type == "mps" else value).double()


def rounded(value: Tensor, like: Tensor, sign: int) -> Tensor:
    """A float64 in the dtype and on the device of `like`, rounded down (sign -1) or up (1)."""
    result = value.to(like.dtype)
    limits = torch.finfo(
        like.dtype
    )  # one step at least, and little more; nextafter does not exist everywhere
    return (result + sign * (result.abs() * limits.eps + limits.smallest_normal * limits.eps)).to(like.device)


def check_choice(value: str, name: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not possible here; choose {' or '.join(map(repr, choices))}")


def check_share(value: float, name: str, one: bool = False) -> float:
    if not (0 < value < 1 or (one and value == 1)):
        raise ValueError(f"{name}={value} must lie in (0, 1{']' if one else ')'}; for example {name}=0.9")
    return float(value)


def rank_of(share: float, n: int) -> int:
    """The smallest k with k / n >= share: ceil(share n), but 7 for 0.07 of 100 and 5 for 5/6 of 6."""
    k = max(1, math.ceil(share * n) - 1)
    while k / n < share:
        k += 1
    return k


def check_values(value: Tensor, name: str, finite: bool = False) -> None:
    if value.numel() == 0:
        raise ValueError(f"{name} is empty; give at least one value")
    bad = int((~value.isfinite() if finite else value.isnan()).sum())
    if bad:
        what = "NaN or infinite" if finite else "NaN"
        raise ValueError(f"{bad} of {value.numel()} values in {name} are {what}; leave those inputs out")


def check_probs(probs: Tensor, empty: bool = False) -> None:
    if probs.dim() < 2 or not probs.is_floating_point() or (probs.numel() == 0 and not empty):
        raise ValueError(f"probs is {describe(probs)}; give probabilities [n, K, ...], n and K at least 1")
    values = double(probs)
    slack = 1e-3 + 4 * torch.finfo(probs.dtype).eps
    if (values < 0).any() or ((values.sum(1) - 1).abs() > slack).any():
        raise ValueError(
            "probs must be 0 or larger, and sum to 1 over dimension 1; of logits, take softmax(1)"
        )


def check_log_probs(log_probs: Tensor) -> None:
    if log_probs.dim() < 2 or not log_probs.is_floating_point():
        raise ValueError(f"log_probs is {describe(log_probs)}; give log probabilities [n, K, ...]")


def check_target(target: Tensor, probs: Tensor) -> None:
    shape = [probs.shape[0], *probs.shape[2:]]
    kind = target.dtype
    if list(target.shape) != shape or kind.is_floating_point or kind.is_complex or kind == torch.bool:
        raise ValueError(f"target is {describe(target)}; give integer labels {shape}")
    if target.numel() == 0:
        raise ValueError("target is empty; give at least one label")
    least, most = int(target.min()), int(target.max())
    if least < 0 or most >= probs.shape[1]:
        raise ValueError(
            f"target has labels {least} to {most}, classes are 0 to {probs.shape[1] - 1}; leave others out"
        )


def check_uniform(uniform: Tensor, probs: Tensor) -> Tensor:
    shape = [probs.shape[0], *probs.shape[2:]]
    values = double(uniform)
    if list(uniform.shape) != shape or not ((values >= 0) & (values <= 1)).all():
        raise ValueError(f"uniform is {describe(uniform)}; give numbers in [0, 1] of shape {shape}")
    return values


def describe(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
