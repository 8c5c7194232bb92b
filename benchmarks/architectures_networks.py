"""Small networks of the usual kinds, as people write them, with dropout where each kind has it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from wide_resnet import Block


class VisionTransformer(nn.Module):
    """Patches of 2 x 2, a class token, three pre-norm layers; dropout 0.1, of attention weights too."""

    def __init__(self, width: int = 48, heads: int = 4, layers: int = 3, p: float = 0.1) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, 2)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.dropout = nn.Dropout(p)
        layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, p, F.gelu, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        return self.head(self.norm(self.layers(self.dropout(x)))[:, 0])


class Encoder(nn.Module):
    """As BERT: embeddings with a norm, post-norm layers, masked padding, a pooler with tanh; dropout 0.1."""

    def __init__(self, vocabulary: int, length: int, n_classes: int, width: int = 48, p: float = 0.1) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(p)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, p, F.gelu, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.pooler, self.head = nn.Linear(width, width), nn.Linear(width, n_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.positions.weight[: tokens.shape[1]]
        x = self.layers(self.dropout(self.norm(x)), src_key_padding_mask=tokens == 0)
        return self.head(self.dropout(torch.tanh(self.pooler(x[:, 0]))))


class WideResNet(nn.Module):
    """Two stages of two pre-activation blocks, batch norm, dropout 0.3 in every block."""

    def __init__(self, widths: tuple[int, ...] = (32, 64), p: float = 0.3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, 1, 1, bias=False)
        blocks, channels = [], 16
        for i, width in enumerate(widths):
            blocks += [Block(channels, width, 1 + (i > 0), p), Block(width, width, 1, p)]
            channels = width
        self.blocks = nn.Sequential(*blocks)
        self.norm, self.head = nn.BatchNorm2d(channels), nn.Linear(channels, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm(self.blocks(self.stem(images))))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class UNet(nn.Module):
    """Three levels with skip concatenation; dropout 0.2 in the bottleneck and the decoder."""

    def __init__(self, n_classes: int, bilinear: bool, width: int = 8, p: float = 0.2) -> None:
        super().__init__()
        self.down1, self.down2 = _twice(1, width), _twice(width, 2 * width)
        self.bottom = nn.Sequential(_twice(2 * width, 4 * width), nn.Dropout(p))
        self.up2, self.up1 = (_larger(c * width, c * width // 2, bilinear) for c in (4, 2))
        self.join2 = nn.Sequential(nn.Dropout(p), _twice(4 * width, 2 * width), nn.Dropout(p))
        self.join1 = _twice(2 * width, width)
        self.head = nn.Conv2d(width, n_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        fine = self.down1(images)
        coarse = self.down2(F.max_pool2d(fine, 2))
        x = self.bottom(F.max_pool2d(coarse, 2))
        x = self.join2(torch.cat([coarse, self.up2(x)], 1))
        return self.head(self.join1(torch.cat([fine, self.up1(x)], 1)))


def _twice(channels: int, width: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n in (channels, width):
        layers += [nn.Conv2d(n, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers)


def _larger(channels: int, width: int, bilinear: bool) -> nn.Module:
    if bilinear:
        larger = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        return nn.Sequential(larger, nn.Conv2d(channels, width, 1))
    return nn.ConvTranspose2d(channels, width, 2, 2)


class Tagger(nn.Module):
    """Two bidirectional recurrent layers, dropout on the embedding, between them, and before the head."""

    def __init__(self, kind: type[nn.RNNBase], vocabulary: int, n_tags: int, p: float = 0.2) -> None:
        super().__init__()
        self.words, self.dropout = nn.Embedding(vocabulary, 24), nn.Dropout(p)
        self.layers = kind(24, 32, 2, dropout=p, bidirectional=True, batch_first=True)  # type: ignore[call-arg]
        self.head = nn.Linear(64, n_tags)

    def forward(self, tokens: Tensor) -> Tensor:
        x, _ = self.layers(self.dropout(self.words(tokens)))
        return self.head(self.dropout(x))


class Decoder(nn.Module):
    """As Llama: causal attention, RMS norm, SwiGLU; with dropout 0.1 of attention weights and branches."""

    def __init__(self, vocabulary: int, length: int, n_classes: int, width: int = 48, p: float = 0.1) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.dropout = nn.Dropout(p)
        self.layers = nn.Sequential(*[DecoderLayer(width, p) for _ in range(2)])
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, n_classes, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.words(tokens) + self.position)
        return self.head(self.norm(self.layers(x))[:, -1])


class DecoderLayer(nn.Module):
    def __init__(self, width: int, p: float, heads: int = 4) -> None:
        super().__init__()
        self.norm1, self.norm2, self.p, self.heads = nn.RMSNorm(width), nn.RMSNorm(width), p, heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down, self.dropout = nn.Linear(2 * width, width, bias=False), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        p = self.p if self.training else 0.0
        h = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + self.dropout(self.out(h.transpose(1, 2).flatten(2)))
        h = self.norm2(x)
        return x + self.dropout(self.down(F.silu(self.gate(h)) * self.up(h)))


class ConvNeXt(nn.Module):
    """Two stages of two depthwise blocks with stochastic depth 0.1, and dropout 0.1 before the head."""

    def __init__(self, width: int = 32, p: float = 0.1) -> None:
        super().__init__()
        self.stem, self.smaller = nn.Conv2d(1, width, 2, 2), nn.Conv2d(width, 2 * width, 2, 2)
        self.stage1 = nn.Sequential(*[ConvNeXtBlock(width, p) for _ in range(2)])
        self.stage2 = nn.Sequential(*[ConvNeXtBlock(2 * width, p) for _ in range(2)])
        self.norm, self.dropout, self.head = nn.LayerNorm(2 * width), nn.Dropout(p), nn.Linear(2 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stage2(self.smaller(self.stage1(self.stem(images))))
        return self.head(self.dropout(self.norm(x.mean((-2, -1)))))


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, layer norm, two dense layers; the whole branch is kept or dropped."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 3, 1, 1, groups=width), nn.LayerNorm(width)
        self.dense1, self.dense2, self.p = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), p

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        h = self.dense2(F.gelu(self.dense1(h))).permute(0, 3, 1, 2)
        if self.training:
            h = h * h.new_empty(h.shape[0], 1, 1, 1).bernoulli_(1 - self.p).div_(1 - self.p)
        return x + h
