"""momentprop: the uncertainty of a dropout network in one deterministic pass."""

from typing import TYPE_CHECKING, Any

from momentprop.convert import convert
from momentprop.ensemble import Ensemble
from momentprop.errors import (
    ArchiveError,
    ChangedError,
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
from momentprop.evaluate import metrics
from momentprop.exports.archive import compile_package, load, save
from momentprop.exports.inspection import inspect
from momentprop.exports.onnx import export_onnx
from momentprop.insertion import with_dropout
from momentprop.moments import Jumps, Moments
from momentprop.network import BayesianNetwork
from momentprop.predict import decisions
from momentprop.predict.class_predictive import ClassPredictive
from momentprop.predict.classification import classify
from momentprop.predict.conformal_network import Conformal, conformal
from momentprop.predict.decisions import Threshold
from momentprop.predict.regression import fit_noise, regress
from momentprop.predict.regression_predictive import RegressionPredictive
from momentprop.rules.activation import activation
from momentprop.rules.linearization import Propagated, mapped, scaled, source
from momentprop.rules.registry import rule
from momentprop.sample import SampledMoments, monte_carlo
from momentprop.validation.validate import validate
from momentprop.version import __version__

if TYPE_CHECKING:
    from momentprop import plots as plots

__all__ = [
    "ArchiveError",
    "BayesianNetwork",
    "ChangedError",
    "ClassPredictive",
    "Conformal",
    "CovarianceError",
    "DisagreementError",
    "DropProbabilityError",
    "Ensemble",
    "ExportError",
    "FidelityNote",
    "InputError",
    "Jumps",
    "MissingExtraError",
    "MissingRuleError",
    "MomentpropError",
    "Moments",
    "NoDropoutError",
    "Propagated",
    "RegressionPredictive",
    "RuleError",
    "SampledMoments",
    "Threshold",
    "TraceError",
    "TraceNote",
    "__version__",
    "activation",
    "classify",
    "compile_package",
    "conformal",
    "convert",
    "decisions",
    "export_onnx",
    "fit_noise",
    "inspect",
    "load",
    "mapped",
    "metrics",
    "monte_carlo",
    "regress",
    "rule",
    "save",
    "scaled",
    "source",
    "validate",
    "with_dropout",
]


def __getattr__(name: str) -> Any:
    if name == "plots":  # needs matplotlib, which takes long to import
        import importlib

        return importlib.import_module("momentprop.plots")
    raise AttributeError(f"module 'momentprop' has no attribute {name!r}")
