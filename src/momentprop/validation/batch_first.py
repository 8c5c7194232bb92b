"""Lets a validation call every network with inputs in order, whose first dimension is the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from momentprop.errors import InputError
from momentprop.predict.batches import call

BatchDim = int | Sequence[int]  # of all inputs, or of each


class BatchFirst(nn.Module):
    """Takes inputs in order, the batch first, for a network that wants names or has its batch elsewhere."""

    def __init__(self, network: nn.Module, batch_dim: BatchDim, names: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.network, self.batch_dim, self.names = network, batch_dim, names

    def forward(self, *inputs: Tensor) -> Any:
        return call(self.network, tuple(moved(inputs, self.batch_dim, back=True)), self.names)

    @staticmethod
    def own_name(module: str) -> str:
        """Return the name that a module has without the wrapper around it."""
        return module.removeprefix("network").removeprefix(".")


def moved(inputs: Sequence[Tensor], batch_dim: BatchDim, back: bool = False) -> list[Tensor]:
    """The inputs with the batch in front, or back at its place."""
    dims: list[Any] = list(batch_dim) if isinstance(batch_dim, (tuple, list)) else [batch_dim] * len(inputs)
    if len(dims) != len(inputs) or not all(map(_has, inputs, dims)):
        raise InputError(
            "validate compares samples of a batch, so batch_dim must be a dimension of the inputs, or one "
            f"for each of {len(inputs)} inputs, not {batch_dim}"
        )
    return [x.movedim(0, d) if back else x.movedim(d, 0) for x, d in zip(inputs, dims, strict=True)]


def _has(x: Tensor, dim: Any) -> bool:
    return isinstance(dim, int) and -x.dim() <= dim < x.dim()
