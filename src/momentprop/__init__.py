"""momentprop: the uncertainty of a dropout network in one deterministic pass."""

from momentprop.convert import BayesianNetwork, convert
from momentprop.ensemble import Ensemble
from momentprop.errors import (
    ArchiveError,
    CovarianceError,
    DisagreementError,
    DropProbabilityError,
    ExportError,
    FidelityNote,
    InputError,
    MissingExtraError,
    MissingRuleError,
    MomentpropError,
    NoDropoutError,
    RuleError,
    TraceError,
    TraceNote,
)
from momentprop.exports.archive import inspect, load, save
from momentprop.insertion import with_dropout
from momentprop.moments import Moments
from momentprop.montecarlo import SampledMoments, monte_carlo
from momentprop.predictive import ClassPredictive, classify
from momentprop.registry import rule
from momentprop.regression import RegressionPredictive, fit_noise, regress
from momentprop.rules.activation import activation
from momentprop.version import __version__

__all__ = [
    "ArchiveError",
    "BayesianNetwork",
    "ClassPredictive",
    "CovarianceError",
    "DisagreementError",
    "DropProbabilityError",
    "Ensemble",
    "ExportError",
    "FidelityNote",
    "InputError",
    "MissingExtraError",
    "MissingRuleError",
    "MomentpropError",
    "Moments",
    "NoDropoutError",
    "RegressionPredictive",
    "RuleError",
    "SampledMoments",
    "TraceError",
    "TraceNote",
    "__version__",
    "activation",
    "classify",
    "convert",
    "fit_noise",
    "inspect",
    "load",
    "monte_carlo",
    "regress",
    "rule",
    "save",
    "with_dropout",
]
