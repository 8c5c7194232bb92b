"""Flattens inputs and outputs of any structure and back, with clear errors when a call does not fit."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from momentprop.capture.batch import Batch, BatchDim
from momentprop.capture.records import PACKED, closed, is_record, opened
from momentprop.errors import InputError
from momentprop.moments import Moments, is_moments, mean_of, variance_of

_TARGETS = ("label", "labels", "target", "targets")  # in a batch that is a mapping
EXAMPLE_BATCH = 97  # of inputs to export with: no size of a layer, so that none is taken for the batch
Make = Callable[[Sequence[int]], Tensor]  # shape -> floating-point numbers


def split_inputs(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Turn a tensor, a tuple of positional inputs, a mapping of keywords, or both into (args, kwargs).

    A loader stands for the inputs of its first batch. Instances of dataclasses are opened.
    """
    if isinstance(example_inputs, DataLoader):
        example_inputs = _first_batch(example_inputs)
    if isinstance(example_inputs, (Tensor, Moments)) or is_record(example_inputs):
        return (opened(example_inputs),), {}
    if isinstance(example_inputs, Mapping):
        return (), opened(dict(example_inputs))
    if not isinstance(example_inputs, (tuple, list)):
        raise InputError(
            "inputs must be a tensor, a tuple of tensors, a mapping, a dataclass instance or (args, kwargs), "
            f"not {type(example_inputs).__name__}"
        )
    if (
        len(example_inputs) == 2
        and isinstance(example_inputs[0], (tuple, list))
        and isinstance(example_inputs[1], dict)
    ):
        return opened(tuple(example_inputs[0])), opened(dict(example_inputs[1]))
    return opened(tuple(example_inputs)), {}


def _first_batch(loader: DataLoader[Any]) -> Any:
    """The inputs of a loader's first batch: all but the last member of several, the target."""
    for batch in loader:
        if isinstance(batch, Mapping) and not is_record(batch):
            return {name: value for name, value in batch.items() if name not in _TARGETS}
        if isinstance(batch, (tuple, list)) and len(batch) > 1:
            inputs = tuple(batch[:-1])
            return inputs[0] if len(inputs) == 1 else inputs
        return batch
    raise InputError("the loader is empty: it gave no example inputs")


def check_kinds(model: nn.Module, leaves: Sequence[Any]) -> None:
    """Raise if example inputs are of another type, or on another device, than the model's weights."""
    weights = [p for p in model.parameters() if p.is_floating_point()]
    check_devices(weights, leaves)
    dtypes = {p.dtype for p in weights}
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and dtypes and leaf.dtype not in dtypes:
            (dtype, *_) = dtypes
            raise InputError(
                f"an example input is {leaf.dtype}, and the weights are {dtype}; give it as .to({dtype})"
            )


def check_devices(weights: Sequence[Tensor], leaves: Sequence[Any]) -> None:
    """Raise if an input is on another device than all the weights."""
    devices = {p.device for p in weights}
    for leaf in leaves:
        value = mean_of(leaf)
        if isinstance(value, Tensor) and value.dim() and devices and value.device not in devices:
            here = next(iter(devices))
            raise InputError(
                f"an input is on {value.device}, and the weights are on {here}; move it by .to({str(here)!r})"
            )


def _integers(value: Any) -> Tensor | None:
    is_one = isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex()
    return value.detach().to("cpu", copy=True) if is_one else None


@dataclass(frozen=True, eq=False)
class Signature:
    """Says how a traced model is called: the structure of its inputs, and an example of each."""

    n_args: int
    kwarg_names: tuple[str, ...]
    positional_names: tuple[str, ...]  # of the model's forward
    spec: pytree.TreeSpec
    examples: tuple[Any, ...]  # a tensor on the meta device, or the constant that was traced
    open: tuple[tuple[int, ...], ...]  # dimensions of any size
    batch: Batch
    integers: tuple[Tensor | None, ...] = ()  # the values of examples that are indices, tokens or masks

    @staticmethod
    def of(
        model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batch_dim: BatchDim = 0
    ) -> Signature:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if "PackedSequence" in str(spec):
            raise InputError(f"the inputs hold a PackedSequence. {PACKED}")
        parameters = inspect.signature(model.forward).parameters.values()
        return Signature(
            n_args=len(args),
            kwarg_names=tuple(kwargs),
            positional_names=tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD),
            spec=spec,
            examples=tuple(v.to("meta") if isinstance(v, Tensor) else v for v in leaves),
            open=tuple(() for _ in leaves),
            batch=Batch.of(batch_dim, args, kwargs),
            integers=tuple(_integers(v) for v in leaves),
        )

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The flat inputs of a call; Moments stay whole. Raises InputError if the call does not fit."""
        kwargs = dict(kwargs)
        for name in self.positional_names[len(args) : self.n_args]:
            if name in kwargs:  # traced by position, given by name
                args = (*args, kwargs.pop(name))
        names = self.positional_names[self.n_args : len(args)]
        if len(args) > self.n_args and len(names) == len(args) - self.n_args:
            kwargs.update(zip(names, args[self.n_args :], strict=True))  # traced by name, given by position
            args = args[: self.n_args]
        if len(args) != self.n_args or set(kwargs) != set(self.kwarg_names):
            raise InputError(
                f"expected {self.n_args} positional inputs and keywords {sorted(self.kwarg_names)}, "
                f"as in example_inputs; got {len(args)} and {sorted(kwargs)}"
            )
        ordered = {name: kwargs[name] for name in self.kwarg_names}
        args, ordered = opened((args, ordered))
        leaves, spec = pytree.tree_flatten((args, ordered), is_leaf=is_moments)
        if spec != self.spec:
            raise InputError(self._mismatch(args, ordered))
        if not torch.compiler.is_compiling():
            for i, (leaf, example) in enumerate(zip(leaves, self.examples, strict=True)):
                self._check(self._name(i), leaf, example, i)
        return leaves

    def tensors(
        self,
        uncertain: Sequence[bool],
        device: torch.device | str = "cpu",
        batch: int = EXAMPLE_BATCH,
        make: Make | None = None,
    ) -> list[Tensor]:
        """Flat tensors to call with: numbers from `make(shape)`; indices and masks as they were traced.

        Without `make` they are normal, from a generator of their own: the caller's random state stays.
        """
        make = make or _normal_numbers()
        found: list[Tensor] = []
        for i, example in enumerate(self.examples):
            if not isinstance(example, Tensor):
                continue
            dim, size = self.batch.dims[i], batch * self.batch.rows
            shape = [size if d == dim else int(n) for d, n in enumerate(example.shape)]
            rows = self.integers[i] if self.integers else None
            if rows is not None and dim is not None:
                rows = rows.index_select(dim, torch.arange(size, device=rows.device) % rows.shape[dim])
            found.append((make(shape) if rows is None else rows).to(device, example.dtype))
            if uncertain[i]:
                found.append(make(shape).abs().to(device, example.dtype))
        return found

    def dynamic(self, uncertain: Sequence[bool]) -> list[Any]:
        """The free dimensions of these tensors, as torch.export wants them."""
        free: list[Any] = []
        size = Dim.DYNAMIC if self.batch.rows == 1 else self.batch.rows * Dim("batch")
        for example, dim, random in zip(self.examples, self.batch.dims, uncertain, strict=True):
            if isinstance(example, Tensor):
                free += [None if dim is None else {dim: size}] * (2 if random else 1)
        return free

    def split(self, leaves: Sequence[Any], uncertain: Sequence[bool]) -> list[Tensor]:
        """The flat tensors of a call: an uncertain input is two, mean and variance."""
        tensors: list[Tensor] = []
        for leaf, random in zip(leaves, uncertain, strict=True):
            if isinstance(leaf, (Tensor, Moments)):
                tensors.append(mean_of(leaf))
                if random:
                    tensors.append(variance_of(leaf))
        return tensors

    def joined(self, tensors: Sequence[Tensor], uncertain: Sequence[bool]) -> list[Any]:
        """The inverse of `split`, with the constants that were traced."""
        rest = list(tensors)[::-1]
        leaves: list[Any] = []
        for example, random in zip(self.examples, uncertain, strict=True):
            value: Any = rest.pop() if isinstance(example, Tensor) else example
            leaves.append(Moments(value, rest.pop()) if random else value)
        return leaves

    def moved(self, probe: Callable[[torch.dtype], Tensor]) -> Signature:
        """The signature after the module moved: `probe(dtype)` is an empty tensor that moved along."""
        examples = tuple(e.to(probe(e.dtype).dtype) if isinstance(e, Tensor) else e for e in self.examples)
        return dataclasses.replace(self, examples=examples)

    def _mismatch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Says which input has another structure than the one that was traced."""
        traced = pytree.tree_unflatten(self.examples, self.spec)
        for name, value, example in (
            *((f"inputs[{i}]", a, b) for i, (a, b) in enumerate(zip(args, traced[0], strict=True))),
            *((f"inputs[{k!r}]", kwargs[k], traced[1][k]) for k in kwargs),
        ):
            spec = pytree.tree_structure(example)
            if pytree.tree_structure(value, is_leaf=is_moments) != spec:
                expected = "a tensor" if spec.is_leaf() else f"structured like {closed(example)}"
                return f"{name} must be {expected}, not {type(value).__name__}"
        return "the inputs have another structure than the example inputs"

    def _name(self, index: int) -> str:
        path, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(self.examples, self.spec))[0][index]
        return "inputs" + pytree.keystr(path[1:])

    def _shape(self, index: int) -> list[str]:
        """The shape that an input must have, as text."""
        sizes = [str(n) for n in self.examples[index].shape]
        free = "any" if self.batch.whole else "batch" if self.batch.rows == 1 else f"{self.batch.rows}*batch"
        for d in self.open[index]:
            sizes[d] = free
        return sizes

    def _check(self, name: str, leaf: Any, example: Any, index: int) -> None:
        value = mean_of(leaf)
        if not isinstance(example, Tensor):
            if type(value) is not type(example) or value != example:
                now = "a tensor" if isinstance(value, Tensor) else repr(value)
                raise InputError(f"{name} was {example!r} when traced and cannot be {now} now")
            return
        if not isinstance(value, Tensor):
            raise InputError(f"{name} must be a tensor, not {type(value).__name__}")
        if value.dtype != example.dtype:
            raise InputError(
                f"{name} must be {example.dtype}, not {value.dtype}; convert it with .to({example.dtype}) "
                "or the network with bnn.to(...)"
            )
        fits = value.dim() == example.dim() and all(
            size % self.batch.rows == 0 if d in self.open[index] else size == example.shape[d]
            for d, size in enumerate(value.shape)
        )
        if not fits:
            expected = ", ".join(self._shape(index))
            raise InputError(f"{name} must have shape [{expected}], not {list(value.shape)}")
        if isinstance(leaf, Moments):
            if not value.is_floating_point():
                raise InputError(f"{name} has dtype {value.dtype} and cannot be uncertain")
            if leaf.variance.dtype != value.dtype:
                raise InputError(
                    f"{name} has a mean of {value.dtype} but a variance of {leaf.variance.dtype}"
                )
            if value.device.type != "meta" and bool((leaf.variance < 0).any()):
                raise InputError(f"{name} has negative variance")


def _normal_numbers() -> Make:
    generator = torch.Generator("cpu").manual_seed(0)
    return lambda shape: torch.randn(*shape, generator=generator, device="cpu")
