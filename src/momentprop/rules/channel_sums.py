"""Noise that a channel shares, behind a convolution: the sum over channels of (conv of this channel)^2.

The plain convolution adds channels up before anything can be squared. Two exact ways around:

- multiplied out, (sum_u w_u d_{p+u})^2 is for every offset e of two taps of the kernel a convolution of the
  products d_q d_{q+e} with the products w_u w_{u+e}; together (n + 1) / 2 times the plain one for n taps;
- channel by channel, squared and added: as many products as the plain one, but all of them written out.

Measured on 64 channels, in units of the plain convolution: 8 and 18 for a 3x3 kernel, 20 and 5 for 5x5.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

_MOST_TAPS = 9  # up to which multiplying out is faster
_BLOCKS = 16  # of channels: memory is that of the output, times channels per block


def squares_of_channels(
    d: Tensor, weight: Tensor, stride: list[int], dilation: list[int], groups: int
) -> Tensor:
    """Square and add up the convolutions of single channels of d [batch, channels, *size], already padded."""
    convolve = (F.conv1d, F.conv2d, F.conv3d)[weight.dim() - 3]
    few = weight[0, 0].numel() <= _MOST_TAPS and weight.shape[1] > 1
    return (_by_offset if few else _by_channel)(convolve, d, weight, stride, dilation, groups)


def _by_offset(
    convolve: Callable[..., Tensor],
    d: Tensor,
    weight: Tensor,
    stride: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    kernel = list(weight.shape[2:])
    total = None
    for offset in itertools.product(*[range(1 - k, k) for k in kernel]):
        if offset < (0,) * len(kernel):
            continue  # as its opposite
        one, other, here, there = d, d, weight, weight
        for i, e in enumerate(offset):
            first, second = max(-e, 0), max(e, 0)
            size, reach = kernel[i] - abs(e), d.shape[2 + i] - dilation[i] * abs(e)
            here, there = here.narrow(2 + i, first, size), there.narrow(2 + i, second, size)
            one = one.narrow(2 + i, dilation[i] * first, reach)
            other = other.narrow(2 + i, dilation[i] * second, reach)
        taps = 2 * here * there if any(offset) else here * there
        part = convolve(one * other, taps, None, stride, 0, dilation, groups)
        total = part if total is None else total + part
    assert total is not None
    return total.clamp_min(0)  # a sum of squares, but for rounding


def _by_channel(
    convolve: Callable[..., Tensor],
    d: Tensor,
    weight: Tensor,
    stride: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    channels = weight.shape[1]  # per group
    images = d.unflatten(1, (groups, channels))
    kernels = weight.unflatten(0, (groups, -1)).transpose(1, 2)  # [groups, in, out, *kernel]
    total = None
    step = -(-channels // _BLOCKS)
    for first in range(0, channels, step):
        count = min(step, channels - first)
        block = images.narrow(2, first, count).flatten(1, 2)
        taps = kernels.narrow(1, first, count).flatten(0, 2).unsqueeze(1)
        out = convolve(block, taps, None, stride, 0, dilation, groups * count)
        part = out.unflatten(1, (groups, count, -1)).square().sum(2).flatten(1, 2)
        total = part if total is None else total + part
    assert total is not None
    return total
