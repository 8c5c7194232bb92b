"""Closed formulas from the literature for softmax of Gaussian logits, which predictive.py compares."""

from __future__ import annotations

import math

import torch

from momentprop.gaussian.logits import Averages, GaussianLogits

_PROBIT = math.pi / 8  # sigmoid(x) is close to Phi(x sqrt(pi / 8))


def probit(logits: GaussianLogits) -> Averages:
    """Take softmax(E / sqrt(1 + pi/8 V)) (MacKay 1992), logit by logit."""
    return Averages((logits.mean / (1 + _PROBIT * logits.variance).sqrt()).log_softmax(-1))


def mean_field(logits: GaussianLogits) -> Averages:
    """Take p_k = 1 / sum over l of exp(-E_kl / sqrt(1 + pi/8 V_kl)), to sum one (Lu, Ie & Sha 2020).

    E_kl and V_kl are the moments of z_k - z_l, so that the covariance counts.
    """
    mean, variance, full = logits.mean, logits.variance, logits.full_covariance()
    spread = variance[:, :, None] + variance[:, None, :]
    if full is not None:
        spread = (spread - 2 * full).clamp_min(0)
    odds = (mean[:, None, :] - mean[:, :, None]) / (1 + _PROBIT * spread).sqrt()
    itself = torch.eye(logits.n_classes, dtype=torch.bool, device=mean.device)
    return Averages((-odds.masked_fill(itself, 0.0).logsumexp(-1)).log_softmax(-1))


def laplace_bridge(logits: GaussianLogits) -> Averages:
    """Take the Dirichlet distribution that matches the Gaussian (Hobbhahn, Kristiadi & Hennig 2022).

    alpha_k = (1 - 2/K + exp(E_k) / K^2 sum over l of exp(-E_l)) / V_k.
    """
    k = logits.n_classes
    mean = logits.mean - logits.mean.mean(-1, keepdim=True)
    tiny = torch.finfo(mean.dtype).tiny ** 0.25
    shared = mean + (-mean).logsumexp(-1, keepdim=True) - 2 * math.log(k)
    log_alpha = torch.logaddexp(shared, mean.new_full((), math.log1p(-2 / k) if k > 2 else -torch.inf))
    log_alpha = log_alpha - logits.variance.clamp_min(tiny).log()
    log_total = log_alpha.logsumexp(-1, keepdim=True)
    log_probs = log_alpha - log_total
    p, total = log_probs.exp(), log_total.exp()
    variance = p * (1 - p) / (1 + total)
    alpha = log_alpha.exp()
    entropy = torch.digamma(total[..., 0] + 1) - (p * torch.digamma(alpha + 1)).sum(-1)
    largest = torch.finfo(mean.dtype).max ** 0.5
    certain = total[..., 0] > largest  # digammas cancel: no variance left
    entropy = torch.where(certain, torch.special.entr(p).sum(-1), entropy)
    return Averages(log_probs, variance + p * p, entropy)


FORMULAS = {formula.__name__: formula for formula in (probit, mean_field, laplace_bridge)}
