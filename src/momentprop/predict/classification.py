"""Turns what a network gives into a predictive distribution over classes.

Any network will do: `Moments` of a converted one, samples of MC dropout, a plain tensor; and a list of
these as a mixture, which is an ensemble. So methods are compared through one code path. For real targets
regression.py does the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from momentprop.gaussian.logits import Averages, GaussianLogits, average, integrate
from momentprop.graph import private
from momentprop.moments import Moments, mean_of
from momentprop.predict.class_predictive import ClassPredictive
from momentprop.predict.covariance import of_classes
from momentprop.predict.outputs import Select, one_output
from momentprop.rules.softmax import log_odds_probit, log_probabilities
from momentprop.sample import SampledMoments

KINDS = ("multiclass", "binary", "multilabel")
_ENOUGH_ROWS = 8  # for logits not to sum to one by chance


def paper(logits: GaussianLogits) -> Averages:
    """Daunizeau 2017 as in the paper: p_k ~ 1 / (2 - K + sum over l of 1 / E[sigmoid(z_k - z_l)]).

    E[sigmoid] is approximated by the probit, and logits count as independent.
    """
    return Averages(log_probabilities(logits.mean, logits.variance, log_odds_probit))


# how softmax can be averaged, by the name that `classify` takes
METHODS: dict[str, Callable[[GaussianLogits], Averages]] = {
    method.__name__: method for method in (integrate, paper)
}


def classify(
    output: Any,
    method: str = "integrate",
    *,
    kind: str | None = None,
    dim: int | None = None,
    select: Select = None,
) -> ClassPredictive:
    """Return the predictive distribution over classes.

    Args:
        output: logits: `Moments` of a converted network, `SampledMoments` with their samples (a mixture over
            them), or a plain tensor; or a list of these, an ensemble. Moments of a network that ends in
            softmax, log-softmax or sigmoid carry their logits, which are used; so do its samples. Of a
            mapping, a dataclass or a tuple the entry `logits` is taken, or the only one.
        method: how the softmax of uncertain logits is averaged:

            - `integrate`: over a fixed set of points, with the covariance where there is one; softmax itself
              at variance zero;
            - `paper`: Daunizeau's formula with the probit approximation, as in Brach, Sick & Duerr.
        kind: `"multiclass"`, one class out of K; `"binary"`, one logit per input, for classes 0 and 1;
            `"multilabel"`, one such decision for every logit: the distribution is over [batch, 2, labels].
            By default binary where there is one logit, multilabel behind a sigmoid, else multiclass.
        dim: the dimension of the classes: by default 1, or that of the network's own softmax.
        select: which of several outputs, by name or position.

    >>> bnn_output = Moments(torch.tensor([[1.0, 1.0]]), torch.tensor([[0.0, 4.0]]))
    >>> [round(p, 3) for p in classify(bnn_output).probs[0].tolist()]
    [0.5, 0.5]
    >>> classify(torch.tensor([[0.0, 0.0]])).probs.tolist()  # a plain network
    [[0.5, 0.5]]
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, not {method!r}")
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
    if isinstance(output, list):
        return _mixture([classify(member, method, kind=kind, dim=dim, select=select) for member in output])
    output = one_output(output, select)
    if isinstance(output, SampledMoments):
        samples = _as_logits(output)
        if output.head is not None:
            kind, dim = _of_head(output.head[1], samples[0], kind, dim)
        else:
            _refuse_probabilities(samples[0], kind, dim)
        return _of_samples(samples, kind, dim)
    if isinstance(output, Moments) and output.logits is not None:
        kind, dim = _of_head(output.logits.dim, output.mean, kind, dim)
        output = output.logits.moments
    else:
        _refuse_probabilities(mean_of(output), kind, dim)
    if isinstance(output, Tensor):
        return _of_samples(output[None], kind, dim)
    moments = output.to(torch.float32) if torch.finfo(output.dtype).bits == 16 else output
    decisions = _Decisions.of(moments.mean, kind, dim)
    rows = (decisions.rows(v) for v in (moments.mean, moments.variance))
    known = of_classes(moments, decisions.dim) if decisions.kind == "multiclass" else ()
    return _predictive(METHODS[method](GaussianLogits(*rows, *known)), decisions)


def _refuse_probabilities(output: Any, kind: str | None, dim: int | None) -> None:
    """Refuse probabilities: a second softmax would not fail, but give wrong numbers.

    A few rows of logits can look like probabilities by chance, so many rows are asked for.
    """
    if not isinstance(output, Tensor) or torch.compiler.is_compiling() or private.is_batched(output):
        return
    if output.dim() < 2 or output.shape[0] < _ENOUGH_ROWS or (kind or _kind(output, dim)) != "multiclass":
        return
    k = output.shape[1 if dim is None else dim]
    off = (output.sum(1 if dim is None else dim) - 1).abs()
    if bool((output >= 0).all()) and bool((off <= 4 * k * torch.finfo(output.dtype).eps).all()):
        raise ValueError(
            "these look like probabilities: none is negative, and they sum to one. classify takes logits; "
            "let the converted network end with softmax, or give the logarithms"
        )


def _kind(logits: Tensor, dim: int | None) -> str:
    single = logits.dim() == 1 or logits.shape[1] == 1
    return "binary" if single and dim is None else "multiclass"


def _checked_kind(logits: Tensor, kind: str | None, dim: int | None) -> str:
    kind = kind or _kind(logits, dim)
    if kind == "multiclass":
        if logits.dim() < 2:
            raise ValueError("logits need a batch dimension and one of classes: [batch, K, ...]")
        if logits.shape[1 if dim is None else dim] == 1:
            raise ValueError("one logit is no choice between classes; leave out dim, or give kind='binary'")
    elif kind == "binary" and logits.dim() > 1 and logits.shape[1] != 1:
        raise ValueError(
            f"kind='binary' takes one logit per input, [batch] or [batch, 1, ...], not "
            f"{tuple(logits.shape)}; for one decision per logit give kind='multilabel'"
        )
    return kind


@dataclass(frozen=True)
class _Decisions:
    """Says which decisions the logits of a shape make: each is a row of K logits."""

    shape: torch.Size
    kind: str
    dim: int  # of the classes, where each decision is among several

    @staticmethod
    def of(logits: Tensor, kind: str | None, dim: int | None) -> _Decisions:
        kind = _checked_kind(logits, kind, dim)
        return _Decisions(logits.shape, kind, (1 if dim is None else dim) % max(logits.dim(), 1))

    def rows(self, value: Tensor) -> Tensor:
        """[..., *shape] -> [..., n, K]. sigmoid(z) is the softmax of (0, z): one logit becomes two."""
        lead = value.dim() - len(self.shape)
        if self.kind == "multiclass":
            value = value.movedim(lead + self.dim, -1)
            return value.reshape(*value.shape[:lead], -1, value.shape[-1])
        flat = value.flatten(lead)
        return torch.stack([torch.zeros_like(flat), flat], -1)

    def restore(self, value: Tensor) -> Tensor:
        """[n, K] -> [batch, K, ...], and [n] -> [batch, ...]."""
        lead = list(self.shape)
        if self.kind == "multiclass":
            del lead[self.dim]
        elif self.kind == "binary":
            del lead[1:2]
        return (
            value.reshape(lead) if value.dim() == 1 else value.reshape(*lead, value.shape[-1]).movedim(-1, 1)
        )


def _of_samples(samples: Tensor, kind: str | None, dim: int | None) -> ClassPredictive:
    """The mixture over samples [T, *shape] of logits."""
    decisions = _Decisions.of(samples[0], kind, dim)
    values = decisions.rows(samples.float() if torch.finfo(samples.dtype).bits == 16 else samples)
    numbers = torch.arange(values.shape[0], device=values.device)
    found = average(lambda chosen: values[chosen].permute(1, 2, 0), numbers, values[0])
    return _predictive(found, decisions)


def _as_logits(output: SampledMoments) -> Tensor:
    """Samples whose softmax (or sigmoid) are the sampled probabilities."""
    samples = output.samples
    name = None if output.head is None else output.head[0]
    tiny = torch.finfo(samples.dtype).tiny
    if name == "softmax":
        return samples.clamp_min(tiny).log()
    if name == "sigmoid":
        return samples.clamp_min(tiny).log() - torch.log1p(-samples).clamp_min(math.log(tiny))
    return samples


def _of_head(own: int | None, output: Tensor, kind: str | None, dim: int | None) -> tuple[str, int | None]:
    """Infer kind and class dimension from the network's own softmax or sigmoid, unless the caller says."""
    if own is not None:
        return kind or "multiclass", own if dim is None else dim
    return kind or ("binary" if _kind(output, None) == "binary" else "multilabel"), dim


def _predictive(found: Averages, decisions: _Decisions) -> ClassPredictive:
    restore, variance = decisions.restore, None
    if found.second is not None:
        variance = restore((found.second - (2 * found.log_probs).exp()).clamp_min(0))
    entropy = None if found.entropy is None else restore(found.entropy)
    return ClassPredictive(restore(found.log_probs), variance, entropy)


def _mixture(members: list[ClassPredictive]) -> ClassPredictive:
    """Average the members' probabilities; what they disagree about is epistemic."""
    if not members:
        raise ValueError("an ensemble needs at least one member")
    log_probs = torch.stack([m.log_probs for m in members])
    mixed = ClassPredictive(log_probs.logsumexp(0) - math.log(len(members)))
    variances = [m.probs_variance for m in members if m.probs_variance is not None]
    aleatorics = [m.aleatoric for m in members if m.aleatoric is not None]
    if len(variances) == len(aleatorics) == len(members):
        mixed.probs_variance = torch.stack(variances).mean(0) + log_probs.exp().var(0, correction=0)
        mixed.aleatoric = torch.stack(aleatorics).mean(0)
    return mixed
