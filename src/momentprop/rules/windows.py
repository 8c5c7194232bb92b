"""The windows of pooling operators: where they lie, and their elements one position at a time."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from momentprop.moments import Moments
from momentprop.rules.convolution import Geometry
from momentprop.rules.facts import neighbours_of
from momentprop.rules.families import per_dimension

aten = torch.ops.aten
Sizes = int | list[int]
Position = tuple[int, ...]  # in a window


def _output_size(size: int, kernel: int, stride: int, pad: int, dilation: int, ceil: bool) -> int:
    """Number of windows along one dimension, by PyTorch's convention."""
    reach = size + 2 * pad - dilation * (kernel - 1) - 1
    count = (reach + (stride - 1 if ceil else 0)) // stride + 1
    if ceil and (count - 1) * stride >= size + pad:  # the last window must start inside the input
        count -= 1
    return count


@dataclass
class Windows:
    """The elements of all pooling windows of a tensor, one position in the window at a time.

    Channels last, and written out: so each element of the windows is contiguous memory. Arithmetic on
    strided memory, eager or compiled, does not vectorise and costs several times as much as the copies.
    (The dimension in front keeps compilers from taking four dimensions for channels first and transposing
    them.)
    """

    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    counts: list[Any]  # of windows, along each dimension
    beyond: list[Any]  # what the windows reach beyond the padded input on the right (ceil_mode)

    @staticmethod
    def of(
        sizes: Any, kernel_size: Sizes, stride: Any, padding: Sizes, dilation: Sizes, ceil: bool
    ) -> Windows:
        n = len(sizes)
        kernel = per_dimension(kernel_size, n)
        steps = per_dimension(stride, n) or kernel
        pads, spread = per_dimension(padding, n), per_dimension(dilation, n)
        counts = [_output_size(*w, ceil) for w in zip(sizes, kernel, steps, pads, spread, strict=True)]
        beyond = [
            max((c - 1) * s + d * (k - 1) + 1 - size - 2 * p, 0)
            for c, s, d, k, size, p in zip(counts, steps, spread, kernel, sizes, pads, strict=True)
        ]
        return Windows(kernel, steps, pads, spread, counts, beyond)

    @property
    def geometry(self) -> Geometry:
        """Return the geometry of a convolution with these windows."""
        pads = [(p, p + b) for p, b in zip(self.padding, self.beyond, strict=True)]
        return Geometry(self.stride, pads, self.dilation, 1)

    @property
    def positions(self) -> list[Position]:
        """List the positions in a window, row by row."""
        return list(product(*map(range, self.kernel)))

    @property
    def inside(self) -> bool:
        """Say whether no window reaches beyond the input."""
        return not any(self.padding) and not any(self.beyond)

    @property
    def tile(self) -> bool:
        """Say whether every element of the input lies in at most one window, and windows inside the input."""
        return self.inside and self.kernel == self.stride and all(d == 1 for d in self.dilation)

    def open(self, *values: Tensor, fill: tuple[float, ...]) -> Tensor:
        """Tensors stacked, padded with their fill values, channels last."""
        n = len(self.kernel)
        border = [w for p, b in zip(self.padding[::-1], self.beyond[::-1], strict=True) for w in (p, p + b)]
        if any(border):
            values = tuple(F.pad(v, border, value=f) for v, f in zip(values, fill, strict=True))
        return torch.stack([v.movedim(-1 - n, -1)[None] for v in values])

    def view(self, value: Tensor) -> Tensor:
        """A tensor channels last, without padding and not written out."""
        return value.movedim(-1 - len(self.kernel), -1)[None]

    def element(self, opened: Tensor, position: Position) -> Tensor:
        """One element of every window."""
        n = len(position)
        for d, (start, step, count) in enumerate(zip(position, self.stride, self.counts, strict=True)):
            first = start * self.dilation[d]
            opened = aten.slice.Tensor(opened, d - n - 1, first, first + (count - 1) * step + 1, step)
        return opened

    def close(self, values: Tensor) -> Tensor:
        """Back from channels last."""
        return values.movedim(-1, -1 - len(self.kernel))[0]

    def tiled(self, values: list[Tensor]) -> Tensor:
        """One value per position in the window, side by side: [..., count, kernel, ..., channels]."""
        n = len(self.kernel)
        for d in reversed(range(n)):
            size = self.kernel[d]
            groups = [values[i : i + size] for i in range(0, len(values), size)]
            values = [torch.stack(group, 2 * (d - n)) for group in groups]
        return values[0][0]

    def covariance(self, x: Moments, first: Position, second: Position) -> Tensor | None:
        """Return the covariance of two elements of every window, where x tells; None stands for zero."""
        neighbours, n = neighbours_of(x), len(self.kernel)
        if neighbours is None:
            return None
        if any(self.padding) or any(self.beyond):
            return None  # windows hang over the border
        start = [d * a for d, a in zip(self.dilation, first, strict=True)]
        shift = [d * (b - a) for d, a, b in zip(self.dilation, first, second, strict=True)]
        told = neighbours(start, self.stride, self.counts, shift)
        return None if told is None else told.movedim(-1 - n, -1)[None]
