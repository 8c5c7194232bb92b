"""trace -> rewrite -> coverage -> propagate (-> adjoint): the one entry point."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import momentprop.rules  # noqa: F401  (registers the rules)
from momentprop import tiers
from momentprop.capture.signature import rebuild_output, split_inputs
from momentprop.capture.trace import Trace, trace
from momentprop.engine.adjoint import TwoSweeps
from momentprop.engine.layouts import Layout, layouts
from momentprop.engine.per_sample import two_sweeps
from momentprop.engine.propagate import propagate
from momentprop.engine.selection import Selection
from momentprop.errors import (
    CovarianceError,
    FidelityNote,
    MissingRuleError,
    MomentpropError,
)
from momentprop.lowering.frozen import FrozenNetwork, freeze
from momentprop.lowering.inductor import Compiled
from momentprop.moments import as_moments, is_moments, plain
from momentprop.passes.prepare import Prepared, prepare
from momentprop.passes.stand_ins.unsupported import UNSUPPORTED
from momentprop.summary import Summary, summarize
from momentprop.tiers import Tier

_MOST_OUTPUTS = 64  # per sample, up to which `auto` sweeps back from all of them


def convert(
    model: nn.Module,
    example_inputs: Any,
    fidelity: str = "auto",
    *,
    outputs: int | Sequence[int] | None = None,
    unsupported: str = "error",
    jumps: int = 0,
) -> BayesianNetwork:
    """Turn a trained dropout network into one that returns mean and variance in a single pass.

    Args:
        model: any module that `torch.export` accepts. It is not modified.
        example_inputs: a tensor, a tuple of positional inputs, or (args, kwargs). The first dimension is
            the batch; afterwards any batch size runs. An input given as `Moments` is uncertain.
        fidelity: the tier of rules:

            - `"accurate"`: the covariance of the outputs, by a forward and a backward sweep;
            - `"fast"`: variances only, with exact rewrites, and averages of variance and covariance inside
              pooling windows;
            - `"paper"`: the rules of Brach, Sick & Duerr: variances only, no rewrites;
            - `"auto"`: `accurate` for up to 64 outputs per sample, otherwise `fast`, which it says once.
        outputs: which outputs get a covariance: the m largest by mean of every sample, or those at the
            given indices (of a sample's elements in row-major order). The cost is that of so many outputs;
            the others keep the variance of the forward sweep. By default all.
        unsupported: what to do about operators that noise reaches and that have no rule:

            - `"error"`: name all of them;
            - `"linearize"`: moments to first order, by the operator's derivative at the mean;
            - `"sample"`: by that operator's values at fixed points: a grid if it works element by
              element, otherwise a small sample.

            `bnn.summary()` says where it was done. Operators that draw random numbers, or whose output's
            shape depends on data, are errors all the same.
        jumps: how many of the inputs and units that move an output most when they are dropped to name for
            each output, in `Moments.jumps`. With small drop probabilities (below 0.1 or so) and few of them
            in charge, the output is no Gaussian, and with its 16 largest jumps `mp.regress` gives the
            distribution that MC dropout samples from. Tier `accurate` only.

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
    if fidelity not in tiers.NAMES:
        raise ValueError(f"fidelity must be one of {', '.join(tiers.NAMES)}, not {fidelity!r}")
    if unsupported not in UNSUPPORTED:
        raise ValueError(f"unsupported must be one of {', '.join(UNSUPPORTED)}, not {unsupported!r}")
    selection = Selection.parse(outputs)
    if outputs is not None and fidelity not in ("auto", "accurate"):
        raise ValueError(
            f"outputs= selects outputs for a covariance, which tier {fidelity!r} does not compute"
        )
    if jumps < 0:
        raise ValueError(f"jumps must not be negative, not {jumps}")
    if jumps and (fidelity not in ("auto", "accurate") or outputs is not None):
        raise ValueError("jumps are known in tier 'accurate', and with all outputs: leave out outputs=")
    args, kwargs = split_inputs(example_inputs)
    leaves = pytree.tree_leaves((args, kwargs), is_leaf=is_moments)
    uncertain = tuple(is_moments(v) for v in leaves)
    traced = trace(model, example_inputs)
    return BayesianNetwork(model, traced, fidelity, selection, uncertain, unsupported, jumps)


class BayesianNetwork(Compiled):
    """A converted network: call it like the model, get `Moments` in place of every tensor.

    Its parameters and buffers *are* the model's, under the same names: training the model, or loading
    weights into it, is seen here at once, and gradients reach the model's parameters. Moving it to
    another device or dtype gives it copies of its own and leaves the model where it is.
    """

    def __init__(
        self,
        model: nn.Module,
        traced: Trace,
        fidelity: str,
        selection: Selection,
        uncertain: tuple[bool, ...],
        unsupported: str = "error",
        jumps: int = 0,
    ) -> None:
        super().__init__()
        self._trace = traced
        self._selection = selection
        self._unsupported = unsupported
        self._jumps = jumps
        self._checked: set[tuple[bool, ...]] = set()
        self._fidelity = "fast" if fidelity == "auto" else fidelity
        _share_state(self, model, traced)
        self._layouts: dict[str, Layout] = {}
        self._prepared: Prepared
        self._program: nn.Module
        self._check_uncertain(uncertain)
        if fidelity == "auto":
            self._upgrade(uncertain)
        self.training = False

    @property
    def fidelity(self) -> str:
        """The tier of rules in use."""
        return self._fidelity

    @property
    def tier(self) -> Tier:
        """The tier of rules in use."""
        return tiers.named(self._fidelity)

    def summary(self, random_only: bool = True) -> Summary:
        """A table of the operators that noise reaches, or of all: rule in use, exactness, shape, place."""
        calls = self._program.calls if isinstance(self._program, TwoSweeps) else []
        used = {call.name: call.target for call in calls}
        return summarize(self._graph.graph, self._prepared.random, self.tier, used, random_only)

    def freeze(self) -> FrozenNetwork:
        """A copy for inference: squared, folded and flipped weights are computed here, and not in every call.

        Its weights are its own: training the model, or loading weights into it, is not seen there. It takes
        uncertain inputs where this network has been given some.
        """
        union = tuple(map(any, zip(*self._checked, strict=True)))
        trace = self._trace
        return freeze(self._program, self._state(), trace.signature, union, trace.out_spec, self._fidelity)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves = self._trace.signature.flatten(args, kwargs)
        if not torch.compiler.is_compiling():
            self._check_uncertain(tuple(map(is_moments, leaves)))
        outputs = self._program(*self._state(), *leaves)
        moments = [plain(value) if is_moments(value) else as_moments(value) for value in outputs]
        return rebuild_output(moments, self._trace.out_spec)

    def _state(self) -> list[Tensor]:
        def find(name: str) -> Any:
            return functools.reduce(getattr, name.split("."), self)

        return [find(name) for name in self._trace.state]

    def _check_uncertain(self, uncertain: tuple[bool, ...]) -> None:
        """Uncertain inputs reach operators before the first dropout too: those need rules as well."""
        if uncertain in self._checked or (self._checked and not any(uncertain)):
            return
        # a program for several patterns of uncertain inputs takes as random what is so in any of them
        union = tuple(map(any, zip(uncertain, *self._checked, strict=True)))
        self._prepared, self._program = self._build(union)
        self._checked.update((uncertain, union))

    @property
    def _graph(self) -> Trace:
        return self._prepared.trace

    def _build(
        self, uncertain: tuple[bool, ...], known: dict[str, Layout] | None = None
    ) -> tuple[Prepared, nn.Module]:
        rules, state = self.tier.rules, self._state()
        prepared = prepare(self._trace, rules, uncertain, self.tier.rewrites, self._unsupported)
        if not self.tier.sweeps:
            return prepared, propagate(prepared.trace, rules)
        self._layouts = layouts(prepared.trace, state) if known is None else known
        return prepared, two_sweeps(
            prepared.trace, prepared.random, self._layouts, self._selection, state, self._jumps
        )

    def _upgrade(self, uncertain: tuple[bool, ...]) -> None:
        """From `fast` to `accurate`, unless something speaks against it."""
        fast = self._prepared, self._program
        self._fidelity, self._checked = "accurate", set()
        try:
            self._check_uncertain(uncertain)
            assert isinstance(self._program, TwoSweeps)
            count = self._program.n_outputs
            reason = f"{count} outputs per sample; choose some with outputs=" if count > _MOST_OUTPUTS else ""
        except (CovarianceError, MissingRuleError) as error:
            reason = str(error)
        if reason:
            self._fidelity, self._checked = "fast", {uncertain}
            self._prepared, self._program = fast
            note = f"fidelity='fast', variances without covariance, is used here: {reason}"
            warnings.warn(note, FidelityNote, stacklevel=4)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BayesianNetwork:
        """As nn.Module._apply, but with new parameters instead of overwriting the model's."""
        device = next((t.device for t in self.state_dict(keep_vars=True).values()), torch.device("cpu"))
        moved: dict[int, Tensor] = {}
        for module in self.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        moved.setdefault(id(tensor), _moved(tensor, fn))
                        table[name] = moved[id(tensor)]  # type: ignore[assignment]

        def probe(dtype: torch.dtype) -> Tensor:
            return fn(torch.empty(0, dtype=dtype, device=device))

        self._trace = self._trace.moved(probe)
        union = tuple(map(any, zip(*self._checked, strict=True)))
        self._prepared, self._program = self._build(
            union, self._layouts
        )  # values do not tell on every device
        return self


def _moved(tensor: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    with torch.no_grad():
        plain = tensor.detach()
        new = fn(plain)
    if new is plain:
        return tensor
    return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new


_EMPTY = nn.Module()


def _share_state(target: nn.Module, model: nn.Module, traced: Trace) -> None:
    """Register the model's own tensors, and the trace's constants, under their names."""

    def owner(name: str) -> tuple[nn.Module, str]:
        *path, last = name.split(".")
        module = target
        for depth, part in enumerate(path or [last]):
            taken = hasattr(module if depth == 0 else _EMPTY, part)
            if taken and part not in module._modules | module._buffers | module._parameters:
                raise MomentpropError(
                    f"the model has a part called {part!r}, a name the converted network uses; rename it"
                )
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        return module, last

    for name, parameter in model.named_parameters(remove_duplicate=False):
        module, last = owner(name)
        module.register_parameter(last, parameter)
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, buffer in model.named_buffers(remove_duplicate=False):
        module, last = owner(name)
        path = name.rpartition(".")[0]
        persistent = last not in modules[path]._non_persistent_buffers_set
        module.register_buffer(last, buffer, persistent=persistent)
    for name in traced.state:
        module, last = owner(name)
        if name in traced.constants and last not in module._buffers:
            module.register_buffer(last, traced.constants[name], persistent=False)
