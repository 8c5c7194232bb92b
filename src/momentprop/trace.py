"""nn.Module + example inputs -> one functional ATen graph with every dropout armed; knows no rules."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from momentprop.errors import DropProbabilityError, InputError, Place, TraceError
from momentprop.functionalize import functionalize
from momentprop.moments import is_moments, mean_of
from momentprop.structure import Signature, flatten_output, split_inputs

aten = torch.ops.aten

_TORCH = inspect.getfile(torch).removesuffix("__init__.py")

DROPOUTS = (
    aten.dropout.default,
    aten.feature_dropout.default,
    aten.alpha_dropout.default,
    aten.feature_alpha_dropout.default,
)
HEADS = {  # outputs made of logits
    aten.softmax.int: "softmax",
    aten.log_softmax.int: "log_softmax",
    aten.sigmoid.default: "sigmoid",
}

# Layers of torch.nn whose dropout depends on their training flag. Its other layers stay in eval mode, as
# does every layer that holds running statistics; layers written by users are armed, since any may call
# F.dropout(x, p, self.training).
_ARMED = (
    nn.modules.dropout._DropoutNd,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)


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
        """Which outputs are a softmax, log-softmax or sigmoid, and of which dimension."""
        outputs: Any = next(reversed(self.graph.nodes)).args[0]
        nodes: dict[int, Any] = {i: node for i, node in enumerate(outputs) if isinstance(node, fx.Node)}
        return {i: (HEADS[n.target], (*n.args, None)[1]) for i, n in nodes.items() if n.target in HEADS}

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


def trace(model: nn.Module, inputs: Any) -> Trace:
    """Trace the model with dropout armed and a dynamic batch dimension, leaving it as it was."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    args, kwargs = pytree.tree_map(mean_of, split_inputs(inputs), is_leaf=is_moments)
    signature = Signature.of(model, args, kwargs)
    leaves = _two_or_more(pytree.tree_leaves((args, kwargs)))
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        raise InputError("the example inputs contain no tensor")
    args, kwargs = pytree.tree_unflatten(leaves, signature.spec)
    made = _trace(model, args, kwargs, signature)
    batched = tuple(_has_symbolic_batch(node) for node in made.input_nodes)
    return dataclasses.replace(made, signature=dataclasses.replace(signature, batched=batched))


def _trace(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], signature: Signature) -> Trace:
    """Trace; and once more without arming modules that, armed, write to buffers of their own.

    Those are normalisation layers of the user's, keeping statistics while training. If nothing changes, or if
    dropout is lost with it, the first trace stands.
    """

    def attempt(disarm: frozenset[str]) -> tuple[Trace, frozenset[str]]:
        program, out_spec = _export(model, args, kwargs, disarm)
        graph, state, written = _normalize(program)
        constants = {name.removeprefix(_PREFIX): value for name, value in program.constants.items()}
        return Trace(graph, program.graph_module, state, constants, signature, out_spec), written

    def n_dropouts(made: Trace) -> int:
        return sum(node.target in DROPOUTS for node in made.graph.nodes)

    first, written = attempt(frozenset())
    if not written:
        return first
    second, still_written = attempt(frozenset(name.rpartition(".")[0] for name in written))
    return second if still_written < written and n_dropouts(second) == n_dropouts(first) else first


def place_of(node: fx.Node, reason: str = "") -> Place:
    """Operator, module path and source line of a node, for messages."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    frames = re.split(r'^\s*(?=File ")', str(node.meta.get("stack_trace") or ""), flags=re.MULTILINE)
    frames = [" ".join(frame.split()) for frame in frames if frame.strip()]
    own = [frame for frame in frames if _TORCH not in frame]  # the user's, where there is one
    source = (own or frames or ["(no source line recorded)"])[-1]
    module = stack[-1][0] if stack else ""
    return Place(str(node.target), module.removeprefix("model").removeprefix("."), source, reason)


@contextlib.contextmanager
def armed(model: nn.Module, disarm: frozenset[str] = frozenset()) -> Iterator[None]:
    """Dropout in training mode, everything that normalises in eval mode; restored afterwards."""
    modes = {module: module.training for module in model.modules()}
    try:
        for name, module in model.named_modules():
            module.training = name not in disarm and _is_armed(module)
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _is_armed(module: nn.Module) -> bool:
    statistics = "running_mean" in module._buffers or "running_var" in module._buffers
    if statistics or isinstance(module, nn.modules.batchnorm._NormBase):
        return False
    if type(module).__module__.startswith(("torch.nn.modules", "torch.nn.utils")):
        return isinstance(module, _ARMED)
    return True


def _two_or_more(leaves: list[Any]) -> list[Any]:
    """Batch sizes 0 and 1 are special to the tracer: use a batch of 2 so that it stays symbolic."""
    size = next((v.shape[0] for v in leaves if isinstance(v, Tensor) and v.dim()), 2)
    if size >= 2:
        return leaves
    return [
        v.new_zeros(2, *v.shape[1:]) if isinstance(v, Tensor) and v.dim() and v.shape[0] == size else v
        for v in leaves
    ]


class _Call(nn.Module):
    """The model as a module of two arguments (args, kwargs) that returns flat outputs."""

    def __init__(self, model: nn.Module, keep_spec: Callable[[pytree.TreeSpec], None]) -> None:
        super().__init__()
        self.model, self.keep_spec = model, keep_spec

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        leaves, spec = flatten_output(self.model(*args, **kwargs))
        self.keep_spec(spec)
        return leaves


_PREFIX = "model."  # what wrapping puts before every name


def _export(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], disarm: frozenset[str]
) -> tuple[ExportedProgram, pytree.TreeSpec]:
    leaves = pytree.tree_leaves((args, kwargs))
    batch = next(v.shape[0] for v in leaves if isinstance(v, Tensor) and v.dim())

    def dynamic(leaf: Any) -> Any:
        return {0: Dim.AUTO} if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == batch else None

    specs: list[pytree.TreeSpec] = []
    call = _Call(model, specs.append)
    try:
        with warnings.catch_warnings(), armed(model, disarm), torch.random.fork_rng(), torch.no_grad():
            warnings.simplefilter("ignore")
            program = torch.export.export(
                call, (args, kwargs), dynamic_shapes=pytree.tree_map(dynamic, (args, kwargs)), strict=False
            )
    except Exception as error:
        raise TraceError(_explain(model, error)) from error
    return program, specs[-1]


def _explain(model: nn.Module, error: Exception) -> str:
    """What torch.export said, and the place in the user's code it happened at."""
    frames = [
        f"\n  File {frame.filename!r}, line {frame.lineno}: {frame.line}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_TORCH) and frame.filename != __file__
    ]
    text = str(error).strip()
    if "data-dependent" in text or "data dependent" in text:
        advice = "Control flow on tensor values cannot be traced: use torch.where."
    else:
        advice = "Check that the model runs on the example inputs, and that torch.export accepts it."
    first = text.splitlines()[0] if text else type(error).__name__
    return f"{type(model).__name__} could not be traced: {first}{''.join(frames[-1:])}\n{advice}"


def _normalize(program: ExportedProgram) -> tuple[fx.Graph, tuple[str, ...], frozenset[str]]:
    """The functional graph without assertions, idle dropouts and unused state; names of state and of what
    of it the model writes to."""
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if _is_assertion(node.target):
            graph.erase_node(node)
        else:
            _spell_out(node)
    written = {node.name for node in functionalize(graph)}
    for node in list(graph.nodes):
        if node.target in DROPOUTS:
            _check_dropout(graph, node)
    graph.eliminate_dead_code()
    kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
    specs = program.graph_signature.input_specs
    targets = {s.arg.name: str(s.target).removeprefix(_PREFIX) for s in specs if s.kind in kinds}
    state = []
    for node in list(graph.nodes):
        if node.op == "placeholder" and node.name in targets:
            if node.users:
                state.append(targets[node.name])
            else:
                graph.erase_node(node)
    graph.lint()
    return graph, tuple(state), frozenset(targets[name] for name in written if name in targets)


_RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def _spell_out(node: fx.Node) -> None:
    """Arguments the schema allows by position are passed so: rules need to look in one place only."""
    if not isinstance(node.target, OpOverload):
        return
    if node.target in _RESHAPES:
        # the idiom x.view(x.size(0), -1) fails for an empty batch: say what -1 stands for, where it is known
        known = node.meta["val"].shape
        size = [
            known[d] if isinstance(s, int) and s == -1 and isinstance(known[d], int) else s
            for d, s in enumerate(node.args[1])  # type: ignore[arg-type]
        ]
        node.args = (node.args[0], size, *node.args[2:])
    args, kwargs = list(node.args), dict(node.kwargs)
    for argument in node.target._schema.arguments[len(args) :]:
        if argument.kwarg_only or not kwargs:
            break
        args.append(kwargs.pop(argument.name, argument.default_value))
    node.args, node.kwargs = tuple(args), kwargs


def _check_dropout(graph: fx.Graph, node: fx.Node) -> None:
    source, probability, train = node.args
    if not train or probability == 0:
        node.replace_all_uses_with(source)  # type: ignore[arg-type]
        graph.erase_node(node)
    elif not 0 < probability < 1:  # type: ignore[operator]
        raise DropProbabilityError(
            f"dropout with p = {probability} leaves nothing to propagate; use 0 <= p < 1\n  {place_of(node)}"
        )


def _is_assertion(target: Any) -> bool:
    return isinstance(target, OpOverload) and target._schema.name.startswith(
        ("aten::_assert", "aten::sym_constrain")
    )


def _tensor_inputs(node: fx.Node) -> bool:
    return any(isinstance(n.meta.get("val"), Tensor) for n in node.all_input_nodes)


def _has_symbolic_batch(node: fx.Node) -> bool:
    """Whether tracing left the first dimension open; a model may have fixed it (`x.view(4, 6)`)."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() == 0 or not isinstance(value.shape[0], torch.SymInt):
        return False
    return bool(value.shape[0].node.expr.free_symbols)
