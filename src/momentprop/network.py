"""The converted network: the model's tensors, and one program for every pattern of uncertain inputs."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from momentprop.capture.batch import Batch
from momentprop.capture.records import rebuild_output
from momentprop.capture.signature import check_devices
from momentprop.capture.trace import Trace
from momentprop.capture.watch import Watch
from momentprop.engine.layouts import Layout, layouts
from momentprop.engine.overflow import in_float64, overflows
from momentprop.engine.per_sample import PerSample, per_sample
from momentprop.engine.program import Program, Wanted
from momentprop.errors import InputError, MomentpropError, NoDropoutError
from momentprop.graph.ops import DROPOUTS
from momentprop.graph.private import collate_with
from momentprop.lowering.frozen import FrozenNetwork, freeze
from momentprop.lowering.inductor import Compiled
from momentprop.moments import Moments, as_output, is_moments
from momentprop.passes.prepare import Prepared, prepare
from momentprop.summary import Summary, summarize
from momentprop.tiers import Request, Tier

Pattern = tuple[bool, ...]  # which of the inputs, flattened, are uncertain

collate_with(Moments, Moments.stack)  # uncertain inputs may come from a data set

_BUILDING = threading.RLock()


@dataclass(frozen=True, eq=False)
class Built:
    """A program, program(*state, *inputs) -> flat outputs, and the graph it was made of; neither changes."""

    prepared: Prepared
    program: Program | PerSample
    layouts: Mapping[str, Layout]

    @staticmethod
    def of(
        trace: Trace,
        request: Request,
        pattern: Pattern,
        state: Sequence[Tensor],
        known: Mapping[str, Layout] | None = None,
    ) -> Built:
        """Build a program; layouts are observed unless they are known from the same trace elsewhere."""
        tier = request.tier
        prepared = prepare(trace, tier.rules, tier.passes, pattern, request.unsupported)
        made, random = prepared.trace, prepared.random
        if tier.cut is None:
            return Built(prepared, Program(made, random, tier.rules, heads=tier.heads), {})
        found = layouts(made, list(state)) if known is None else known
        wanted = Wanted(tier.cut, tier.fusions, found, request.selection, request.jumps)
        program = per_sample(made, random, tier.rules, wanted, state)
        return Built(prepared, program or Program(made, random, tier.rules, wanted), found)

    def __deepcopy__(self, memo: dict[int, Any]) -> Built:
        return self


class BayesianNetwork(Compiled):
    """A converted network: call it like the model, get `Moments` in place of every tensor.

    Its parameters and buffers *are* the model's, under the same names: training the model, or loading
    weights into it, is seen here at once, and gradients reach the model's parameters. Moving it to
    another device or dtype gives it copies of its own and leaves the model where it is.
    """

    def __init__(self, model: nn.Module, trace: Trace, request: Request, uncertain: Pattern) -> None:
        super().__init__()
        self._trace = trace
        self._request = request
        self._uncertain = uncertain
        self._watch: Watch | None = Watch(model)
        _share_state(self, model, trace)
        built = Built.of(trace, request, uncertain, self._state())
        if not built.prepared.random:
            raise NoDropoutError(
                f"the model has no active dropout{_idle_dropout(model)}, so its output has no uncertainty. "
                "Insert dropout where it was trained with it, by mp.with_dropout(model, p, where=...), or "
                "give an uncertain input: mp.Moments(x, variance)"
            )
        self._programs = {uncertain: built}
        self.training = False
        if hasattr(model, "config"):  # which pipelines of transformers ask for
            self.config = model.config

    @property
    def tier(self) -> Tier:
        """The tier of rules in use."""
        return self._request.tier

    @property
    def fidelity(self) -> str:
        """The name of the tier of rules in use."""
        return self._request.tier.name

    @property
    def device(self) -> torch.device:
        """The device of the network's weights."""
        return next((t.device for t in self._state()), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """The type of the network's weights."""
        return next((t.dtype for t in self._state() if t.is_floating_point()), torch.get_default_dtype())

    def __repr__(self) -> str:
        graph, inputs = self._trace.graph, self._trace.input_nodes
        outputs: Any = next(reversed(graph.nodes)).args[0]
        drops = [n.args[1] for n in graph.nodes if n.target in DROPOUTS and n.args[2]]
        rates = ", ".join(f"{drops.count(p)} x p={p:g}" for p in sorted({*drops}))
        batch = self._trace.signature.batch
        given, returned = (
            ", ".join(filter(None, [_shape(n, batch) for n in nodes])) for nodes in (inputs, outputs)
        )
        says = f"tier={self.fidelity!r}, {given} -> {returned}, dropout: {rates or 'other noise'}"
        return f"{type(self).__name__}({says})"

    def _state(self) -> list[Tensor]:
        """Parameters, buffers and constants, as programs take them first."""
        return [_part(self, name) for name in self._trace.state]

    def _check(self) -> None:
        """Raise if the model was changed since; within compiled code nobody asks."""
        if self._watch is not None and not torch.compiler.is_compiling():
            self._watch.check()

    def _built(self, pattern: Pattern) -> Built:
        """The program for inputs of which these are uncertain; made when it is first asked for."""
        found = self._programs.get(pattern)
        if found is None and torch.compiler.is_dynamo_compiling():
            raise InputError(
                "other inputs are uncertain than before, which takes a program of its own: before compiling, "
                "call the network once with such inputs"
            )
        return self._build(pattern) if found is None else found

    def _build(self, pattern: Pattern) -> Built:
        with _BUILDING:
            if pattern not in self._programs:
                made = Built.of(self._trace, self._request, pattern, self._state())
                self._programs = {**self._programs, pattern: made}
            return self._programs[pattern]

    def summary(self, random_only: bool = True) -> Summary:
        """A table of the operators that noise reaches, or of all: rule in use, exactness, shape, place."""
        built = self._programs[self._uncertain]
        return summarize(built.prepared, self._request, built.program.plan, random_only)

    def freeze(self) -> FrozenNetwork:
        """A copy for inference: squared, folded and flipped weights are computed here, and not in every call.

        Its weights are its own: training the model, or loading weights into it, is not seen there. It takes
        uncertain inputs where the example inputs of this network were uncertain.
        """
        self._check()
        trace, program = self._trace, self._programs[self._uncertain].program
        return freeze(program, self._state(), trace.signature, self._uncertain, trace.out_spec, self.fidelity)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._check()
        leaves = self._trace.signature.flatten(args, kwargs)
        state = self._state()
        if not torch.compiler.is_compiling():
            check_devices(state, leaves)
        program = self._built(tuple([is_moments(leaf) for leaf in leaves])).program
        outputs = program(*state, *leaves)
        if overflows(leaves, outputs):
            outputs = in_float64(program, [*state, *leaves], outputs)
        moments = [as_output(value) for value in outputs]
        return rebuild_output(moments, self._trace.out_spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> BayesianNetwork:
        """Copy the weights; pickle, which would decide this otherwise, goes by way of an archive."""
        made: BayesianNetwork = object.__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy({**self.__dict__, "_watch": None}, memo))
        return made

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BayesianNetwork:
        """Do what nn.Module._apply does, with new parameters instead of overwriting the model's."""
        device = next((t.device for t in self.state_dict(keep_vars=True).values()), torch.device("cpu"))
        moved: dict[int, Tensor] = {}
        before = self._state()
        for module in self.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        moved.setdefault(id(tensor), _moved(tensor, fn))
                        table[name] = moved[id(tensor)]  # type: ignore[assignment]

        def probe(dtype: torch.dtype) -> Tensor:
            return fn(torch.empty(0, dtype=dtype, device=device))

        self._trace = self._trace.moved(probe)
        state = self._state()
        if any(a is not b for a, b in zip(before, state, strict=True)):  # a network of its own from now on
            self._watch = None
        self._programs = {  # on some devices values do not tell layouts
            pattern: Built.of(self._trace, self._request, pattern, state, built.layouts)
            for pattern, built in self._programs.items()
        }
        return self


@dataclass(frozen=True, eq=False)
class Inside:
    """Shows other rooms of the library what a converted network is made of."""

    trace: Trace  # the model as a graph, before any rule has looked at it
    request: Request
    uncertain: Pattern  # which of the example inputs, flattened, were uncertain
    state: list[Tensor]  # parameters, buffers and constants, as programs take them first
    programs: Callable[[Pattern], Built]

    @property
    def built(self) -> Built:
        """The program for inputs that are uncertain where the example inputs were."""
        return self.programs(self.uncertain)

    @property
    def graph(self) -> Trace:
        """The graph of that program: rewritten, and covered by rules."""
        return self.built.prepared.trace


def inside(network: BayesianNetwork) -> Inside:
    """Show what the network is made of. (Not as attributes: those names belong to the user's model.)"""
    network._check()
    return Inside(network._trace, network._request, network._uncertain, network._state(), network._built)


def _part(module: nn.Module, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), module)


def _moved(tensor: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    with torch.no_grad():
        plain = tensor.detach()
        new = fn(plain)
    if new is plain:
        return tensor
    return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new


def _shape(node: Any, batch: Batch) -> str:
    """Describe an input or output, such as float32[batch, 3]; nothing but tensors has a shape."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor):
        return ""
    return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(batch.names(value.shape))}]"


_EMPTY = nn.Module()


def _idle_dropout(model: nn.Module) -> str:
    """Say what there is in place of active dropout."""
    idle = [n or "itself" for n, m in model.named_modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
    if idle:
        more = f" and {len(idle) - 3} more" if len(idle) > 3 else ""
        return f": {', '.join(idle[:3])}{more} (with p = 0, or not called)"
    return ": it holds no nn.Dropout, and calls F.dropout with p = 0, training=False or not at all"


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
