"""Attention in all its spellings: the same moments, and those of sampling."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import momentprop as mp

D, HEADS, T, S = 16, 2, 5, 6


class Attention(nn.Module):
    def __init__(self, fused, mask=None, causal=False, p=0.1, scale=None, cross=False, gqa=False):
        super().__init__()
        torch.manual_seed(0)
        width = D // HEADS if gqa else D
        self.q, self.k, self.v = nn.Linear(D, D), nn.Linear(D, width), nn.Linear(D, width)
        self.out = nn.Linear(T * D, 3)
        self.fused, self.mask, self.causal, self.p = fused, mask, causal, p
        self.scale, self.cross, self.gqa = scale, cross, gqa

    def forward(self, x, memory=None):
        x = F.dropout(x, self.p, self.training)
        y = F.dropout(memory, self.p, self.training) if self.cross else x
        q, k, v = (
            f(z).unflatten(-1, (-1, D // HEADS)).transpose(1, 2)
            for f, z in ((self.q, x), (self.k, y), (self.v, y))
        )
        p = self.p if self.training else 0.0
        if self.fused:
            given = {"attn_mask": self.mask, "dropout_p": p, "is_causal": self.causal, "scale": self.scale}
            z = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.gqa, **given)
        else:
            if self.gqa:
                k, v = (t.repeat_interleave(HEADS, 1) for t in (k, v))
            scores = q @ k.transpose(-2, -1) * (self.scale or 1 / math.sqrt(D // HEADS))
            mask = self.mask
            if self.causal:
                mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            if mask is not None and mask.dtype == torch.bool:
                scores = scores.masked_fill(~mask, -math.inf)
            elif mask is not None:
                scores = scores + mask
            z = F.dropout(scores.softmax(-1), p, self.training) @ v
        return self.out(z.transpose(1, 2).flatten(1))


KEYS = torch.tensor([True, True, False, True, True, False])
SETTINGS = {
    "plain": {},
    "no dropout of weights": {"p": 0.0},
    "causal": {"causal": True},
    "boolean mask": {"mask": KEYS[:T].expand(T, T)},
    "additive mask": {"mask": torch.randn(T, T)},
    "scale": {"scale": 0.7},
    "cross": {"cross": True, "mask": KEYS.expand(T, S)},
    "grouped queries": {"gqa": True},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_fused_and_written_out_give_the_same_moments(name):
    given = dict(SETTINGS[name])
    x = torch.randn(4, T, D)
    inputs = (x, torch.randn(4, S, D)) if given.get("cross") else x
    if given.get("p") == 0.0:
        inputs = mp.Moments(x, 0.1)
    call = (lambda b: b(*inputs)) if isinstance(inputs, tuple) else (lambda b: b(inputs))
    for tier in ("paper", "fast", "accurate"):
        outs = [call(mp.convert(Attention(fused, **given), inputs, tier)) for fused in (True, False)]
        torch.testing.assert_close(outs[0].mean, outs[1].mean)
        torch.testing.assert_close(outs[0].variance, outs[1].variance)
    mc = mp.monte_carlo(Attention(True, **given), inputs, 4000)
    assert ((outs[0].mean - mc.mean).abs() < 0.2 * mc.std).all()
    assert ((outs[0].std / mc.std - 1).abs() < 0.1).all()


class Multihead(nn.Module):
    def __init__(self, need_weights):
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(D, HEADS, 0.1, batch_first=True)
        self.out, self.need_weights = nn.Linear(T * D, 3), need_weights

    def forward(self, x, padding):
        y = self.attention(x, x, x, key_padding_mask=padding, need_weights=self.need_weights)[0]
        return self.out(F.dropout(y, 0.1, self.training).flatten(1))


def test_multihead_attention_with_padding():
    x = torch.randn(4, T, D)
    padding = torch.arange(T) >= torch.tensor([5, 4, 3, 2])[:, None]
    outs = [mp.convert(Multihead(w), (x, padding))(x, padding) for w in (True, False)]
    torch.testing.assert_close(outs[0].mean, outs[1].mean)
    torch.testing.assert_close(outs[0].covariance, outs[1].covariance)
    mc = mp.monte_carlo(Multihead(True), (x, padding), 4000)
    assert ((outs[0].std / mc.std - 1).abs() < 0.1).all()
    # padded keys have no influence
    changed = torch.where(padding[..., None], 7.0, x)
    moved = mp.convert(Multihead(True), (x, padding))(changed, padding)
    same = Multihead(True).eval()
    with torch.no_grad():
        assert torch.allclose(same(x, padding)[0], same(changed, padding)[0])
    torch.testing.assert_close(moved.mean[0], outs[0].mean[0])


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_transformer_encoder(norm_first, activation):
    """Dropout of attention weights, of both branches and inside the feed-forward part."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, activation, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.Sequential(encoder, nn.Flatten(), nn.Linear(32 * 8, 5)).eval()
    x = torch.randn(4, 8, 32)
    with torch.no_grad():
        out = mp.convert(model, x)(x)
    mc = mp.monte_carlo(model, x, 2000)
    ratio = out.std / mc.std
    assert 0.95 < ratio.median() < 1.05
    assert ((out.mean - mc.mean).abs() / mc.std).mean() < 0.1
