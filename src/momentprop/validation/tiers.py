"""The tiers of one model: converted once each, from one trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from momentprop import tiers
from momentprop.capture.trace import Trace, trace
from momentprop.errors import CovarianceError, MissingRuleError
from momentprop.network import BayesianNetwork, inside
from momentprop.passes.stand_ins.unsupported import UNSUPPORTED
from momentprop.tiers import Request, named
from momentprop.validation.inputs import Inputs
from momentprop.validation.outputs import LOGITS, Layout, one_output

TIERS = tuple(tier.name for tier in tiers.ALL)
_MOST_OUTPUTS = 64  # per input, up to which `accurate` is tried unless it is asked for


@dataclass
class Tiers:
    """The converted networks by their tier, and why others are missing."""

    trace: Trace
    networks: dict[str, nn.Module]
    missing: dict[str, str] = field(default_factory=dict)


def convert_tiers(model: nn.Module, inputs: Inputs, wanted: Sequence[str] | None, unsupported: str) -> Tiers:
    """Convert to every tier there is; raise what the first one says if there is none."""
    unknown = [tier for tier in wanted or () if tier not in TIERS]
    if unknown:
        raise ValueError(f"tiers must be among {', '.join(TIERS)}, not {unknown[0]!r}")
    if unsupported not in UNSUPPORTED:
        raise ValueError(f"unsupported must be one of {', '.join(UNSUPPORTED)}, not {unsupported!r}")
    traced = trace(model, inputs.first(2).tensors)
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
        if count > _MOST_OUTPUTS and wanted is None:
            made.missing[tier] = (
                f"{count} outputs per input, and its cost grows with them; ask for it with tiers="
            )
            continue
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
    mutual_information: Tensor | None = None  # [n, positions]

    def first(self, count: int) -> Predicted:
        probs, information = (None if v is None else v[:count] for v in (self.probs, self.mutual_information))
        return Predicted(self.mean[:count], self.variance[:count], probs, information)


def predict(network: nn.Module, inputs: Inputs, layout: Layout, output: int, batch: int) -> Predicted:
    """Moments of a converted network, and the classes' predictive distribution that they give."""
    from momentprop.predict.classification import classify

    parts = []
    for given in inputs.batches(batch):
        with torch.no_grad():
            moments = one_output(network(*given), output)
        probs = information = None
        if layout.is_classes:
            if layout.head is None:
                found = classify(moments, kind=layout.kind)
            else:
                found = classify(moments, dim=layout.class_dim if layout.head[0] == LOGITS else None)
            probs = layout.of_predictive(found.probs)
            information = layout.of_predictive(found.mutual_information.unsqueeze(1)).squeeze(-1)
        mean, variance = (layout.values(v).double() for v in (moments.mean, moments.variance))
        parts.append(Predicted(mean, variance, probs, information))
    return joined(parts)


def plain(model: nn.Module, inputs: Inputs, layout: Layout, output: int, batch: int) -> Predicted:
    """Predict with the plain network itself, with variance zero."""
    parts = []
    for given in inputs.batches(batch):
        with torch.no_grad():
            value = one_output(model(*given), output)
        mean = layout.values(value).double()
        probs = layout.probabilities(value) if layout.is_classes else None
        parts.append(Predicted(mean, torch.zeros_like(mean), probs))
    return joined(parts)


def joined(parts: list[Predicted]) -> Predicted:
    def together(name: str) -> Tensor | None:
        found = [v for part in parts if (v := getattr(part, name)) is not None]
        return torch.cat(found) if found else None

    mean, variance = together("mean"), together("variance")
    assert mean is not None
    assert variance is not None
    return Predicted(mean, variance, together("probs"), together("mutual_information"))
