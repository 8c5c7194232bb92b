"""Plain PyTorch: transformers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from catalogue import Built, network


class EncoderClassifier(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(32, 3)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        hidden = self.encoder(self.first(x), src_key_padding_mask=padding)
        return self.last(hidden[:, 0])


@network
def encoder_post_norm() -> Built:
    return EncoderClassifier(), torch.randn(3, 10, 8)


@network
def encoder_pre_norm_gelu() -> Built:
    return EncoderClassifier(norm_first=True, activation="gelu"), torch.randn(3, 10, 8)


@network
def encoder_padding_mask() -> Built:
    padding = torch.arange(10)[None] >= torch.tensor([10, 7, 4])[:, None]
    return EncoderClassifier(norm_first=True), ((torch.randn(3, 10, 8),), {"padding": padding})


class Translator(nn.Module):
    """`hint`: says that the mask is causal; without it, nn.Transformer looks at the mask's values."""

    def __init__(self, hint: bool | None) -> None:
        super().__init__()
        self.words, self.hint = nn.Embedding(40, 32), hint
        self.transformer = nn.Transformer(32, 4, 2, 2, 64, 0.1, batch_first=True)
        self.last = nn.Linear(32, 5)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        words = self.words(source), self.words(target)
        return self.last(self.transformer(*words, tgt_mask=mask, tgt_is_causal=self.hint))


@network
def transformer_seq2seq() -> Built:
    return Translator(None), (torch.randint(0, 40, (3, 8)), torch.randint(0, 40, (3, 6)))


@network
def transformer_seq2seq_causal() -> Built:
    return Translator(True), (torch.randint(0, 40, (3, 8)), torch.randint(0, 40, (3, 6)))


class CrossAttention(nn.Module):
    """Few learned queries attend to a random sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(2, 32))
        self.first, self.dropout = nn.Linear(8, 32), nn.Dropout(0.1)
        self.attention = nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True)
        self.last = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(torch.relu(self.first(x)))
        found, _ = self.attention(self.queries.expand(x.shape[0], -1, -1), hidden, hidden, need_weights=False)
        return self.last(found)


@network
def cross_attention() -> Built:
    return CrossAttention(), torch.randn(3, 10, 8)


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class GatedBlock(nn.Module):
    """Pre-norm attention and SwiGLU, as in present language models."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RMSNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down, self.dropout = nn.Linear(2 * width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, n, 3, 4, c // 4).permute(2, 0, 3, 1, 4).unbind(0)
        p = 0.1 if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(b, n, c)))
        y = self.norms[1](x)
        return x + self.dropout(self.down(F.silu(self.gate(y)) * self.up(y)))


class GatedTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(50, 32), nn.Linear(32, 3)
        self.blocks = nn.Sequential(GatedBlock(32), GatedBlock(32))

    def forward(self, words: Tensor) -> Tensor:
        return self.last(self.blocks(self.words(words)).mean(1))


@network
def swiglu_rms_transformer() -> Built:
    return GatedTransformer(), torch.randint(0, 50, (3, 10))


class PatchTransformer(nn.Module):
    """A vision transformer whose attention is spelled with matmul, softmax and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 32, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, 32))
        self.position = nn.Parameter(torch.randn(1, 17, 32) * 0.2)
        self.layers = nn.ModuleList(nn.ModuleDict(self._layer(32)) for _ in range(2))
        self.norm, self.last, self.dropout = nn.LayerNorm(32), nn.Linear(32, 5), nn.Dropout(0.1)

    def _layer(self, width: int) -> dict[str, nn.Module]:
        mlp = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, width))
        norms = {"norm1": nn.LayerNorm(width), "norm2": nn.LayerNorm(width)}
        return norms | {"qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width), "mlp": mlp}

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        x = self.dropout(x)
        b, n, c = x.shape
        for layer in self.layers:
            qkv = layer["qkv"](layer["norm1"](x)).reshape(b, n, 3, 4, c // 4).permute(2, 0, 3, 1, 4)
            q, k, v = qkv[0], qkv[1], qkv[2]
            weights = self.dropout((q @ k.transpose(-2, -1) / (c // 4) ** 0.5).softmax(-1))
            x = x + self.dropout(layer["out"]((weights @ v).transpose(1, 2).reshape(b, n, c)))
            x = x + self.dropout(layer["mlp"](layer["norm2"](x)))
        return self.last(self.norm(x)[:, 0])


@network
def patch_transformer() -> Built:
    return PatchTransformer(), torch.randn(3, 1, 16, 16)
