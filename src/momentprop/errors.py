"""The errors a user can meet. All derive from MomentpropError."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class MomentpropError(Exception):
    """Base of all errors raised by momentprop."""


class TraceError(MomentpropError):
    """The model could not be traced into one static graph."""


class ChangedError(MomentpropError):
    """The model was changed after its conversion in a way that the converted network does not follow."""


class NoDropoutError(MomentpropError):
    """The model has no active dropout, so there is no uncertainty to propagate."""


class DropProbabilityError(MomentpropError, ValueError):
    """A dropout layer drops everything (p = 1) or has a probability outside [0, 1)."""


class InputError(MomentpropError, ValueError):
    """The inputs do not fit the model as it was traced."""


class RuleError(MomentpropError, ValueError):
    """A rule cannot be registered as asked."""


class CovarianceError(MomentpropError):
    """Tier `accurate` cannot give the covariance of one sample's outputs."""


class ExportError(MomentpropError):
    """A converted network could not be written in the form asked for."""


class DisagreementError(ExportError):
    """An exported file does not give the numbers that PyTorch gives."""


class ArchiveError(MomentpropError):
    """A file is damaged, was changed, or is not one that momentprop wrote."""


class FidelityNote(UserWarning):
    """`fidelity="auto"` says that it does not use the accurate tier, and why."""


class TraceNote(UserWarning):
    """Tracing says what of the model in training mode it left out, or could not tell from dropout."""


class DataError(MomentpropError):
    """A data set is damaged, incomplete or not what it should be."""


class MissingExtraError(MomentpropError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str, distribution: str = "momentprop") -> None:
        super().__init__(
            f"{package} is not installed; install it with: pip install '{distribution}[{extra}]'"
        )


@dataclass(frozen=True)
class Place:
    """Says where in the user's model an operator stands."""

    operator: str
    module: str
    source: str
    reason: str

    def __str__(self) -> str:
        where = f"in {self.module or 'the model itself'}"
        return f"{self.operator}  {where}\n      {self.source}\n      {self.reason}"


class MissingRuleError(MomentpropError):
    """Operators downstream of a dropout have no rule. `places` lists all of them."""

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = tuple(places)
        listing = "\n".join(f"  {i}. {place}" for i, place in enumerate(self.places, 1))
        overloads = [place.operator for place in self.places if place.operator.count(".") == 2]
        advice = (
            "Register a rule for each, for example\n"
            f"  @mp.rule(torch.ops.{overloads[0]})\n"
            "  def my_rule(x, ...):  # arguments as in the operator's schema; random ones are Moments\n"
            "      return mp.Moments(mean, variance)\n"
            'or let convert(..., unsupported="linearize") or "sample" stand in for the missing rules.'
            if overloads
            else "Blocks such as torch.cond must stand before the first dropout."
        )
        super().__init__(
            f"{len(self.places)} operator(s) that dropout noise reaches cannot be propagated:\n"
            f"{listing}\n{advice}"
        )
