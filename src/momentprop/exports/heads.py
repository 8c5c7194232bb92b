"""Defines what a file returns: moments, or finished predictive quantities that need no more mathematics."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from momentprop.exports.interface import name_moments
from momentprop.predict.classification import classify
from momentprop.predict.outputs import Select, chosen
from momentprop.predict.regression import WITHOUT_NOISE, regress

HEADS = ("moments", "classification", "regression")
Head = Callable[[Any], dict[str, Tensor]]  # a network's output -> named tensors


def head_of(outputs: str, options: Mapping[str, Any], select: Select = None) -> Head:
    """The function from a network's output to named tensors.

    - `"moments"`: `mean`, `variance`, and in tier `accurate` `covariance` (with `indices` where some outputs
      were chosen); with a prefix where the network has several outputs;
    - `"classification"`: `probs`, `total`, `aleatoric` and `epistemic`; options as in `classify`;
    - `"regression"`: `mean`, `std`, `total`, `aleatoric`, `epistemic`, `lower` and `upper`; options as in
      `regress`, and the interval's `level`.

    `select` picks one of several outputs by its name or position.
    """
    if outputs not in HEADS:
        raise ValueError(f"outputs must be one of {', '.join(HEADS)}, not {outputs!r}")
    if outputs == "moments" and options:
        raise ValueError(f"outputs='moments' takes no options, but got {', '.join(options)}")
    if outputs == "regression" and options.get("noise") is None and not options.get("heteroscedastic"):
        warnings.warn(WITHOUT_NOISE, stacklevel=3)
        options = {**options, "noise": 0.0}
    finish = {"moments": _moments, "classification": _classification, "regression": _regression}[outputs]

    def head(output: Any) -> dict[str, Tensor]:
        return finish(output if select is None else chosen(output, select), **options)

    return head


def _moments(output: Any) -> dict[str, Tensor]:
    return name_moments(output, everything=False)[0]


def _classification(output: Any, **options: Any) -> dict[str, Tensor]:
    predictive = classify(output, **options)
    found = {"probs": predictive.probs, "total": predictive.total}
    if predictive.aleatoric is not None:
        found |= {"aleatoric": predictive.aleatoric, "epistemic": predictive.epistemic}
    return found


def _regression(output: Any, level: float = 0.95, **options: Any) -> dict[str, Tensor]:
    predictive = regress(output, **options)
    lower, upper = predictive.interval(level)
    names = ("mean", "std", "total", "aleatoric", "epistemic")
    return {name: getattr(predictive, name) for name in names} | {"lower": lower, "upper": upper}
