"""Brings the batch of inputs to the front, where a validation has it, and back for the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

BatchDim = int | Sequence[int]  # of all inputs, or of each


class BatchFirst(nn.Module):
    """Takes inputs whose first dimension is the batch, for a network that has it elsewhere."""

    def __init__(self, network: nn.Module, batch_dim: BatchDim) -> None:
        super().__init__()
        self.network, self.batch_dim = network, batch_dim

    def forward(self, *inputs: Tensor) -> Any:
        return self.network(*moved(inputs, self.batch_dim, back=True))


def moved(inputs: Sequence[Tensor], batch_dim: BatchDim, back: bool = False) -> list[Tensor]:
    """The inputs with the batch in front, or back at its place."""
    dims = [batch_dim] * len(inputs) if isinstance(batch_dim, int) else list(batch_dim)
    if len(dims) != len(inputs):
        raise ValueError(
            f"batch_dim must be a number, or one for each of {len(inputs)} inputs, not {batch_dim}"
        )
    return [x.movedim(0, d) if back else x.movedim(d, 0) for x, d in zip(inputs, dims, strict=True)]
