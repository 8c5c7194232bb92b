"""Figure 3 of the paper (section 4.1): means and bands on a curve of one input, inside and outside its range.

Data, network and training follow the notebook that the authors published (kaibrach/Moment-Propagation,
notebooks/Regression.ipynb, `sinusoid_1`): 60 points without noise on -3..0, 512 with noise on 0..6 pi; three
dense layers of 256 with ReLU and dropout 0.3; Adam, 2,000 epochs of batches of 256, inputs and targets
standardised. `momentprop_reproduction.demo.toy` is the same network on a simpler curve.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import momentprop as mp
from momentprop.evaluate import metrics
from momentprop_reproduction.demo.toy import network
from momentprop_reproduction.running.timing import best_seconds
from momentprop_reproduction.running.training import seeded
from momentprop_reproduction.running.units import Unit, Workspace

_EVEN = 2.0  # all work over training: many samples take about as long
NOISE = 0.1  # standard deviation of the observations around the curve
TRAINING_RANGE = (-3.0, 6 * math.pi)
GRID_RANGE = (-15.0, 31.0)
TIERS = {"paper": "MP, paper tier", "accurate": "MP, accurate tier"}


@dataclass(frozen=True)
class Settings:
    """Holds what the results depend on. All experiments have `root`; this one makes its own data."""

    seed: int = 0
    epochs: int = 2000
    n_samples: int = 30
    truth_samples: int = 10_000
    repeats: int = 7
    root: Path | None = None

    def quick(self) -> Settings:
        return replace(self, epochs=100, truth_samples=500, repeats=2)


def units(settings: Settings) -> list[Unit]:
    return [Unit("toy", partial(run, settings))]


def curve(x: Tensor) -> Tensor:
    """A line, and from 0 on a wave on it."""
    return 0.1 * x + 1 + 3 * torch.sin(x.clamp_min(0) / 3)


def run(settings: Settings, workspace: Workspace) -> dict[str, Any]:
    """Train, then predict the grid and fresh observations by every method."""
    x, y = _observed(settings.seed)
    model = network()
    if (saved := workspace.load("network")) is None:
        _train(model, x, y, settings, workspace)
        workspace.save("network", model.state_dict())
    else:
        model.load_state_dict(saved)
    model.eval()
    workspace.report(settings.epochs, _EVEN * settings.epochs, "comparing")

    methods = _methods(model, x, settings)
    grid = torch.linspace(*GRID_RANGE, 461).unsqueeze(1)
    inside = ((grid >= TRAINING_RANGE[0]) & (grid <= TRAINING_RANGE[1])).squeeze(1)
    with torch.no_grad():
        curves = {name: predict(_standardized(grid, x)) for name, predict in methods.items()}
        sampled = [name for name in methods if name.startswith("MC")]
        truth = _spread(curves[sampled[-1]], y)
        timed = {
            name: partial(f, _standardized(grid, x)) for name, f in methods.items() if name != sampled[-1]
        }
        seconds = best_seconds(timed, settings.repeats)
        table = {
            name: _quality(predict, x, y, settings.seed) | _ratios(_spread(curves[name], y), truth, inside)
            for name, predict in methods.items()
        }
    for name, row in table.items():
        row["seconds"] = seconds.get(name)
    return {
        "grid": grid.squeeze(1).tolist(),
        "observed": [x.squeeze(1).tolist(), y.squeeze(1).tolist()],
        "mean": {name: _raw_mean(output, y).squeeze(1).tolist() for name, output in curves.items()},
        "std": {name: _spread(output, y).tolist() for name, output in curves.items() if name != "NN"},
        "table": table,
    }


def summarize(results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    return {"training_range": list(TRAINING_RANGE), "noise": NOISE, "methods": results["toy"]["table"]}


def figures(results: Mapping[str, dict[str, Any]], workspaces: Mapping[str, Workspace]) -> dict[str, Any]:
    """The paper's figure 3, with many samples as truth and both tiers beside few samples."""
    from momentprop import plots

    result = results["toy"]
    few, truth = (name for name in result["mean"] if name.startswith("MC"))
    order = ["NN", truth, few, *TIERS.values()]
    axes = plots.regression_bands(
        result["grid"],
        {name: result["mean"][name] for name in order},
        {name: result["std"][name] for name in order if name in result["std"]},
        tuple(result["observed"]),
        TRAINING_RANGE,
    )
    return {"toy": axes[0].figure}


def _observed(seed: int) -> tuple[Tensor, Tensor]:
    with seeded(seed):
        flat, wave = torch.linspace(-3, 0, 60), torch.linspace(0, TRAINING_RANGE[1], 512)
        x = torch.cat([flat, wave]).unsqueeze(1)
        noise = torch.cat([torch.zeros(60), NOISE * torch.randn(512)])  # none on the line, as in the notebook
        return x, curve(x) + noise.unsqueeze(1)


def _train(model: nn.Sequential, x: Tensor, y: Tensor, settings: Settings, workspace: Workspace) -> None:
    inputs, targets = _standardized(x, x), _standardized(y, y)
    with seeded(settings.seed + 1), torch.enable_grad():
        for layer in model:  # Keras's "normal"
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.05)
                nn.init.zeros_(layer.bias)
        optimizer = torch.optim.Adam(model.parameters(), eps=1e-7)
        model.train()
        for epoch in range(settings.epochs):
            for batch in torch.randperm(len(inputs)).split(256):
                optimizer.zero_grad()
                F.mse_loss(model(inputs[batch]), targets[batch]).backward()
                optimizer.step()
            workspace.report(epoch + 1, _EVEN * settings.epochs, "training")


def _methods(model: nn.Module, x: Tensor, settings: Settings) -> dict[str, Any]:
    example = _standardized(x, x)
    tiers = {name: mp.convert(model, example, tier) for tier, name in TIERS.items()}
    source = next(iter(tiers.values()))

    def sampled(x: Tensor, n: int, seed: int) -> Any:
        return mp.monte_carlo(source, x, n, seed, keep_samples=True)

    # a seed of its own: truth must not contain the samples it judges
    return {
        "NN": model,
        f"MC T={settings.n_samples}": partial(sampled, n=settings.n_samples, seed=settings.seed),
        f"MC T={settings.truth_samples:,}": partial(
            sampled, n=settings.truth_samples, seed=settings.seed + 1
        ),
        **tiers,
    }


def _standardized(values: Tensor, of: Tensor) -> Tensor:
    return (values - of.mean()) / of.std(correction=0)


def _quality(predict: Any, x: Tensor, y: Tensor, seed: int) -> dict[str, float | None]:
    """Measure RMSE and NLL on fresh observations in the training range, for samples by their mixture."""
    with seeded(seed + 2):
        low, high = TRAINING_RANGE
        test_x = low + (high - low) * torch.rand(1000, 1)
        test_y = curve(test_x) + NOISE * torch.randn(1000, 1)
    scale = y.std(correction=0).item()
    predictive = mp.regress(predict(_standardized(test_x, x)), noise=(NOISE / scale) ** 2)
    # densities change with the unit of y
    nll = predictive.nll(_standardized(test_y, y)).mean().item() + math.log(scale)
    return {"rmse": metrics.rmse(predictive.mean * scale + y.mean(), test_y).value, "nll": nll}


def _raw_mean(output: Any, y: Tensor) -> Tensor:
    mean: Tensor = output if isinstance(output, Tensor) else output.mean
    return mean * y.std(correction=0) + y.mean()


def _spread(output: Any, y: Tensor) -> Tensor:
    """Standard deviation of the network's output in units of y; zeros for a plain network."""
    std = torch.zeros_like(output) if isinstance(output, Tensor) else output.std
    return (std * y.std(correction=0)).squeeze(1)


def _ratios(std: Tensor, truth: Tensor, inside: Tensor) -> dict[str, float | None]:
    """Mean std, and median and 5..95 % range of its ratio to the truth, inside and outside the range."""
    row: dict[str, Any] = {}
    for place, where in (("inside", inside), ("outside", ~inside)):
        known = bool(std.any())
        ratio = (std / truth)[where].double()
        low, middle, high = ratio.quantile(torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)).tolist()
        row[f"std_{place}"] = std[where].mean().item() if known else None
        row[f"std_ratio_{place}"] = middle if known else None
        row[f"std_ratio_{place}_range"] = [low, high] if known else None
    return row
