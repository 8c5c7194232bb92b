"""nn.Module + example inputs -> one functional ATen graph with every dropout armed; knows no rules."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from momentprop.capture.agreement import Outputs, differing, evaluated, failure
from momentprop.capture.augmentation import leave_out_augmentation
from momentprop.capture.batch import Batch, BatchDim, open_dimensions, rows_per_sample
from momentprop.capture.choice import Choice, Where
from momentprop.capture.exporting import PREFIX, explain, export
from momentprop.capture.idle import hides_noise, outputs_of
from momentprop.capture.layerdrop import BranchByChanceError
from momentprop.capture.normalize import drop_unused_state, normalize
from momentprop.capture.signature import Signature, check_kinds, split_inputs
from momentprop.errors import InputError, TraceError, TraceNote
from momentprop.graph.edit import remove_unused
from momentprop.graph.ops import DROPOUTS, HEADS, SAME_ORDER
from momentprop.graph.private import EXPORTING, FakeTensor
from momentprop.moments import is_moments, mean_of

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Trace:
    """A model as a pure function: graph(*state, *inputs) -> flat outputs. Never changed once made."""

    graph: fx.Graph
    root: nn.Module  # holds the sub-graphs of control-flow operators
    state: tuple[str, ...]  # names of the parameters, buffers and constants the graph takes first
    constants: dict[str, Tensor]  # tensors that are neither parameters nor buffers of the model
    signature: Signature
    out_spec: pytree.TreeSpec

    def __deepcopy__(self, memo: dict[int, Any]) -> Trace:
        return self

    @property
    def input_nodes(self) -> list[fx.Node]:
        return [n for n in self.graph.nodes if n.op == "placeholder"][len(self.state) :]

    @property
    def heads(self) -> dict[int, tuple[str, int | None]]:
        """Say which outputs are a softmax, log-softmax or sigmoid (reshaped or not), and its dimension."""
        outputs: Any = next(reversed(self.graph.nodes)).args[0]
        nodes: dict[int, Any] = {i: node for i, node in enumerate(outputs) if isinstance(node, fx.Node)}
        found = {i: (HEADS[n.target], (*n.args, None)[1]) for i, n in nodes.items() if n.target in HEADS}
        for i, node in nodes.items():
            while isinstance(node, fx.Node) and node.target in SAME_ORDER:
                node = node.args[0]
            if isinstance(node, fx.Node) and node.target is torch.ops.aten.sigmoid.default:
                found[i] = (HEADS[node.target], None)
        return found

    def copy_graph(self) -> fx.Graph:
        graph = fx.Graph(owning_module=self.root)  # type: ignore[arg-type]
        graph.output(graph.graph_copy(self.graph, {}))
        return graph

    def moved(self, probe: Callable[[torch.dtype], Tensor]) -> Trace:
        """The trace after its module moved: `probe(dtype)` is an empty tensor that moved along.

        Devices named in the graph follow, and so do the dtypes of tensors it creates from nothing;
        explicit casts stay what the model's author wrote.
        """
        graph = self.copy_graph()
        for node in graph.nodes:
            kwargs = dict(node.kwargs)
            if kwargs.get("device") is not None:
                kwargs["device"] = probe(torch.float32).device
            dtype = kwargs.get("dtype")
            if isinstance(dtype, torch.dtype) and dtype.is_floating_point and not _tensor_inputs(node):
                kwargs["dtype"] = probe(dtype).dtype
            node.kwargs = kwargs
            value = node.meta.get("val")
            if isinstance(value, FakeTensor) and value.is_floating_point():
                moved = probe(value.dtype)
                with value.fake_mode:
                    node.meta["val"] = value.to(device=moved.device, dtype=moved.dtype)
        return dataclasses.replace(self, graph=graph, signature=self.signature.moved(probe))


def trace(
    model: nn.Module, inputs: Any, batch_dim: BatchDim = 0, dropout: Where | Choice | None = None
) -> Trace:
    """Trace the model with the dropout that counts armed and any number of samples, leaving it as it was."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    args, kwargs = pytree.tree_map(mean_of, split_inputs(inputs), is_leaf=is_moments)
    own = {id(leaf): leaf.detach() for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
    # tensors of our own, for torch.export leaves notes on them
    leaves = [own.get(id(leaf), leaf) for leaf in pytree.tree_leaves((args, kwargs))]
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        raise InputError("the example inputs contain no tensor")
    signature = Signature.of(model, args, kwargs, batch_dim)
    with EXPORTING:  # what is run to compare with must not run while another thread exports
        choice = Choice.of(model, dropout, *pytree.tree_unflatten(leaves, signature.spec))
        return _with_samples(model, leaves, signature, choice)


def _with_samples(model: nn.Module, leaves: list[Any], signature: Signature, choice: Choice) -> Trace:
    """Trace; once more where the model turns out to put several rows of the batch together."""

    def traced(batch: Batch) -> Trace:
        args, kwargs = pytree.tree_unflatten(batch.two_or_more(leaves), signature.spec)
        made = _trace(model, args, kwargs, dataclasses.replace(signature, batch=batch), choice)
        left = tuple([open_dimensions(node) for node in made.input_nodes])
        kept = tuple([d if d in found else None for d, found in zip(batch.dims, left, strict=True)])
        batch = dataclasses.replace(batch, dims=tuple([None] * len(kept)) if batch.whole else kept)
        return dataclasses.replace(made, signature=dataclasses.replace(signature, batch=batch, open=left))

    made = traced(signature.batch)
    rows = 1 if signature.batch.whole else rows_per_sample(made.graph)
    if rows > 1:
        try:
            return traced(dataclasses.replace(signature.batch, rows=rows))
        except TraceError:
            return made
    return made


def _trace(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], signature: Signature, choice: Choice
) -> Trace:
    """Trace with dropout armed, and other noise of training mode left out unless the caller chose it."""
    reference = evaluated(model, args, kwargs)
    if reference is None:
        check_kinds(model, pytree.tree_leaves((args, kwargs)))
    try:
        made = _armed_trace(model, args, kwargs, signature, choice, reference)
    except TraceError:
        error = None if reference else failure(model, args, kwargs)
        if error is None:
            raise
        raise TraceError(explain(model, error)) from None
    return made if choice.explicit or reference is None else _without_augmentation(made, model, reference)


def _without_augmentation(made: Trace, model: nn.Module, reference: Outputs) -> Trace:
    """The trace without the noise that training mode adds to values."""
    graph = made.copy_graph()
    given = [n for n in graph.nodes if n.op == "placeholder"]
    learned = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    parameters = [n for n, name in zip(given, made.state, strict=False) if name in learned]
    if not leave_out_augmentation(graph, given[len(made.state) :], parameters, reference.draws):
        return made
    state = drop_unused_state(graph, {n.name: name for n, name in zip(given, made.state, strict=False)})
    return dataclasses.replace(made, graph=graph, state=state)


def _armed_trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    signature: Signature,
    choice: Choice,
    reference: Outputs | None,
) -> Trace:
    """Trace with dropout armed, leaving in eval mode what would make more of training than dropout."""

    def attempt(disarm: frozenset[str]) -> tuple[Trace, frozenset[str]]:
        program, out_spec, left_out = export(model, args, kwargs, signature.batch, disarm | uncounted)
        opaque.update(dict.fromkeys(left_out))
        graph, state, written = normalize(program, PREFIX)
        constants = {name.removeprefix(PREFIX): value for name, value in program.constants.items()}
        return Trace(graph, program.graph_module, state, constants, signature, out_spec), written

    opaque: dict[type, None] = {}
    uncounted = choice.names(model)
    disarm: frozenset[str] = frozenset()
    try:
        made, written = attempt(disarm)
    except BranchByChanceError:
        raise
    except TraceError:
        disarm = _disarmed(model, args, kwargs, reference)
        if not disarm:
            raise
        made, written = attempt(disarm)
    if written:  # statistics of normalisation layers of the user's
        owners = disarm | {name.rpartition(".")[0] for name in written}
        second, still_written = attempt(owners)
        # where nothing changes, or if dropout is lost with it, the first trace stands
        if still_written < written and _n_dropouts(second) == _n_dropouts(made):
            made, disarm = second, owners
    if opaque:
        names = ", ".join(kind.__name__ for kind in opaque)
        note = f"the outputs of {type(model).__name__} hold {names}, not a tensor: None takes its place"
        warnings.warn(note, TraceNote, stacklevel=4)
    if reference is None:
        return made
    agreed = _agreed(made, model, args, kwargs, reference)
    if agreed is None and (more := _disarmed(model, args, kwargs, reference)) - disarm:
        made, _ = attempt(disarm | more)
        agreed = _agreed(made, model, args, kwargs, reference)
    return agreed or _unlike(made, model, args, kwargs, reference)


def _agreed(
    made: Trace, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], reference: Outputs
) -> Trace | None:
    """The trace, with the outputs of eval mode only, if those are among its own."""
    outputs = _idle_outputs(made, model, args, kwargs)
    if outputs is None or reference.agrees(outputs, made.out_spec):
        return made
    chosen = reference.found_in(outputs) if made.out_spec != reference.spec else None
    if chosen is None:
        return None
    graph = made.copy_graph()
    last = next(reversed(graph.nodes))
    last.args = ([last.args[0][i] for i in chosen],)
    remove_unused(graph)
    names = [n.name for n in graph.nodes if n.op == "placeholder"]
    state = drop_unused_state(graph, dict(zip(names, made.state, strict=False)))
    return dataclasses.replace(made, graph=graph, state=state, out_spec=reference.spec)


def _idle_outputs(made: Trace, model: nn.Module, args: Any, kwargs: Any) -> list[Any] | None:
    """The outputs of the traced graph with its noise idle; None if it cannot run so."""
    if hides_noise(made.graph):
        return None
    state = [_lookup(model, name, made.constants) for name in made.state]
    try:
        return outputs_of(made.graph, made.root, [*state, *pytree.tree_leaves((args, kwargs))])
    except Exception:
        return None


def _lookup(model: nn.Module, name: str, constants: dict[str, Tensor]) -> Any:
    return constants[name] if name in constants else functools.reduce(getattr, name.split("."), model)


def _disarmed(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], reference: Outputs | None
) -> frozenset[str]:
    """Names of modules that training changes beyond dropout."""
    found = {} if reference is None else differing(model, args, kwargs, reference)
    losing = [f"{kind.__name__} ({count})" for kind, count in found.items() if count]
    if losing:
        note = (
            f"{', '.join(losing)}: in training mode the outputs change beyond dropout, so it was traced in "
            "eval mode, and the dropout it calls itself (so many times) is left out. Use nn.Dropout modules "
            "there, or switch off what else training changes"
        )
        warnings.warn(note, TraceNote, stacklevel=6)
    return frozenset(name for name, module in model.named_modules() if type(module) in found)


def _unlike(
    made: Trace, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], reference: Outputs
) -> Trace:
    """Say that the traced network is not the model of eval mode."""
    outputs = _idle_outputs(made, model, args, kwargs) or []
    name = type(model).__name__
    if not reference.same_shapes(outputs, made.out_spec):
        raise TraceError(
            f"{name} could not be traced: with dropout on, it returns {_shapes(outputs)}, and in eval mode "
            f"{_shapes(reference.leaves)}. Switch off what else training changes, such as auxiliary outputs "
            "or losses"
        )
    note = (
        f"{name} with its noise at its mean returns other values than in eval mode: something that depends "
        "on the training flag is neither dropout nor noise around what eval mode computes"
    )
    warnings.warn(note, TraceNote, stacklevel=5)
    return made


def _shapes(leaves: list[Any]) -> str:
    return "[" + ", ".join(str(list(v.shape)) if isinstance(v, Tensor) else repr(v) for v in leaves) + "]"


def _n_dropouts(made: Trace) -> int:
    return sum(node.target in DROPOUTS for node in made.graph.nodes)


def _tensor_inputs(node: fx.Node) -> bool:
    return any(isinstance(n.meta.get("val"), Tensor) for n in node.all_input_nodes)
