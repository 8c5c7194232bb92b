"""Chooses which outputs get a covariance: all, the largest by mean, or those at given indices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from momentprop.engine.layouts import Layout
from momentprop.moments import Moments


@dataclass(frozen=True)
class Selection:
    """`largest` outputs by mean, sample by sample, or those at `indices`; both None: all outputs."""

    largest: int | None = None
    indices: tuple[int, ...] | None = None

    @property
    def takes_all(self) -> bool:
        return self.largest is None and self.indices is None

    @staticmethod
    def parse(outputs: int | Sequence[int] | None) -> Selection:
        if outputs is None:
            return Selection()
        if isinstance(outputs, int):
            if outputs < 1:
                raise ValueError(f"outputs must be at least 1, not {outputs}")
            return Selection(largest=outputs)
        indices = tuple(int(i) for i in outputs)
        if not indices or len(set(indices)) != len(indices) or min(indices) < 0:
            raise ValueError(f"outputs must be a number, or different indices >= 0, not {outputs!r}")
        return Selection(indices=indices)

    def count(self, size: int) -> int:
        """Count how many of so many outputs are chosen."""
        if self.largest is not None:
            return min(self.largest, size)
        if self.indices is None:
            return size
        if max(self.indices) >= size:
            raise ValueError(f"outputs={list(self.indices)}: the model has {size} outputs per sample")
        return len(self.indices)

    def of(self, out: Moments, layout: Layout) -> tuple[Tensor, Tensor | None]:
        """Cotangents that pick the chosen outputs, [K, *shape], and their indices [batch, K]."""
        size, batch = layout.size, layout.batch_of(out.mean)
        count = self.count(size)
        every = torch.arange(size, device=out.device)
        if self.largest is not None and count < size:
            indices = layout.samples(out.mean).topk(count, dim=1).indices
        elif self.indices is not None:
            indices = torch.tensor(self.indices, device=out.device).expand(batch, count)
        else:
            unit = torch.eye(size, dtype=out.dtype, device=out.device)
            return layout.restored(unit[:, None, :].expand(size, batch, size), out.mean), None
        picked = (indices.T[:, :, None] == every).to(out.dtype)
        return layout.restored(picked, out.mean), indices


ALL_OUTPUTS = Selection()
