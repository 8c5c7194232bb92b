"""Chooses which outputs get a covariance: all, the largest by mean, or those at given indices.

Beside the largest a few more are swept, evenly spaced in the order of means. They probe by how much the
forward sweep's variances are wrong in a sample, and all variances that are not swept are multiplied by the
geometric mean of swept over forward variance. Measured std over MC dropout's, median [5..95 %], with the
eight largest and four probes: two convolutional networks with 360 and 384 classes 1.00 [.92..1.08] and
1.00 [.88..1.11], an embedding of 100 1.00 [.94..1.07], a transformer with 16 x 220 outputs 0.98 [.88..1.09].
Uncorrected medians are 0.85, 0.80, 0.85 and 0.76.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from momentprop.engine.layouts import Layout
from momentprop.moments import Moments

PROBES = 4
_MOST_OUTPUTS = 64  # per sample, up to which all are swept unless the user says otherwise
_LARGEST, _MOST_SCALED = 8, 2**14  # beyond: so many, and up to how many outputs that is done


@dataclass(frozen=True)
class Selection:
    """`largest` outputs by mean, sample by sample, or those at `indices`; both None: all outputs."""

    largest: int | None = None
    indices: tuple[int, ...] | None = None

    @property
    def takes_all(self) -> bool:
        return self.largest is None and self.indices is None

    def __str__(self) -> str:
        if self.largest is not None:
            scaled = f"other variances scaled by {PROBES} of them"
            return f"covariance of the {self.largest} largest outputs, {scaled}"
        return "covariance of " + ("all outputs" if self.indices is None else f"{len(self.indices)} outputs")

    @staticmethod
    def default(count: int) -> Selection | None:
        """What to sweep of so many outputs per sample; None where there are too many to sort."""
        if count <= _MOST_OUTPUTS:
            return ALL_OUTPUTS
        return Selection(largest=_LARGEST) if count <= _MOST_SCALED else None

    @staticmethod
    def parse(outputs: int | Sequence[int] | None) -> Selection:
        if outputs is None:
            return Selection()
        if isinstance(outputs, int):
            if outputs < 1:
                raise ValueError(f"outputs must be at least 1, not {outputs}")
            return Selection(largest=outputs)
        if isinstance(outputs, str):
            raise ValueError(f"outputs={outputs!r} is a name; give how many of the largest, or their indices")
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
        """Cotangents [K, *shape] that pick the chosen outputs, then the probes; and their indices."""
        size, batch = layout.size_in(out.mean), layout.batch_of(out.mean)
        count = self.count(size)
        every = torch.arange(size, device=out.device)
        if self.largest is not None and count < size:
            ranks = [*range(count), *_spaced(count, size)]
            indices = layout.samples(out.mean).topk(ranks[-1] + 1, dim=1).indices[:, ranks]
        elif self.indices is not None:
            indices = torch.tensor(self.indices, device=out.device).expand(batch, count)
        else:
            unit = torch.eye(size, dtype=out.dtype, device=out.device)
            return layout.restored(unit[:, None, :].expand(size, batch, size), out.mean), None
        picked = (indices.T[:, :, None] == every).to(out.dtype)
        return layout.restored(picked, out.mean), indices

    def corrected(self, forward: Tensor, swept: Tensor, indices: Tensor) -> Tensor:
        """Variances [batch, size] of all outputs, of which those [batch, K] at the indices were swept."""
        if self.largest is not None:
            before, after = forward.gather(1, indices)[:, self.largest :], swept[:, self.largest :]
            known = (before > 0) & (after > 0)
            logarithms = torch.where(known, after, 1.0).log() - torch.where(known, before, 1.0).log()
            factor = (logarithms.sum(1, keepdim=True) / known.sum(1, keepdim=True).clamp_min(1)).exp()
            forward = forward * factor
        return forward.scatter(1, indices, swept)


def _spaced(start: int, stop: int) -> list[int]:
    """Evenly spaced numbers in [start, stop), in the middle of as many equal parts."""
    count = min(PROBES, stop - start)
    return [start + (2 * i + 1) * (stop - start) // (2 * count) for i in range(count)]


ALL_OUTPUTS = Selection()
