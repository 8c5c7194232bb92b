"""Parts of random networks beyond those of networks.py: what real dropout models are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from networks import Apply, Draw, Shape, probabilities

Function = Callable[..., Tensor]

# Powers and exponentials of bounded values: a chain of them would leave float32 for good. The bounds of
# exponentials are narrow, because what is clamped counts as Gaussian: its exponential has a long tail.
ACTIVATIONS: dict[str, Function] = {
    "relu": F.relu,
    "leaky relu": lambda x: F.leaky_relu(x, 0.1),
    "elu": F.elu,
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 0.7),
    "gelu": F.gelu,
    "tanh-gelu": lambda x: F.gelu(x, approximate="tanh"),
    "tanh-gelu by hand": lambda x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.045 * x.clamp(-9, 9) ** 3))),
    "silu": F.silu,
    "swish by hand": lambda x: x * torch.sigmoid(x),
    "mish": F.mish,
    "mish by hand": lambda x: x * F.softplus(x).tanh(),
    "softplus": F.softplus,
    "log_sigmoid": F.logsigmoid,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": F.hardtanh,
    "relu6": F.relu6,
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "softshrink": F.softshrink,
    "hardshrink": lambda x: F.hardshrink(x, 0.3),  # a jump, where no other function has a value of its own
    "threshold": lambda x: F.threshold(x, 0.2, -0.5),
    "clamp": lambda x: x.clamp(-1, 2),
    "clamp from below": lambda x: x.clamp(min=0.1),
    "abs": torch.abs,
    "sin": torch.sin,
    "cos": torch.cos,
    "erf": torch.erf,
    "atan": torch.atan,
    "exp": lambda x: x.clamp(-2, 2).exp(),
    "expm1": lambda x: x.clamp(-2, 2).expm1(),
    "square": lambda x: x.clamp(-9, 9).square(),
    "cube": lambda x: x.clamp(-3, 3) ** 3,
    "root": lambda x: (x.clamp(-9, 9).square() + 1).sqrt(),
    "reciprocal root": lambda x: (x.abs() + 0.5).rsqrt(),
    "power": lambda x: (x.abs() + 0.5) ** 0.75,
    "log": lambda x: (x.abs() + 0.5).log(),
    "log1p": lambda x: x.abs().log1p(),
    "reciprocal": lambda x: 1 / (1 + x.abs()),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "relu by mask": lambda x: x * (x > 0),
}

REDUCTIONS: dict[str, Function] = {
    "mean": lambda x, d: x.mean(d, keepdim=True),
    "sum": lambda x, d: x.sum(d, keepdim=True),
    "var": lambda x, d: x.clamp(-9, 9).var(d, keepdim=True, unbiased=False),
    "std": lambda x, d: (x.var(d, keepdim=True, unbiased=False) + 0.1).sqrt(),
    "max": lambda x, d: x.max(d, keepdim=True).values,
    "min": lambda x, d: x.min(d, keepdim=True).values,
    "amax": lambda x, d: x.amax(d, keepdim=True),
    "logsumexp": lambda x, d: x.logsumexp(d, keepdim=True),
    "norm": lambda x, d: (x + 2).norm(dim=d, keepdim=True),
    "softmax": lambda x, d: x.softmax(d),
    "log_softmax": lambda x, d: x.log_softmax(d),
    "normalize": lambda x, d: F.normalize(x + 0.5, dim=d, eps=0.1),
    "layer norm by hand": lambda x, d: (
        (x - x.mean(d, True)) / (x.var(d, keepdim=True, unbiased=False) + 0.1).sqrt()
    ),
    "rms norm by hand": lambda x, d: x * torch.rsqrt(x.pow(2).mean(d, keepdim=True) + 0.1),
    "cumsum": lambda x, d: x.cumsum(d),
    "gather": lambda x, d: x.gather(d, torch.zeros(x.shape, dtype=torch.int64)),
    "index_select": lambda x, d: x.index_select(d, torch.tensor([x.shape[d] - 1, 0, 0])),
    "split": lambda x, d: torch.cat(x.tensor_split(2, d)[::-1], d),
    "unbind": lambda x, d: torch.stack(x.unbind(d)[::-1], d),
    "roll": lambda x, d: x - x.roll(1, d),
    "embedding": lambda x, d: (
        x + torch.arange(x.shape[d]).reshape([-1 if i == d else 1 for i in range(x.dim())])
    ),
}

IMAGES: dict[str, Function] = {  # of [batch, channels, height, width]
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "bilinear to a size": lambda x: F.interpolate(x, size=(3, 5), mode="bilinear", align_corners=True),
    "bicubic": lambda x: F.interpolate(x, size=(4, 3), mode="bicubic"),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "area": lambda x: F.interpolate(x, size=(2, 2), mode="area"),
    "unpooling": lambda x: F.max_unpool2d(
        *F.max_pool2d(x, 2, return_indices=True), 2, output_size=x.shape[-2:]
    ),
    "pooling with indices": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    "adaptive maxima": lambda x: F.adaptive_max_pool2d(x, 1),
    "pixel unshuffle": lambda x: F.pixel_unshuffle(F.interpolate(x, size=(4, 4)), 2),
    "squeeze and excitation": lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(),
    "response norm": lambda x: F.local_response_norm(x, 3),
    "space to tokens": lambda x: x.flatten(2).transpose(1, 2),
    "unfold": lambda x: F.unfold(x, 2),
    "reflect": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
}


class Noise(nn.Module):
    """Noise as people write it by hand: in training mode, unless p is 0."""

    def __init__(self, kind: str, p: float) -> None:
        super().__init__()
        self.kind, self.p = kind, p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        keep, one_each = 1 - self.p, (x.shape[0],) + (1,) * (x.dim() - 1)
        match self.kind:
            case "drop path":
                return x * x.new_empty(one_each).bernoulli_(keep).div_(keep)
            case "drop path by floor":
                mask = keep + torch.rand(one_each, dtype=x.dtype, device=x.device)
                return x.div(keep) * mask.floor_()
            case "locked":
                return x * x.new_empty(*x.shape[:-1], 1).bernoulli_(keep).div_(keep)
            case "gaussian":
                return x * (1 + self.p * torch.randn_like(x))
            case "added":
                return x + self.p * torch.randn_like(x)
            case _:
                return F.dropout(x, self.p, inplace=False)

    def extra_repr(self) -> str:
        return f"{self.kind}, {self.p}"


class DropConnect(nn.Linear):
    """A dense layer that drops weights."""

    def __init__(self, n: int, m: int, p: float) -> None:
        super().__init__(n, m)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, F.dropout(self.weight, self.p, self.training), self.bias)


class Gated(nn.Module):
    """SwiGLU, GEGLU and the like: a(W x) * (V x), as two layers or as halves of one."""

    def __init__(self, n: int, m: int, gate: str, halves: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(n, 2 * m)
        self.gate, self.halves = gate, halves

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.gate == "glu":
            return F.glu(y, -1)
        a, b = y.chunk(2, -1) if self.halves else (y[..., ::2], y[..., 1::2])
        return ACTIVATIONS[self.gate](a) * b

    def extra_repr(self) -> str:
        return self.gate


class Attention(nn.Module):
    """Self-attention over the second dimension: nn.MultiheadAttention, fused or written out."""

    def __init__(self, width: int, heads: int, p: float, kind: str, mask: str) -> None:
        super().__init__()
        self.into = nn.Linear(width, 4 * heads)
        self.attention = nn.MultiheadAttention(4 * heads, heads, p, batch_first=True)
        self.heads, self.p, self.kind, self.mask = heads, p, kind, mask

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        n = x.shape[1]
        causal = torch.ones(n, n, dtype=torch.bool).tril()
        if self.kind == "module":
            mask = ~causal if self.mask == "causal" else None
            padding = (torch.arange(n) > 1).expand(x.shape[0], -1) if self.mask == "padding" else None
            given = {"attn_mask": mask, "key_padding_mask": padding}
            return self.attention(x, x, x, need_weights=False, **given)[0]
        mask = {"causal": causal, "padding": (torch.arange(n) <= 1).expand(n, -1)}.get(self.mask)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (x, 0.5 * x + 0.1, x.tanh()))
        p = self.p if self.training else 0.0
        if self.kind == "fused":
            y = F.scaled_dot_product_attention(q, k, v, mask, p)
        else:
            scores = q @ k.mT / 2
            scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
            y = F.dropout(scores.softmax(-1), p, self.training) @ v
        return y.transpose(1, 2).flatten(2)

    def extra_repr(self) -> str:
        return f"p={self.p}, {self.kind}, {self.mask}"


class Recurrent(nn.Module):
    """A recurrent layer over the second dimension: all its outputs, or the last state."""

    def __init__(self, layer: nn.RNNBase, last: bool) -> None:
        super().__init__()
        self.layer, self.last = layer, last

    def forward(self, x: Tensor) -> Tensor:
        y, state = self.layer(x)
        if not self.last:
            return y
        state = state[0] if isinstance(state, tuple) else state
        return state.transpose(0, 1).flatten(1)


class Cell(nn.Module):
    """A loop over the second dimension with a cell, its state dropped at every step."""

    def __init__(self, n: int, m: int, p: float) -> None:
        super().__init__()
        self.cell, self.drop, self.m = nn.GRUCell(n, m), nn.Dropout(p), m

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], self.m)
        for t in range(x.shape[1]):
            h = self.drop(self.cell(x[:, t], h))
        return h


def noise(draw: Draw, shape: Shape) -> nn.Module:
    """A random kind of dropout for [batch, *shape]."""
    p = draw(probabilities)
    kinds = ["drop path", "drop path by floor", "locked", "gaussian", "added", "functional"]
    modules = [nn.Dropout, nn.AlphaDropout]
    if 2 <= len(shape) <= 4:
        modules += [[nn.Dropout1d, nn.Dropout2d, nn.Dropout3d][len(shape) - 2], nn.FeatureAlphaDropout]
    kind = draw(st.sampled_from([*kinds, *modules]))
    return Noise(kind, p) if isinstance(kind, str) else kind(p)


def _norm(draw: Draw, shape: Shape) -> nn.Module:
    channels, n = shape[0], len(shape) - 1
    kinds = ["layer", "rms", "group"] + (["instance"] if 1 <= n <= 3 and min(shape) > 1 else [])
    match draw(st.sampled_from(kinds)):
        case "layer":
            norm: nn.Module = nn.LayerNorm(shape[-draw(st.integers(1, len(shape))) :])
        case "rms":
            norm = nn.RMSNorm(shape[-1:], eps=1e-3)
        case "group":
            norm = nn.GroupNorm(
                draw(st.sampled_from([g for g in (1, 2, channels) if channels % g == 0])), channels
            )
        case _:
            norm = [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d][n - 1](channels, affine=True)
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, -1.5, 1.5)
    return norm


def _recurrent(draw: Draw, width: int, p: float) -> nn.Module:
    if draw(st.booleans()) and draw(st.booleans()):
        return Cell(width, 3, p)
    kind = draw(st.sampled_from([nn.LSTM, nn.GRU, nn.RNN]))
    options: dict[str, Any] = {"bidirectional": draw(st.booleans()), "batch_first": True}
    layer = kind(width, 3, 2, dropout=p, **options)
    return Recurrent(layer, draw(st.booleans()))


def _transposed(draw: Draw, shape: Shape) -> nn.Module:
    kernel, stride = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    return [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d][len(shape) - 2](
        shape[0], draw(st.integers(1, 3)), kernel, stride, padding=draw(st.integers(0, (kernel - 1) // 2))
    )


def block(draw: Draw, shape: Shape, calm: bool) -> nn.Module:
    """One random part that accepts [batch, *shape]; a calm one makes no noise."""
    n, width = len(shape) - 1, shape[-1]
    p = 0.0 if calm else draw(probabilities)
    kinds = ["activation", "activation", "reduction", "norm", "gated", "product", "prelu"]
    kinds += [] if calm else ["noise", "noise", "drop connect"]
    kinds += ["attention", "recurrent", "encoder", "tokens"] if n == 1 and shape[0] <= 6 else []
    kinds += ["transposed"] if 1 <= n <= 3 else []
    kinds += ["image", "image"] if n == 2 and min(shape[1:]) >= 2 else []
    match draw(st.sampled_from(kinds)):
        case "activation":
            name = draw(st.sampled_from(sorted(ACTIVATIONS)))
            return Apply(ACTIVATIONS[name], name)
        case "reduction":
            name, d = draw(st.sampled_from(sorted(REDUCTIONS))), draw(st.integers(1, n + 1))
            return Apply(lambda x: REDUCTIONS[name](x, d), f"{name} over {d}")
        case "norm":
            return _norm(draw, shape)
        case "gated":
            gate = draw(st.sampled_from(["glu", "silu", "gelu", "sigmoid", "tanh"]))
            return Gated(width, draw(st.integers(1, 6)), gate, draw(st.booleans()))
        case "product":
            name = draw(st.sampled_from(["flipped", "own mean", "bounded"]))
            function = {
                "flipped": lambda x: x * x.flip(1).tanh(),
                "own mean": lambda x: x * x.mean(1, keepdim=True).sigmoid(),
                "bounded": lambda x: x.tanh() * x,
            }[name]
            return Apply(function, f"product, {name}")
        case "prelu":
            return nn.PReLU(draw(st.sampled_from([1, shape[0]])))
        case "noise":
            return noise(draw, shape)
        case "drop connect":
            return DropConnect(width, draw(st.integers(1, 6)), p)
        case "attention":
            kind = draw(st.sampled_from(["module", "fused", "by hand"]))
            mask = draw(st.sampled_from(["none", "causal", "padding"]))
            return Attention(width, draw(st.integers(1, 2)), p, kind, mask)
        case "recurrent":
            return _recurrent(draw, width, p)
        case "encoder":
            options: dict[str, Any] = {"batch_first": True, "norm_first": draw(st.booleans())}
            activation = draw(st.sampled_from(["relu", "gelu"]))
            return nn.Sequential(
                nn.Linear(width, 4), nn.TransformerEncoderLayer(4, 2, 8, p, activation, **options)
            )
        case "tokens":
            return Apply(lambda x: x @ x.tanh().transpose(1, 2), "gram matrix")
        case "transposed":
            return _transposed(draw, shape)
        case _:
            name = draw(st.sampled_from(sorted(IMAGES)))
            return Apply(IMAGES[name], name)
