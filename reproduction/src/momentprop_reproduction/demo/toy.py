"""The paper's toy regression (Brach, Sick & Duerr, section 4.1).

One input, a sinusoidal curve observed with noise on -3..19, and three dense layers of 256 with ReLU and
dropout 0.3 after each. Outside the range nothing was seen: there the predictive spread should grow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import momentprop as mp
from momentprop.tiers import ACCURATE
from momentprop_reproduction.running.timing import best_seconds
from momentprop_reproduction.running.training import Progress, fit, seeded

TRAINING_RANGE = (-3.0, 19.0)
GRID_RANGE = (-15.0, 31.0)
NOISE = 0.1  # standard deviation of the observations around the curve
OURS = "momentprop"

Method = Callable[[Tensor], mp.Moments]


@dataclass(frozen=True)
class ToyResult:
    """Holds what `run` measured: curves over the grid `x`, by method, and a table of numbers.

    `std` has no entry for the plain network. `truth` is MC dropout with many samples, on the same grid.
    """

    x: Tensor
    observed_x: Tensor
    observed_y: Tensor
    mean: dict[str, Tensor]
    std: dict[str, Tensor]
    truth: mp.Moments
    table: dict[str, dict[str, float | None]]
    training_range: tuple[float, float] = TRAINING_RANGE


def curve(x: Tensor) -> Tensor:
    """The curve to learn: two waves, so that the fit shows in every part of the range."""
    return torch.sin(0.8 * x) + 0.5 * torch.sin(0.3 * x)


def network(width: int = 256, depth: int = 3, drop_probability: float = 0.3) -> nn.Sequential:
    """Dense layers with ReLU and dropout after each, and one output."""
    layers: list[nn.Module] = []
    for n_in in [1] + [width] * (depth - 1):
        layers += [nn.Linear(n_in, width), nn.ReLU(), nn.Dropout(drop_probability)]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def run(
    seed: int = 0,
    epochs: int = 2000,
    *,
    n_observed: int = 200,
    n_samples: int = 30,
    truth_samples: int = 2000,
    fidelity: str = ACCURATE.name,
    repeats: int = 7,
    progress: Progress | None = None,
) -> ToyResult:
    """Train the network, then predict with it as it is, with MC dropout, and converted.

    Args:
        seed: everything but the times follows from it; the caller's random state is left alone.
        epochs: passes over the observations, each one full batch.
        n_observed: number of training points.
        n_samples: forward passes of MC dropout.
        truth_samples: forward passes of the MC dropout that counts as truth.
        fidelity: the tier of rules, as in `mp.convert`.
        repeats: how often each method is timed.
        progress: called as progress(done, total) while training.

    Returns:
        Curves and numbers. In the table: `rmse` and `nll` on fresh observations inside the training
        range (predictive distribution N(mean, std^2 + noise^2)), `std_inside` and `std_outside` averaged
        over the grid, `std_ratio_inside` and `std_ratio_outside` the median over the grid of the
        std divided by the truth's, `seconds` for one prediction of the whole grid.
    """
    with seeded(seed):
        observed_x, observed_y = _observe(n_observed)
        test_x, test_y = _observe(1000)
        model = network()
        fit(
            model,
            F.mse_loss,
            _standardize(observed_x),
            observed_y,
            epochs=epochs,
            batch_size=n_observed,
            learning_rate=3e-3,
            progress=progress,
        )
    bnn = mp.convert(model, _standardize(observed_x), fidelity)
    methods: dict[str, Method] = {
        "NN": lambda x: mp.Moments(model(x), torch.zeros(())),
        f"MC T={n_samples}": lambda x: mp.monte_carlo(bnn, x, n_samples, seed),
        OURS: bnn,
    }
    x = torch.linspace(*GRID_RANGE, 231).unsqueeze(1)
    grid = _standardize(x)
    # a seed of its own: truth must not contain the samples it judges
    truth = mp.monte_carlo(bnn, grid, truth_samples, seed + 1, keep_samples=False)
    with torch.no_grad():
        predicted = {name: predict(grid) for name, predict in methods.items()}
        tested = {name: predict(_standardize(test_x)) for name, predict in methods.items()}
        seconds = best_seconds({name: partial(f, grid) for name, f in methods.items()}, repeats)
    inside = (x >= TRAINING_RANGE[0]) & (x <= TRAINING_RANGE[1])
    table = {
        name: _fit_quality(tested[name], test_y)
        | _spread(predicted[name], truth, inside)
        | {"seconds": seconds[name]}
        for name in methods
    }
    return ToyResult(
        x=x.squeeze(1),
        observed_x=observed_x.squeeze(1),
        observed_y=observed_y.squeeze(1),
        mean={name: moments.mean.squeeze(1) for name, moments in predicted.items()},
        std={name: moments.std.squeeze(1) for name, moments in predicted.items() if name != "NN"},
        truth=mp.Moments(truth.mean.squeeze(1), truth.variance.squeeze(1)),
        table=table,
    )


def _observe(n: int) -> tuple[Tensor, Tensor]:
    low, high = TRAINING_RANGE
    x = low + (high - low) * torch.rand(n, 1)
    return x, curve(x) + NOISE * torch.randn(n, 1)


def _standardize(x: Tensor) -> Tensor:
    """Scale x so that the uniform distribution over the training range gets mean 0 and variance 1."""
    low, high = TRAINING_RANGE
    return (x - (low + high) / 2) / ((high - low) / 12**0.5)


def _fit_quality(predicted: mp.Moments, y: Tensor) -> dict[str, float | None]:
    variance = predicted.variance + NOISE**2
    nll = F.gaussian_nll_loss(predicted.mean, y, variance, full=True)
    return {"rmse": F.mse_loss(predicted.mean, y).sqrt().item(), "nll": nll.item()}


def _spread(predicted: mp.Moments, truth: mp.Moments, inside: Tensor) -> dict[str, float | None]:
    """Mean std and median ratio to the truth's, None for a method that has no spread."""
    std, ratio = predicted.std, predicted.std / truth.std
    known = bool(std.any())
    return {
        "std_inside": std[inside].mean().item() if known else None,
        "std_outside": std[~inside].mean().item() if known else None,
        "std_ratio_inside": ratio[inside].median().item() if known else None,
        "std_ratio_outside": ratio[~inside].median().item() if known else None,
    }
