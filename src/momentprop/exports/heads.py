"""Defines what a file returns: moments, or finished predictive quantities that need no more mathematics."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from momentprop.errors import ExportError
from momentprop.exports.interface import name_moments
from momentprop.moments import is_moments
from momentprop.predict.classification import classify
from momentprop.predict.regression import WITHOUT_NOISE, regress

HEADS = ("moments", "classification", "regression")
Head = Callable[[Any], dict[str, Tensor]]  # a network's output -> named tensors


def head_of(outputs: str, options: Mapping[str, Any], select: str | int | None = None) -> Head:
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
        return finish(output if select is None else _selected(output, select), **options)

    return head


def _moments(output: Any) -> dict[str, Tensor]:
    return name_moments(output, everything=False)[0]


def _classification(output: Any, **options: Any) -> dict[str, Tensor]:
    predictive = classify(_only(output), **options)
    found = {"probs": predictive.probs, "total": predictive.total}
    if predictive.aleatoric is not None:
        found |= {"aleatoric": predictive.aleatoric, "epistemic": predictive.epistemic}
    return found


def _regression(output: Any, level: float = 0.95, **options: Any) -> dict[str, Tensor]:
    heteroscedastic = bool(options.get("heteroscedastic"))
    predictive = regress(output if heteroscedastic else _only(output), **options)
    lower, upper = predictive.interval(level)
    names = ("mean", "std", "total", "aleatoric", "epistemic")
    return {name: getattr(predictive, name) for name in names} | {"lower": lower, "upper": upper}


def _selected(output: Any, select: str | int) -> Any:
    try:
        return output[select] if hasattr(output, "__getitem__") else getattr(output, str(select))
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ExportError(f"the network has no output {select!r}; it returns {_kinds(output)}") from None


def _only(output: Any) -> Any:
    """The output itself, or the one of a container that holds no other."""
    if is_moments(output):
        return output
    parts = list(output.values()) if isinstance(output, dict) else list(output)
    found = [part for part in parts if is_moments(part)]
    if len(parts) == len(found) == 1:
        return found[0]
    raise ExportError(f"the network returns {_kinds(output)}; say with select= which of them is meant")


def _kinds(output: Any) -> str:
    if isinstance(output, dict):
        return f"outputs named {', '.join(map(str, output))}"
    return f"{len(output)} outputs" if isinstance(output, (tuple, list)) else f"a {type(output).__name__}"
