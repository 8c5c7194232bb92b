"""Stochastic depth: one Bernoulli variable per sample and block."""

import itertools

import pytest
import torch
from torch import nn

import momentprop as mp
from momentprop.network import inside


class DropPath(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x):
        if not self.training:
            return x
        keep = 1 - self.p
        mask = x.new_empty(x.shape[0], *[1] * (x.dim() - 1)).bernoulli_(keep)
        return x * mask.div_(keep)


class Block(nn.Module):
    def __init__(self, width: int, p: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(width, width),
        )
        self.path = DropPath(p)

    def forward(self, x):
        return x + self.path(self.body(x))


def network(n_blocks: int = 3, p: float = 0.2, dropout: float = 0.0, width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [Block(width, p, dropout) for _ in range(n_blocks)]
    model = nn.Sequential(*blocks, nn.LayerNorm(width), nn.Linear(width, 3)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.4)
    return model


def enumerated(model: nn.Sequential, x):
    """Mean and covariance over all combinations of paths."""
    blocks = [m for m in model if isinstance(m, Block)]
    values, weights = [], []
    for kept in itertools.product([0, 1], repeat=len(blocks)):
        y, weight = x, 1.0
        for block, keep in zip(blocks, kept, strict=True):
            p = block.path.p
            y = y + block.body(y) * keep / (1 - p)
            weight *= (1 - p) if keep else p
        values.append(model[len(blocks) :](y))
        weights.append(weight)
    values, weights = torch.stack(values), torch.tensor(weights)[:, None, None]
    mean = (weights * values).sum(0)
    deviation = values - mean
    return mean, torch.einsum("n,nbi,nbj->bij", weights[:, 0, 0], deviation, deviation)


def test_one_path_is_exact():
    model, x = network(1), torch.randn(4, 16)
    with torch.no_grad():
        mean, covariance = enumerated(model, x)
        out = mp.convert(model, x)(x)
    torch.testing.assert_close(out.mean, mean)
    torch.testing.assert_close(out.covariance, covariance)
    assert torch.equal(out.variance, out.covariance.diagonal(dim1=1, dim2=2))


def test_several_paths_up_to_interactions():
    model, x = network(3), torch.randn(16, 16)
    with torch.no_grad():
        mean, covariance = enumerated(model, x)
        std = covariance.diagonal(dim1=1, dim2=2).sqrt()
        out = mp.convert(model, x)(x)
        assert 0.9 < (out.std / std).median() < 1.1
        assert ((out.mean - mean) / std).abs().mean() < 0.15
        assert ((model(x) - mean) / std).abs().mean() > 0.15  # where the plain network is


@pytest.mark.parametrize("head", [nn.Identity(), nn.Softmax(-1), nn.LogSoftmax(-1)], ids=str)
def test_with_dropout_beside(head):
    model, x = nn.Sequential(network(2, dropout=0.1), head), torch.randn(8, 16)
    with torch.no_grad():
        out = mp.convert(model, x)(x)
    mc = mp.monte_carlo(model, x, 4000)
    assert 0.85 < (out.std / mc.std).median() < 1.15
    assert ((out.mean - mc.mean) / mc.std).abs().mean() < 0.15


def test_chosen_outputs():
    model, x = network(2, dropout=0.1), torch.randn(4, 16)
    with torch.no_grad():
        every = mp.convert(model, x)(x)
        some = mp.convert(model, x, outputs=[2, 0])(x)
        largest = mp.convert(model, x, outputs=2)(x)
    torch.testing.assert_close(some.covariance, every.covariance[:, [2, 0]][:, :, [2, 0]])
    picked = every.covariance.gather(1, largest.indices[:, :, None].expand(-1, -1, 3))
    picked = picked.gather(2, largest.indices[:, None].expand(-1, 2, -1))
    torch.testing.assert_close(largest.covariance, picked)
    only = mp.convert(network(2), x, outputs=[1])(x)  # paths and nothing else
    torch.testing.assert_close(only.covariance, mp.convert(network(2), x)(x).covariance[:, 1:2, 1:2])


def test_batches_and_compilation():
    model, x = network(2, dropout=0.1), torch.randn(4, 16)
    bnn = mp.convert(model, x[:1])
    assert inside(bnn).built.program.paths is not None
    with torch.no_grad():
        out = bnn(x)
        for i in range(4):
            alone = bnn(x[i : i + 1])
            torch.testing.assert_close(alone.covariance[0], out.covariance[i], rtol=1e-4, atol=1e-6)
        assert bnn(x[:0]).mean.shape == (0, 3)
        compiled = torch.compile(bnn, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(compiled.covariance, out.covariance, rtol=1e-4, atol=1e-6)


def test_many_paths_go_by_gains():
    model, x = network(40, 0.05), torch.randn(2, 16)
    bnn = mp.convert(model, x)
    assert inside(bnn).built.program.paths is None
    assert (bnn(x).variance > 0).all()


class Noisy(nn.Linear):
    """Random weights, and noise that takes its shape of a value behind a path."""

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        y = nn.functional.linear(x, nn.functional.dropout(self.weight, 0.2), self.bias)
        return y * (1 + 0.1 * torch.randn_like(y)) + 0.1 * torch.rand_like(y) - 0.05


class NoisyConvolution(nn.Conv1d):
    def forward(self, x):
        return nn.functional.conv1d(x, nn.functional.dropout(self.weight, 0.2, self.training), self.bias)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(Block(8, 0.3), Noisy(8, 8), DropPath(0.2), nn.Linear(8, 2)),
        lambda: nn.Sequential(
            nn.Unflatten(1, (2, 4)), DropPath(0.3), NoisyConvolution(2, 3, 2), nn.Flatten(), nn.Linear(9, 2)
        ),
    ],
    ids=["dense", "convolution"],
)
def test_other_noise_behind_a_path_is_at_its_mean(make):
    """So that results are the same every time, and samples do not depend on each other."""
    torch.manual_seed(0)
    model = make().eval()
    x = torch.randn(3, 8)
    bnn = mp.convert(model, x, "accurate", dropout=nn.Module)
    out = bnn(x)
    assert torch.equal(out.covariance, bnn(x).covariance)
    torch.testing.assert_close(bnn(x[1:2]).covariance, out.covariance[1:2])
    ratio = out.std / mp.monte_carlo(bnn, x, 4000).std
    assert ((ratio > 0.85) & (ratio < 1.05)).all()  # interactions with paths, left out, are always missing


@pytest.mark.parametrize(
    "reduce",
    [
        nn.Flatten(),
        nn.MaxPool2d(2),
        nn.AdaptiveMaxPool2d(1),
        nn.Sequential(nn.Flatten(), nn.LayerNorm(32), nn.Linear(32, 3)),
        nn.Sequential(nn.Flatten(), nn.RMSNorm(32), nn.Linear(32, 3)),
        nn.Sequential(nn.Flatten(), nn.Softmax(1), nn.Linear(32, 3)),
    ],
)
def test_what_drops_elements_behind_a_path_is_at_its_mean(reduce: nn.Module) -> None:
    """Whatever operator it has become part of."""
    model, x = nn.Sequential(DropPath(0.05), nn.Dropout(0.05), reduce).eval(), torch.randn(4, 2, 4, 4)
    network = mp.convert(model, x, "accurate")
    found, mc = network(x), mp.monte_carlo(model, x, n_samples=4000)
    assert torch.equal(network(x).mean, found.mean)
    assert ((found.mean - mc.mean).abs() <= 5 * mc.mean_error + 0.05 * mc.std + 1e-6).all()
    assert 0.9 < (found.std / mc.std).detach().median() < 1.1
