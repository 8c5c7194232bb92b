"""Describes how a network in a file is called and what it returns: named flat tensors and their structure."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from momentprop.capture.batch import Batch
from momentprop.capture.records import closed, is_record, opened
from momentprop.capture.signature import Signature
from momentprop.errors import ArchiveError
from momentprop.exports.outline import Outline, check_spec, outline, rebuild
from momentprop.moments import is_moments

BATCH = "batch"  # in place of a size that is free
_ROWS = 4  # kept of example inputs that are indices or masks


@dataclass(frozen=True)
class Port:
    """Describes a tensor that goes into a network or comes out of it."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    uncertain: bool = False  # an input given by mean and variance, which follows under `<name>_variance`
    rows: Any = None  # of an input of indices or masks: some that make sense, as nested lists

    @classmethod
    def of(cls, name: str, tensor: Tensor, dim: int | None, uncertain: bool, integers: Tensor | None) -> Self:
        shape = [BATCH if d == dim else int(n) for d, n in enumerate(tensor.shape)]
        rows = None
        if integers is not None:
            few = integers if dim is None else integers.narrow(dim, 0, min(_ROWS, integers.shape[dim]))
            rows = few.tolist()
        return cls(name, dtype_name(tensor.dtype), tuple(shape), uncertain, rows)

    @property
    def torch_dtype(self) -> torch.dtype:
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype):
            raise ArchiveError(
                f"the file gives {self.name} the type {self.dtype!r}, which torch does not know"
            )
        return found

    @property
    def batch_dim(self) -> int | None:
        """The dimension of any size; None if there is none."""
        return self.shape.index(BATCH) if BATCH in self.shape else None

    def sizes(self, batch: int = 1) -> list[int]:
        return [batch if n == BATCH else int(n) for n in self.shape]

    def integers(self, batch: int = _ROWS) -> Tensor | None:
        """Return example rows of indices or masks, as many as asked for; None for other inputs."""
        if self.rows is None:
            return None
        rows = torch.tensor(self.rows, dtype=self.torch_dtype)
        dim = self.batch_dim
        return rows if dim is None else rows.index_select(dim, torch.arange(batch) % rows.shape[dim])

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"shape": list(self.shape)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        return cls(
            data["name"], data["dtype"], tuple(data["shape"]), data.get("uncertain", False), data.get("rows")
        )


@dataclass(frozen=True)
class Call:
    """The structure of a call: positional inputs, keywords, and which leaf is which input."""

    inputs: tuple[Port, ...]
    tree: Outline  # of (args, kwargs), with {"input": i} as leaves
    positional: tuple[str, ...]  # names of the parameters of the model's forward

    @classmethod
    def of(cls, signature: Signature, uncertain: Sequence[bool]) -> Self:
        ports: list[Port] = []
        order = iter(range(len(signature.examples)))
        taken: list[str] = []

        def leaf(value: Any, path: tuple[str, ...]) -> Outline | None:
            if isinstance(value, (tuple, list, dict)) or is_record(value):
                return None
            i = next(order)
            if not isinstance(value, Tensor):
                return None
            name = unique([*taken, _input_name(path, signature.positional_names)])[-1]
            taken.extend([name, f"{name}_variance"] if uncertain[i] else [name])
            integers = signature.integers[i] if signature.integers else None
            ports.append(Port.of(name, value, signature.batch.dims[i], uncertain[i], integers))
            return {"input": len(ports) - 1}

        tree = outline(closed(pytree.tree_unflatten(signature.examples, signature.spec)), leaf)
        return cls(tuple(ports), tree, signature.positional_names)

    def signature(self) -> Signature:
        """Return the signature, which checks a call and flattens it."""

        def leaf(tree: Outline) -> Tensor:
            port = self.inputs[tree["input"]]
            return torch.empty(port.sizes(), dtype=port.torch_dtype, device="meta")

        args, kwargs = opened(rebuild(self.tree, leaf))
        leaves, spec = pytree.tree_flatten((args, kwargs))
        order = iter(self.inputs)
        ports = [next(order) if isinstance(v, Tensor) else None for v in leaves]
        dims = tuple(None if port is None else port.batch_dim for port in ports)
        free = tuple(() if d is None else (d,) for d in dims)
        integers = tuple(None if port is None else port.integers() for port in ports)
        return Signature(
            len(args), tuple(kwargs), self.positional, spec, tuple(leaves), free, Batch(dims), integers
        )

    @property
    def ports(self) -> list[Port]:
        """Return one port for every tensor."""
        found: list[Port] = []
        for port in self.inputs:
            found.append(Port(port.name, port.dtype, port.shape))
            if port.uncertain:
                found.append(Port(f"{port.name}_variance", port.dtype, port.shape))
        return found


def name_moments(output: Any, everything: bool) -> tuple[dict[str, Tensor], Outline]:
    """The tensors of all moments of an output under their names, and its structure.

    Those of one output are called as its fields: `mean`, `variance`, ...; those of several have the place of
    theirs before it. `everything`: also what is nested deeper, such as the logits behind a softmax.
    """
    several = not is_moments(output)
    named: dict[str, Tensor] = {}

    def add(name: str, value: Tensor) -> str:
        key = unique([*named, name])[-1]
        named[key] = value
        return key

    def leaf(value: Any, path: tuple[str, ...]) -> Outline | None:
        if isinstance(value, Tensor):  # integers
            return {"tensor": add(_output_name(path) or "output", value)}
        if not is_moments(value):
            return None
        entries, spec = pytree.tree_flatten_with_path(value)
        names: list[str | None] = []
        for place, part in entries:
            fields = [str(getattr(key, "name", key)) for key in place]
            kept = isinstance(part, Tensor) and (everything or len(place) == 1)
            names.append(add(_output_name([*path, *fields] if several else fields), part) if kept else None)
        return {"moments": names, "spec": pytree.treespec_dumps(spec)}

    tree = outline(output, leaf)
    return named, tree


def rebuild_moments(tree: Outline, tensors: dict[str, Tensor]) -> Any:
    """Rebuild what `name_moments` took apart."""

    def leaf(part: Outline) -> Any:
        if "tensor" in part:
            return tensors[part["tensor"]]
        values = [None if name is None else tensors[name] for name in part["moments"]]
        return pytree.tree_unflatten(values, _moments_spec(str(part["spec"])))

    return rebuild(tree, leaf)


@functools.lru_cache
def _moments_spec(text: str) -> pytree.TreeSpec:
    check_spec(text, ("momentprop.Moments", "momentprop.Logits", "momentprop.Jumps"))
    return pytree.treespec_loads(text)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def unique(names: Sequence[str]) -> list[str]:
    """Make equal names different by a number."""
    found: list[str] = []
    for name in names:
        count, candidate = 1, name
        while candidate in found:
            count += 1
            candidate = f"{name}_{count}"
        found.append(candidate)
    return found


def _input_name(path: tuple[str, ...], positional: tuple[str, ...]) -> str:
    """Name an input after the parameter of `forward` and its place inside: path is (0 or 1, which, ...)."""
    group, first, *rest = path
    if group == "0":
        first = positional[int(first)] if int(first) < len(positional) else f"input_{first}"
    return _clean("_".join([first, *rest]))


def _output_name(path: Sequence[str]) -> str:
    text = _clean("_".join(path))
    return f"output_{text}" if text[:1].isdigit() else text


def _clean(text: str) -> str:
    return re.sub(r"\W+", "_", text).strip("_")
