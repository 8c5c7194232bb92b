"""momentprop: the uncertainty of a dropout network in one deterministic pass."""

from momentprop.convert import BayesianNetwork, convert
from momentprop.errors import (
    CovarianceError,
    DropProbabilityError,
    FidelityNote,
    InputError,
    MissingExtraError,
    MissingRuleError,
    MomentpropError,
    NoDropoutError,
    RuleError,
    TraceError,
)
from momentprop.moments import Moments
from momentprop.montecarlo import SampledMoments, monte_carlo
from momentprop.registry import rule
from momentprop.version import __version__

__all__ = [
    "BayesianNetwork",
    "CovarianceError",
    "DropProbabilityError",
    "FidelityNote",
    "InputError",
    "MissingExtraError",
    "MissingRuleError",
    "MomentpropError",
    "Moments",
    "NoDropoutError",
    "RuleError",
    "SampledMoments",
    "TraceError",
    "__version__",
    "convert",
    "monte_carlo",
    "rule",
]
