"""Lists figures that others have printed, each with its source; what was not found is not here.

The paper's tables themselves were not at hand. Its figures below are those that this project's plan quotes
from it, so most rows of its Table 1 stay empty on the results page.
"""

from __future__ import annotations

Printed = dict[str, tuple[float, float | None]]
"""By measure: the value and its standard error, or None where none is known."""

GAL_SOURCE = "yaringal/DropoutUncertaintyExps, readme.md at commit 6eb4497"
PAPER_SOURCE = "Brach, Sick & Duerr, arXiv 2308.12785"
NOTEBOOK_SOURCE = "kaibrach/Moment-Propagation, notebooks/Regression.ipynb at commit 53aafec"

# GAL_SOURCE, columns "Grid Search (new)": MC dropout with T = 10,000, ten times the epochs, one hidden layer.
# Likelihoods are printed there; these are their negatives.
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

# PAPER_SOURCE, Table 1: MC dropout and moment propagation, two sets only.
PAPER: dict[str, dict[str, Printed]] = {
    "naval": {"MC": {"nll": (-4.36, None)}, "MP": {"nll": (-3.60, None)}},
    "yacht": {"MC": {"nll": (2.35, None)}, "MP": {"nll": (2.11, None)}},
}

# PAPER_SOURCE, section 4.3, ten classes: by the network as it is, MC dropout with T = 50, moment propagation.
PAPER_TEN: dict[str, dict[str, str]] = {
    "NN": {"accuracy": "0.7168", "nll": "0.82"},
    "MC": {"accuracy": "0.7467", "nll": "0.77"},
    "MP": {"accuracy": "0.7459", "nll": "0.75"},
}
# The same section, figure 5: Pearson's r of entropies with those of MC dropout, known and novel classes.
PAPER_ENTROPY_R: dict[str, dict[str, str]] = {
    "NN": {"known": "0.931", "novel": "0.893"},
    "MP": {"known": "0.981", "novel": "0.970"},
}
# The same section, figure 8: samples T from which on MC dropout's AUC reaches that of moment propagation.
PAPER_CATCH_UP = "about 20"
