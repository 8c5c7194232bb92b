"""q k^T where both stem from one tensor: its mean is that of sampling, in every spelling."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import momentprop as mp
from momentprop.capture.trace import trace
from momentprop.convert import cover

D, HEADS, T = 16, 2, 5
SIZE = D // HEADS


def _heads(y):
    return y.unflatten(-1, (-1, SIZE)).transpose(1, 2)


def _plain(m, x):
    q, k = _heads(m.q(x)), _heads(m.k(x))
    return q @ k.transpose(-2, -1)


def _numbers(m, x):
    q, k = _heads(m.q(x)) / 3, _heads(m.k(x)) * 0.5
    return q @ k.transpose(-2, -1)


def _one_head(m, x):
    return (m.q(x) @ m.k(x).mT)[:, None]


def _packed(m, x):
    q, k, _ = m.qkv(x).reshape(x.shape[0], T, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4).unbind(0)
    return q @ k.mT


def _packed_by_head(m, x):
    q, k, _ = m.qkv(x).reshape(x.shape[0], T, HEADS, 3 * SIZE).transpose(1, 2).chunk(3, -1)
    return q @ k.mT


def _addmm(m, x):
    packed = torch.addmm(m.qkv.bias, x.reshape(-1, D), m.qkv.weight.t()).view(x.shape[0], T, -1)
    q, k, _ = map(_heads, packed.split(D, -1))
    return q @ k.mT


def _sequence_first(m, x):
    q, k = (f(x.transpose(0, 1)).reshape(T, -1, SIZE).transpose(0, 1) for f in (m.q, m.k))
    return torch.bmm(q, k.transpose(1, 2)).unflatten(0, (-1, HEADS))


def _one_key_for_all(m, x):
    q, k = _heads(m.q(x)), m.k(x)[:, None, :, :SIZE].expand(-1, HEADS, -1, -1)
    return q @ k.mT


class Scores(nn.Module):
    def __init__(self, spelling):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.qkv = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 3 * D)
        self.spelling = spelling

    def forward(self, x):
        return self.spelling(self, F.dropout(x, 0.3, self.training))


SPELLINGS = [
    _plain,
    _numbers,
    _one_head,
    _packed,
    _packed_by_head,
    _addmm,
    _sequence_first,
    _one_key_for_all,
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_mean_is_that_of_sampling(spelling):
    """Elements of the input are dropped independently, so that the mean is exact; 0.5 std off without."""
    model, n = Scores(spelling), 20_000
    x = torch.randn(3, T, D)
    mc = mp.monte_carlo(model, x, n)
    for tier in ("paper", "fast", "accurate"):
        bnn = mp.convert(model, x, tier)
        out = bnn(x)
        assert ((out.mean - mc.mean).abs() < 5 * mc.std / n**0.5 + 1e-5).all()
        assert ((out.std / mc.std - 1).median().abs() < 0.05) or tier != "accurate"
        torch.testing.assert_close(bnn(x[:1]).mean, out.mean[:1])  # another size of the batch
    assert torch.allclose(bnn(mp.Moments(x, 0.0)).mean, out.mean, atol=1e-4)  # converted a second time


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_batch_stays_dynamic(spelling):
    """One trace serves all tiers, so that what one of them learns about sizes would bind the others."""
    traced = trace(Scores(spelling), torch.randn(3, T, D))
    cover(traced, "fast", (False,))
    (x,) = traced.input_nodes
    assert not isinstance(x.meta["val"].shape[0], int)
    assert not x.meta["val"].fake_mode.shape_env.replacements


def _other_rows(m, x):
    return m.q(x) @ m.k(x.flip(1)).mT


def _transposed(m, x):
    return m.q(x).mT @ m.k(x)


@pytest.mark.parametrize("spelling", [_other_rows, _transposed])
def test_other_products_stay_products_of_independent_factors(spelling):
    """What is not a row of the one with a row of the other of the same place is left alone."""
    x = torch.randn(3, T, D)
    bnn = mp.convert(Scores(spelling), x, "fast")
    assert not bnn._graph.graph.find_nodes(op="call_function", target=torch.ops.aten.diag_embed.default)
    bnn = mp.convert(Scores(_plain), x, "fast")
    assert bnn._graph.graph.find_nodes(op="call_function", target=torch.ops.aten.diag_embed.default)
