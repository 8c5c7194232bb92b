"""The tiers of one model: converted once each, from one trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from momentprop import tiers
from momentprop.capture.choice import Choice
from momentprop.capture.trace import Trace, trace
from momentprop.engine.selection import Selection
from momentprop.errors import CovarianceError, MissingRuleError
from momentprop.moments import Moments, mean_of, variance_of
from momentprop.network import BayesianNetwork, inside
from momentprop.passes.stand_ins.unsupported import UNSUPPORTED
from momentprop.predict.classification import classify
from momentprop.tiers import Request, named
from momentprop.validation.inputs import BATCH, Inputs
from momentprop.validation.outputs import LOGITS, Layout, one_output

TIERS = tuple(tier.name for tier in tiers.ALL)


@dataclass
class Tiers:
    """The converted networks by their tier, and why others are missing."""

    trace: Trace
    networks: dict[str, nn.Module]
    missing: dict[str, str] = field(default_factory=dict)


def convert_tiers(
    model: nn.Module, inputs: Inputs, wanted: Sequence[str] | None, unsupported: str, choice: Choice
) -> Tiers:
    """Convert to every tier there is; raise what the first one says if there is none."""
    unknown = [tier for tier in wanted or () if tier not in TIERS]
    if unknown:
        raise ValueError(f"tiers must be among {', '.join(TIERS)}, not {unknown[0]!r}")
    if unsupported not in UNSUPPORTED:
        raise ValueError(f"unsupported must be one of {', '.join(UNSUPPORTED)}, not {unsupported!r}")
    traced = trace(model, inputs.first(2).tensors, dropout=choice)
    made = Tiers(traced, {})
    certain = (False,) * len(traced.input_nodes)
    first: Exception | None = None
    for tier in wanted or TIERS:
        try:
            network = BayesianNetwork(model, traced, Request(named(tier), unsupported=unsupported), certain)
        except (CovarianceError, MissingRuleError) as error:
            made.missing[tier] = str(error)
            first = first or error
            continue
        count = inside(network).built.program.n_outputs
        selection = Selection.default(count)
        if selection is None and wanted is None:
            made.missing[tier] = f"{count} outputs per input; ask for it with tiers="
            continue
        if selection is not None and not selection.takes_all and wanted is None:
            request = Request(named(tier), selection, unsupported)
            network = BayesianNetwork(model, traced, request, certain)
        made.networks[tier] = network
    if not made.networks and first is not None:
        raise first
    return made


@dataclass(frozen=True)
class Predicted:
    """Holds what one pass gives for all inputs: rows as in outputs.py."""

    mean: Tensor  # [n, elements]
    variance: Tensor
    probs: Tensor | None = None  # [n, positions, K]

    def __len__(self) -> int:
        return len(self.mean)

    def first(self, count: int) -> Predicted:
        return Predicted(*(None if v is None else v[:count] for v in (self.mean, self.variance, self.probs)))  # type: ignore[arg-type]


Rows = TypeVar("Rows", bound=Predicted)


def predict(network: nn.Module, inputs: Inputs, layout: Layout, output: int) -> Predicted:
    """Predict with a converted network, or with a plain one, whose variance is zero."""
    parts = []
    for given in inputs.batches(BATCH):
        with torch.no_grad():
            found = one_output(network(*given), output)
        mean, variance = (layout.values(v).double() for v in (mean_of(found), variance_of(found)))
        parts.append(Predicted(mean, variance, _probabilities(found, layout) if layout.is_classes else None))
    return joined(parts)


def _probabilities(found: Tensor | Moments, layout: Layout) -> Tensor:
    """Return the predictive distribution over classes."""
    if isinstance(found, Tensor):
        return layout.probabilities(found)
    if layout.head is None:
        predictive = classify(found, kind=layout.kind)
    else:
        predictive = classify(found, dim=layout.class_dim if layout.head[0] == LOGITS else None)
    return layout.of_predictive(predictive.log_probs.double().exp())


def joined(parts: Sequence[Rows], **dims: int) -> Rows:
    """Join the rows of batches of inputs, in the first dimension unless `dims` names another."""

    def together(name: str, values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            return {key: torch.cat([value[key] for value in values]) for key in values[0]}
        return torch.cat(values, dims.get(name, 0)) if isinstance(values[0], Tensor) else values[0]

    columns = {f.name: [getattr(part, f.name) for part in parts] for f in fields(parts[0])}
    return replace(parts[0], **{name: together(name, values) for name, values in columns.items()})
