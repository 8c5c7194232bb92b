"""A network out of a file: called like the converted one, with `Moments` in place of every output."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from momentprop.capture.signature import Signature
from momentprop.errors import ArchiveError, MomentpropError
from momentprop.exports.interface import rebuild_moments
from momentprop.exports.metadata import Metadata
from momentprop.graph import private
from momentprop.moments import is_moments


class PackagedProgram:
    """Machine code in a package, ready to run: flat tensors in and out.

    torch's C++ loader unpacks a file: a private one, of the content that was checked. `path` is for messages.
    """

    def __init__(self, path: str | os.PathLike[str], content: memoryview, metadata: Metadata) -> None:
        try:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, "package.pt2")
                file.write_bytes(content)
                self._loader = private.package_runner(str(file))
        except RuntimeError as error:
            raise ArchiveError(
                f"{path} was compiled with torch {metadata.torch} and cannot run on this machine with torch "
                f"{torch.__version__}: {error}"
            ) from error

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        return self._loader.boxed_run([t.contiguous() for t in tensors])


class LoadedNetwork(nn.Module):
    """A network that `load` read. `metadata` is what the file says about itself.

    It takes inputs of the type it was saved with. `.to(device)` moves it, unless it is a compiled package.
    """

    def __init__(self, program: ExportedProgram | PackagedProgram, metadata: Metadata) -> None:
        super().__init__()
        self.metadata = metadata
        self.signature: Signature = metadata.as_call().signature()
        order, examples = iter(metadata.inputs), self.signature.examples
        # which of the inputs, flattened, may be given as `Moments`
        self.uncertain = tuple(isinstance(e, Tensor) and next(order).uncertain for e in examples)
        self._exported = program if isinstance(program, ExportedProgram) else None
        self._packaged = program if isinstance(program, PackagedProgram) else None
        if self._exported is not None:
            self.program = self._exported.module(check_guards=False)
        self.training = False

    @property
    def fidelity(self) -> str:
        """The tier of rules in use."""
        return self.metadata.fidelity

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves = self.signature.flatten(args, kwargs)
        for leaf, uncertain in zip(leaves, self.uncertain, strict=True):
            if is_moments(leaf) and not uncertain:
                raise MomentpropError(
                    "this input was not uncertain when the network was saved; convert the model with Moments "
                    "in its place"
                )
        tensors = self.signature.split(leaves, self.uncertain)
        outputs = self.program(*tensors) if self._packaged is None else self._packaged(*tensors)
        named = {port.name: value for port, value in zip(self.metadata.outputs, outputs, strict=True)}
        return rebuild_moments(self.metadata.structure, named) if self.metadata.structure else named

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LoadedNetwork:
        """Move the graph too, which makes tensors of its own; types other than those traced are refused."""
        types = {port.torch_dtype for port in (*self.metadata.inputs, *self.metadata.outputs)}
        if self._exported is not None:
            held = (*self._exported.state_dict.values(), *self._exported.constants.values())
            types |= {tensor.dtype for tensor in held if isinstance(tensor, Tensor)}
        moved = torch.empty(0)
        for kept in sorted(types, key=str):
            moved = fn(torch.empty(0, dtype=kept))
            if moved.dtype != kept:
                raise MomentpropError(
                    "a saved network keeps its type; convert the model in the other one and save that"
                )
        if self._exported is None:
            if moved.device.type != torch.device(self.metadata.device).type:
                raise MomentpropError(
                    f"this package was compiled for {self.metadata.device} and cannot be moved"
                )
            return self
        from torch.export.passes import move_to_device_pass

        self._exported = move_to_device_pass(self._exported, str(moved.device))
        self.program = self._exported.module(check_guards=False)
        return self

    def train(self, mode: bool = True) -> LoadedNetwork:
        """Do nothing: there is one mode."""
        return self
