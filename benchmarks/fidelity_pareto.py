"""Cost against fidelity on the paper's network: what MC dropout costs where it is as good as one pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from fidelity_evaluation import TIERS, evaluate
from fidelity_networks import Case, first_output
from fidelity_samples import load_samples
from torch import Tensor, nn

import momentprop as mp
from momentprop_reproduction.benchmarking.turns import keep_freed_memory, take_turns

BATCH = 32
MC_SIZES = [1, 2, 5, 10, 20, 50, 100, 200, 500]
FIRST_SAMPLE = (
    "T = 1: one compiled pass of the network with live dropout; T > 1: mp.monte_carlo(compile=True)"
)


def pareto(
    case: Case, result: dict[str, Any], sizes: list[int], quick: bool, say: Callable[[str], None]
) -> dict[str, Any]:
    """All outputs of the network and, unless `quick` (compiling takes a while), cut to its first output."""
    keep_freed_memory()
    model, x = case.members[0]
    assert isinstance(model, nn.Sequential)
    networks = [(model, result)]
    if not quick:
        cut = first_output(model)
        single = Case("first output", [(cut, x)], False, case.n_reference, case.n_independent)
        # the samples of one output are known already
        reference, independent = (load_samples(case, role)[..., :1] for role in ("reference", "independent"))
        networks.append((cut, evaluate(single, reference, independent, sizes)))
    measured = [size for size in MC_SIZES if size <= max(sizes)]
    out: dict[str, Any] = {"batch": BATCH, "first_sample": FIRST_SAMPLE}
    for network, fidelity in networks:
        count = fidelity["outputs"]
        say(f"timing, K = {count}: a minute or two for compilation, then some for measuring")
        cost = _costs(network, x[:BATCH], measured, 3.0 if quick else 40.0)
        tiers = {tier: _speed_up(cost, tier, fidelity["rows"][tier]) for tier in TIERS}
        mc = {size: {"cost": cost[f"MC {size}"], "kl": fidelity["kl_of_mc"].get(size)} for size in measured}
        noisy = _is_noisy(cost, measured)
        if noisy:
            say("the machine is busy: many samples cost more each than ten do; repeat this when it is idle")
        out[f"K={count}"] = {
            "divergence": _divergence(count),
            "tiers": tiers,
            "mc": mc,
            "noisy": noisy,
            "fidelity": fidelity,
        }
    return out


def _is_noisy(cost: Mapping[str, float], sizes: list[int]) -> bool:
    """Long calls meet other processes, short ones slip through: that would flatter single passes."""
    return any(cost[f"MC {size}"] / size > 1.15 * cost["MC 10"] / 10 for size in sizes if size > 10)


def _divergence(count: int) -> str:
    return "class probabilities" if count > 1 else "Gaussians with mean and variance of the output"


def _costs(model: nn.Module, x: Tensor, sizes: list[int], seconds: float) -> dict[str, float]:
    """Seconds per call in units of the compiled plain network's."""
    torch._dynamo.reset()
    bnns = {tier: mp.convert(model, x, tier) for tier in TIERS}
    live = copy.deepcopy(model).train()

    def compiled(module: nn.Module) -> Callable[[], object]:
        function = torch.compile(module, fullgraph=True, dynamic=False)
        return lambda: function(x)

    def sample(size: int) -> Callable[[], object]:
        return lambda: mp.monte_carlo(bnns["paper"], x, size, compile=True)

    mc = {f"MC {size}": sample(size) if size > 1 else compiled(live) for size in sizes}
    plain = {"plain": compiled(model)}
    tiers = {tier: compiled(bnn) for tier, bnn in bnns.items()}
    few, many = ({k: f for k, f in mc.items() if (int(k[3:]) <= 10) is small} for small in (True, False))
    cost: dict[str, float] = {}
    # two groups, each with the plain network: beside 500 samples a single pass would get few turns.
    # Static shapes are faster, and few sizes of a batch of samples occur.
    with torch.no_grad(), torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        for group in (plain | tiers | few, plain | many):
            times = take_turns(group, seconds)
            cost |= {
                name: time.median / times["plain"].median for name, time in times.items() if name != "plain"
            }
    return cost


def _speed_up(cost: Mapping[str, float], tier: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Cost of as many samples as the tier is worth, over the tier's cost; a bound where that is one."""
    sizes = [int(name[3:]) for name in cost if name.startswith("MC ")]
    costs = [cost[f"MC {size}"] for size in sizes]
    size = row["t_eq"]
    # beyond what was timed every sample costs the same
    equal = float(np.interp(size, sizes, costs)) * max(1.0, size / sizes[-1])
    return {
        "cost": cost[tier],
        "kl": row["kl"],
        "t_eq": size,
        "t_eq_bound": row["t_eq_bound"],
        "mc_cost_at_t_eq": equal,
        "speed_up": equal / cost[tier],
    }
