"""convert(): from a model and example inputs to a network that gives moments."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import momentprop.rules  # noqa: F401  (registers the rules)
from momentprop import tiers
from momentprop.capture.batch import taken_for_time
from momentprop.capture.choice import Where
from momentprop.capture.signature import split_inputs
from momentprop.capture.trace import Trace, trace
from momentprop.engine.layouts import size_in_trace, size_of_one
from momentprop.engine.selection import Selection
from momentprop.errors import CovarianceError, FidelityNote, MissingRuleError, TraceNote
from momentprop.guard import doubt
from momentprop.moments import is_moments
from momentprop.network import BayesianNetwork
from momentprop.passes.coverage import analyze
from momentprop.passes.stand_ins.unsupported import UNSUPPORTED
from momentprop.tiers import Request, Tier


def convert(
    model: nn.Module,
    example_inputs: Any,
    fidelity: str = tiers.AUTO,
    *,
    outputs: int | Sequence[int] | None = None,
    unsupported: str = "error",
    jumps: int = 0,
    batch_dim: Any = 0,
    dropout: Where | None = None,
) -> BayesianNetwork:
    """Turn a trained dropout network into one that returns mean and variance in a single pass.

    Args:
        model: any module that `torch.export` accepts. It is not modified.
        example_inputs: a tensor, a tuple of positional inputs, a mapping of keywords (such as what tokenizers
            of transformers return), (args, kwargs), or a DataLoader, whose first batch is taken without its
            target (the last of several members, or what is called labels); tensors may be in tuples,
            dictionaries and dataclass instances. The first dimension is the batch, unless `batch_dim` says
            otherwise; afterwards any batch size runs. An input given as `Moments` is uncertain.
        fidelity: the tier of rules:

            - `accurate`: the covariance of the outputs, by a forward and a backward sweep;
            - `fast`: variances only, with exact rewrites, and averages of variance and covariance inside
              pooling windows;
            - `paper`: the rules of Brach, Sick & Duerr: variances only, no rewrites;
            - `auto`: `accurate`, for more than 64 outputs per sample with `outputs=8`; `fast` where that is
              not possible, or beyond 16,384 outputs. It says so once.
        outputs: which outputs get a covariance: the m largest by mean of every sample, or those at the
            given indices (of a sample's elements in row-major order). Beside the m largest four more are
            swept, and the others' variances, known from the forward sweep alone, are scaled by what these
            four show; beside given indices the others keep the variance of the forward sweep. The cost is
            that of so many outputs. By default all, up to 64.
        unsupported: what to do about operators that noise reaches and that have no rule:

            - `"error"`: name all of them;
            - `"linearize"`: moments to first order, by the operator's derivative at the mean;
            - `"sample"`: a small sample of that operator alone, at fixed points.

            `bnn.summary()` says where it was done. Operators that draw random numbers, or whose output's
            shape depends on data, are errors all the same.
        jumps: how many of the inputs and units that move an output most when they are dropped to name for
            each output, in `Moments.jumps`. With small drop probabilities (below 0.1 or so) and few of them
            in charge, the output is no Gaussian, and with its 16 largest jumps `mp.regress` gives the
            distribution that MC dropout samples from. Tier `accurate` only.
        batch_dim: the dimension of the inputs that is the batch, such as 1 for [time, batch, features]; or
            one for each input, in their structure (None for an input without a batch). None alone says that
            the inputs together are one sample, such as a graph: its sizes may vary from call to call, and
            the covariance is that of all outputs.
        dropout: which dropouts count: those of modules of a class or of a tuple of classes (`nn.Dropout`), of
            modules whose whole name a regular expression matches (`r"head\\..*"`), or of modules that a
            function (name, module) -> bool is true for. `nn.Module` means all. By default all count too,
            unless some modules that drop are in training mode and others in eval mode: those in eval mode
            are left out then, with a note.

    Returns:
        A module called like the model, with `Moments` in place of every output tensor.

    Raises:
        TraceError: the model has no static graph (for example, control flow on tensor values).
        NoDropoutError: nothing is random: no active dropout and no uncertain input.
        MissingRuleError: operators that noise reaches have no rule; all are listed with their places.
        CovarianceError: `accurate` was asked for, but samples of the batch influence each other.

    >>> import torch, momentprop as mp
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3))
    >>> bnn = mp.convert(model, torch.zeros(1, 4))
    >>> out = bnn(torch.randn(16, 4))
    >>> out.std.shape, out.covariance.shape
    (torch.Size([16, 3]), torch.Size([16, 3, 3]))
    """
    _check(fidelity, outputs, unsupported, jumps)
    selection = Selection.parse(outputs)
    example_inputs = args, kwargs = split_inputs(example_inputs)
    leaves = pytree.tree_leaves((args, kwargs), is_leaf=is_moments)
    uncertain = tuple(is_moments(v) for v in leaves)
    traced = _traced(model, example_inputs, batch_dim, dropout)

    def network(tier: Tier) -> BayesianNetwork:
        return BayesianNetwork(model, traced, Request(tier, selection, unsupported, jumps), uncertain)

    if fidelity != tiers.AUTO:
        asked = network(tiers.named(fidelity))
        against = doubt(asked, example_inputs, leaves)
        if against is not None:
            warnings.warn(f"tier {fidelity!r} may be wrong here: {against}", FidelityNote, stacklevel=2)
        return asked
    count = _count(traced, uncertain)
    affordable = selection if outputs is not None else Selection.default(count)
    reason = f"{count} outputs per sample; choose some with outputs="
    if affordable is not None and (affordable.takes_all or not jumps):
        selection = affordable
        try:
            accurate = network(tiers.ACCURATE)
        except (CovarianceError, MissingRuleError) as error:
            reason = str(error)
        else:
            against = doubt(accurate, example_inputs, leaves)
            if against is None:
                if outputs is None and not selection.takes_all:
                    warnings.warn(f"{reason}. By default: {selection}", FidelityNote, stacklevel=2)
                return accurate
            reason = f"tier {tiers.ACCURATE.name!r} may be wrong: {against}"
    if jumps:
        raise CovarianceError(f"jumps= needs tier {str(tiers.ACCURATE)!r}, against which speaks: {reason}")
    fast = network(tiers.FAST)  # first: what it cannot do either is an error, and no note
    note = f"fidelity={tiers.FAST.name!r}, variances without covariance, is used here: {reason}"
    warnings.warn(note, FidelityNote, stacklevel=2)
    return fast


def _traced(model: nn.Module, example_inputs: Any, batch_dim: Any, dropout: Where | None) -> Trace:
    if isinstance(model, BayesianNetwork):
        raise TypeError("the network is converted already: call it, or convert the model it was made of")
    traced = trace(model, example_inputs, batch_dim, dropout)
    batch = traced.signature.batch
    place = None if batch.whole else taken_for_time(traced.graph)
    if place is not None:
        note = (
            "a layer takes the batch for time, as recurrent layers and attention do with batch_first=False: "
            f"{batch}, by assumption. If the inputs are [time, batch, ...], say batch_dim=1:\n  {place}"
        )
        warnings.warn(note, TraceNote, stacklevel=3)
    return traced


def _check(fidelity: str, outputs: int | Sequence[int] | None, unsupported: str, jumps: int) -> None:
    """Refuse options that do not exist, or do not go together."""
    if fidelity not in tiers.NAMES:
        raise ValueError(f"fidelity must be one of {', '.join(tiers.NAMES)}, not {fidelity!r}")
    if unsupported not in UNSUPPORTED:
        raise ValueError(f"unsupported must be one of {', '.join(UNSUPPORTED)}, not {unsupported!r}")
    if outputs is not None and fidelity not in (tiers.AUTO, tiers.ACCURATE.name):
        raise ValueError(
            f"outputs= selects outputs for a covariance, which tier {fidelity!r} does not compute"
        )
    if jumps < 0:
        raise ValueError(f"jumps must not be negative, not {jumps}")
    if jumps and (fidelity not in (tiers.AUTO, tiers.ACCURATE.name) or outputs is not None):
        raise ValueError(
            f"jumps are known in tier {str(tiers.ACCURATE)!r}, and with all outputs: leave out outputs="
        )


def _count(traced: Trace, uncertain: Sequence[bool]) -> int:
    """Count the random outputs per sample."""
    inputs = [node for node, is_random in zip(traced.input_nodes, uncertain, strict=True) if is_random]
    random = analyze(traced.graph, tiers.ACCURATE.rules, inputs).random
    outputs: Any = next(reversed(traced.graph.nodes)).args[0]
    values = [v.meta["val"] for v in outputs if isinstance(v, fx.Node) and v in random]
    size = size_in_trace if traced.signature.batch.whole else size_of_one
    return sum(size(v) for v in values if isinstance(v, Tensor))
