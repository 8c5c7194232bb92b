"""One trained network on its test set: as it is, by MC dropout, and converted. Public API only."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import momentprop as mp
from momentprop_reproduction.experiments.uci_scaling import Scaling
from momentprop_reproduction.running.timing import best_seconds

JUMPS = "jumps"  # the accurate tier, and the distribution that its largest jumps make
METHODS = ("NN", "MC", "paper", "accurate", JUMPS)
GAUSSIAN = "MC as one Gaussian"  # what any method of two moments could reach at best
TIERS = ("paper", "accurate")
REVISION = 1  # of what is tested: raised, all tests are run again, and no training
_N_JUMPS = 16
_BATCH = 64

Results = dict[str, Any]


def evaluate(
    model: nn.Sequential,
    scaling: Scaling,
    features: Tensor,
    target: Tensor,
    *,
    noise: float,
    n_samples: int,
    seed: int,
    repeats: int = 0,
) -> Results:
    """RMSE and negative log-likelihood by method, in units of the raw target, and std beside MC's.

    Args:
        model: trained on standardised features and target.
        scaling: how they were standardised.
        features: raw [n, Q].
        target: raw [n].
        noise: its variance, in units of the raw target.
        n_samples: T of MC dropout.
        seed: of MC dropout.
        repeats: how often the converted networks are timed; MC dropout takes long and is timed once.

    Returns:
        `methods`: rmse and nll of each; `std`: arrays of standard deviations by MC and tier, over the test
        set; `seconds`: of a prediction of the whole test set, if asked for.
    """
    x, y = scaling.inputs(features).float(), target.float()
    model = in_raw_units(model, scaling)
    networks = {tier: mp.convert(model, x[:2], tier) for tier in TIERS}
    networks[JUMPS] = mp.convert(model, x[:2], "accurate", jumps=_N_JUMPS)
    start = time.perf_counter()
    sampled = mp.monte_carlo(networks["paper"], x, n_samples, seed, keep_samples=True)
    seconds = {"MC": time.perf_counter() - start}
    with torch.no_grad():
        outputs: dict[str, Any] = {"NN": model(x), "MC": sampled}
        outputs |= {tier: _in_batches(network, x) for tier, network in networks.items()}
        if repeats:
            calls = {tier: partial(_in_batches, network, x) for tier, network in networks.items()}
            seconds |= best_seconds({"NN": partial(model, x)} | calls, repeats)
    outputs[GAUSSIAN] = mp.Moments(sampled.mean, sampled.variance)
    table = {}
    for name, output in outputs.items():
        predicted = mp.regress(output, noise=noise)
        table[name] = {
            "rmse": F.mse_loss(predicted.mean.squeeze(1).double(), target).sqrt().item(),
            "nll": predicted.nll(y.unsqueeze(1)).double().mean().item(),
        }
    std = {name: outputs[name].std.squeeze(1).double() for name in ("MC", *TIERS)}
    return {"methods": table, "std": std, "seconds": seconds if repeats else None}


def _in_batches(network: mp.BayesianNetwork, x: Tensor) -> mp.Moments:
    """Predict in batches that the cache holds: the accurate tier keeps many numbers per weight and row."""
    parts = [network(rows) for rows in x.split(_BATCH)]
    mean, variance = torch.cat([m.mean for m in parts]), torch.cat([m.variance for m in parts])
    found = [m.jumps for m in parts if m.jumps is not None]
    if not found:
        return mp.Moments(mean, variance)
    effects, p = torch.cat([j.effects for j in found], 1), torch.cat([j.probabilities for j in found], 1)
    return mp.Moments(mean, variance, jumps=mp.Jumps(effects, p))


def in_raw_units(model: nn.Sequential, scaling: Scaling) -> nn.Sequential:
    """The same network with its last layer in units of the raw target, so that so are its moments."""
    *layers, last = model
    assert isinstance(last, nn.Linear)
    raw = nn.Linear(last.in_features, 1)
    with torch.no_grad():
        raw.weight.copy_(last.weight * scaling.target_std)
        raw.bias.copy_(last.bias * scaling.target_std + scaling.target_mean)
    return nn.Sequential(*layers, raw).eval()
