"""Figures that others have printed for the UCI sets, as (value, standard error)."""

from __future__ import annotations

Printed = dict[str, tuple[float, float | None]]

# Readme of Gal's repository DropoutUncertaintyExps, "Grid Search (new)": MC dropout with T = 10,000,
# ten times the epochs, one hidden layer. Likelihoods are printed there; these are their negatives.
GAL: dict[str, Printed] = {
    "boston": {"rmse": (2.90, 0.18), "nll": (2.40, 0.04)},
    "concrete": {"rmse": (4.82, 0.16), "nll": (2.93, 0.02)},
    "energy": {"rmse": (0.54, 0.06), "nll": (1.21, 0.01)},
    "kin8nm": {"rmse": (0.08, 0.00), "nll": (-1.14, 0.01)},
    "naval": {"rmse": (0.00, 0.00), "nll": (-4.45, 0.00)},
    "power": {"rmse": (4.01, 0.04), "nll": (2.80, 0.01)},
    "protein": {"rmse": (4.27, 0.02), "nll": (2.87, 0.00)},
    "wine": {"rmse": (0.62, 0.01), "nll": (0.93, 0.01)},
    "yacht": {"rmse": (0.67, 0.05), "nll": (1.25, 0.01)},
}

# Brach, Sick & Duerr, table 1: MC dropout and moment propagation. Only what is at hand.
PAPER: dict[str, dict[str, Printed]] = {
    "naval": {"MC": {"nll": (-4.36, None)}, "MP": {"nll": (-3.60, None)}},
    "yacht": {"MC": {"nll": (2.35, None)}, "MP": {"nll": (2.11, None)}},
}
