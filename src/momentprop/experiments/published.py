"""Figures that others printed, each with its source. What was not found is not here.

The paper's tables were not at hand in full: of its Table 1 only the two rows quoted in the discussion of its
method are known here, so the other rows stand empty on the results page.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Printed:
    """A number as printed, with its standard error where one was."""

    value: float
    error: float | None = None
    digits: int = 2


PAPER = "Brach, Sick & Duerr, arXiv 2308.12785"
PAPER_TABLE = f"{PAPER}, Table 1"
PAPER_CIFAR = f"{PAPER}, section 4.3"
NOTEBOOK = "kaibrach/Moment-Propagation, notebooks/Regression.ipynb, commit 53aafec"
GAL = "yaringal/DropoutUncertaintyExps, readme.md, commit 6eb4497, columns Grid Search (new)"

# Test NLL of MC dropout and of moment propagation, by set.
PAPER_UCI_NLL: dict[str, dict[str, Printed]] = {
    "naval": {"MC": Printed(-4.36), "MP": Printed(-3.60)},
    "yacht": {"MC": Printed(2.35), "MP": Printed(2.11)},
}

# RMSE of MC dropout and test log-likelihood (NLL is its negative), mean and standard error over the splits.
GAL_RMSE: dict[str, Printed] = {
    "boston": Printed(2.90, 0.18),
    "concrete": Printed(4.82, 0.16),
    "energy": Printed(0.54, 0.06),
    "kin8nm": Printed(0.08, 0.00),
    "naval": Printed(0.00, 0.00),
    "power": Printed(4.01, 0.04),
    "protein": Printed(4.27, 0.02),
    "wine": Printed(0.62, 0.01),
    "yacht": Printed(0.67, 0.05),
}
GAL_NLL: dict[str, Printed] = {
    "boston": Printed(2.40, 0.04),
    "concrete": Printed(2.93, 0.02),
    "energy": Printed(1.21, 0.01),
    "kin8nm": Printed(-1.14, 0.01),
    "naval": Printed(-4.45, 0.00),
    "power": Printed(2.80, 0.01),
    "protein": Printed(2.87, 0.00),
    "wine": Printed(0.93, 0.01),
    "yacht": Printed(1.25, 0.01),
}

# Ten classes: accuracy and NLL of the plain network, MC dropout with T = 50, moment propagation.
PAPER_CIFAR_ACCURACY = {
    "NN": Printed(0.7168, digits=4),
    "MC": Printed(0.7467, digits=4),
    "MP": Printed(0.7459, digits=4),
}
PAPER_CIFAR_NLL = {"NN": Printed(0.82), "MC": Printed(0.77), "MP": Printed(0.75)}
# Five classes: Pearson's r of the entropy with that of MC dropout, known and novel classes.
PAPER_CIFAR_ENTROPY_R = {
    "MP": {"known": Printed(0.981, digits=3), "novel": Printed(0.970, digits=3)},
    "NN": {"known": Printed(0.931, digits=3), "novel": Printed(0.893, digits=3)},
}
# Samples from which on MC dropout's AUC reaches that of moment propagation.
PAPER_CIFAR_CATCH_UP = 20
