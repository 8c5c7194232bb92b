"""Gives predictive distributions a length and an index over the batch, `cat`, `to` and `cpu`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class Batched:
    """A dataclass of tensors, or None, that all have their batch in one dimension."""

    batch_dim: ClassVar[int] = 0

    @property
    def batch_shape(self) -> torch.Size:
        raise NotImplementedError

    def __len__(self) -> int:
        """Count the inputs of the batch."""
        return self.batch_shape[0]

    def __bool__(self) -> bool:
        return True  # also an empty batch is not nothing

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor) -> Self:
        """Choose inputs of the batch. An integer gives a batch of one."""
        if isinstance(index, tuple) or index is None or index is ...:
            raise TypeError("an index chooses inputs of the batch; index .probs or .mean for more")
        if isinstance(index, int):
            if not -len(self) <= index < len(self):
                raise IndexError(f"index {index} is outside a batch of {len(self)}")
            index = slice(index % len(self), index % len(self) + 1)
        return self._changed(lambda tensor: tensor[(slice(None),) * self.batch_dim + (index,)])

    def __iter__(self) -> Iterator[Self]:
        return (self[i] for i in range(len(self)))

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Put batches one behind the other, as `torch.cat` does. What one of them does not know is lost."""
        columns = [[getattr(part, field.name) for part in parts] for field in fields(cls)]  # type: ignore[arg-type]
        return cls(
            *(
                None if any(v is None for v in column) else torch.cat(column, cls.batch_dim)
                for column in columns
            )
        )

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Every tensor `.to(...)`, as in PyTorch."""
        return self._changed(lambda tensor: tensor.to(*args, **kwargs))

    def cpu(self) -> Self:
        return self._changed(Tensor.cpu)

    def detach(self) -> Self:
        return self._changed(Tensor.detach)

    def _changed(self, change: Callable[[Tensor], Tensor]) -> Self:
        return pytree.tree_map_only(Tensor, change, self)
