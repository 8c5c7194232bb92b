"""trace -> coverage -> propagate: the one entry point."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import momentprop.rules  # noqa: F401  (registers the rules)
from momentprop.coverage import analyze
from momentprop.decompose import decompose
from momentprop.errors import MissingRuleError, MomentpropError, NoDropoutError
from momentprop.moments import as_moments, is_moments
from momentprop.propagate import propagate
from momentprop.structure import rebuild_output, split_inputs
from momentprop.trace import Trace, trace

FIDELITIES = ("paper",)


def convert(model: nn.Module, example_inputs: Any, fidelity: str = "paper") -> BayesianNetwork:
    """Turn a trained dropout network into one that returns mean and variance in a single pass.

    Args:
        model: any module that `torch.export` accepts. It is not modified.
        example_inputs: a tensor, a tuple of positional inputs, or (args, kwargs). The first dimension is
            the batch; afterwards any batch size runs. An input given as `Moments` is uncertain.
        fidelity: `"paper"`, the rules of Brach, Sick & Duerr: diagonal variance, no rewrites.

    Returns:
        A module called like the model, with `Moments` in place of every output tensor.

    Raises:
        TraceError: the model has no static graph (for example, control flow on tensor values).
        NoDropoutError: nothing is random: no active dropout and no uncertain input.
        MissingRuleError: operators that noise reaches have no rule; all are listed with their places.

    >>> import torch, momentprop as mp
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3))
    >>> bnn = mp.convert(model, torch.zeros(1, 4))
    >>> bnn(torch.randn(16, 4)).std.shape
    torch.Size([16, 3])
    """
    if fidelity not in FIDELITIES:
        raise ValueError(f"fidelity must be one of {', '.join(FIDELITIES)}, not {fidelity!r}")
    args, kwargs = split_inputs(example_inputs)
    leaves = pytree.tree_leaves((args, kwargs), is_leaf=is_moments)
    traced = cover(trace(model, example_inputs), fidelity, [is_moments(v) for v in leaves])
    return BayesianNetwork(model, traced, fidelity)


def cover(traced: Trace, fidelity: str, uncertain: Sequence[bool]) -> Trace:
    """The trace with operators that have no rule decomposed; raises if any remains."""

    def random_inputs(t: Trace) -> list[Any]:
        return [node for node, is_random in zip(t.input_nodes, uncertain, strict=True) if is_random]

    coverage = analyze(traced.graph, fidelity, random_inputs(traced))
    if not coverage.sources and not any(uncertain):
        raise NoDropoutError(
            "the model has no active dropout (or only p = 0), so its output has no uncertainty. Add "
            "dropout, or give an uncertain input: convert(model, mp.Moments(x, variance))"
        )
    if coverage.missing:
        copy = dataclasses.replace(traced, graph=traced.copy_graph())
        copied = analyze(copy.graph, fidelity, random_inputs(copy))
        decompose(copy.graph, list(copied.missing), fidelity)
        missing = analyze(copy.graph, fidelity, random_inputs(copy))
        if missing.missing:
            raise MissingRuleError(missing.places)
        return copy
    return traced


class BayesianNetwork(nn.Module):
    """A converted network: call it like the model, get `Moments` in place of every tensor.

    Its parameters and buffers *are* the model's, under the same names: training the model, or loading
    weights into it, is seen here at once, and gradients reach the model's parameters. Moving it to
    another device or dtype gives it copies of its own and leaves the model where it is.
    """

    def __init__(self, model: nn.Module, traced: Trace, fidelity: str) -> None:
        super().__init__()
        self._trace = traced
        self._fidelity = fidelity
        self._checked: set[tuple[bool, ...]] = set()
        self._program = propagate(traced, fidelity)
        _share_state(self, model, traced)
        self.training = False

    @property
    def fidelity(self) -> str:
        """The tier of rules in use."""
        return self._fidelity

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves = self._trace.signature.flatten(args, kwargs)
        if not torch.compiler.is_compiling():
            self._check_uncertain(tuple(map(is_moments, leaves)))
        state = [functools.reduce(getattr, name.split("."), self) for name in self._trace.state]
        outputs = self._program(*state, *leaves)
        moments = [value if is_moments(value) else as_moments(value) for value in outputs]
        return rebuild_output(moments, self._trace.out_spec)

    def _check_uncertain(self, uncertain: tuple[bool, ...]) -> None:
        """Uncertain inputs reach operators before the first dropout too: those need rules as well."""
        if any(uncertain) and uncertain not in self._checked:
            traced = cover(self._trace, self._fidelity, uncertain)
            if traced is not self._trace:
                self._trace, self._program = traced, propagate(traced, self._fidelity)
            self._checked.add(uncertain)

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
        self._trace = self._trace.moved(lambda dtype: fn(torch.empty(0, dtype=dtype, device=device)))
        self._program = propagate(self._trace, self._fidelity)
        return self


def _moved(tensor: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    with torch.no_grad():
        plain = tensor.detach()
        new = fn(plain)
    if new is plain:
        return tensor
    return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new


def _share_state(target: nn.Module, model: nn.Module, traced: Trace) -> None:
    """Register the model's own tensors, and the trace's constants, under their names."""

    def owner(name: str) -> tuple[nn.Module, str]:
        *path, last = name.split(".")
        module = target
        for part in path or [last]:
            if hasattr(module, part) and part not in module._modules | module._buffers | module._parameters:
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
