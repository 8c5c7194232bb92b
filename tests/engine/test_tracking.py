"""Directions carried through dense layers, against full covariances."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import momentprop as mp
from momentprop.engine import tracking
from momentprop.engine.adjoint import TwoSweeps
from momentprop.engine.tracking import Tracked
from momentprop.gaussian.normal import positive_probability, relu_moments
from momentprop.moments import Moments


def correlated(n: int, rank: int, alone: float = 1.0) -> tuple[Moments, Tensor, Tensor]:
    """Moments with directions, and their full covariance [batch, n, n]."""
    directions = torch.randn(rank, 3, n, dtype=torch.float64)
    diagonal = alone * torch.rand(3, n, dtype=torch.float64)
    covariance = torch.diag_embed(diagonal) + torch.einsum("rbi,rbj->bij", directions, directions)
    x = Moments(torch.randn(3, n, dtype=torch.float64), covariance.diagonal(dim1=1, dim2=2))
    return x, directions, covariance


def test_variance_is_exact_and_directions_do_not_exceed_it() -> None:
    """diag(W C W^T); and W C W^T - U^T U is positive semi-definite."""
    weight = torch.randn(12, 10, dtype=torch.float64)
    for rank in (2, 8):
        x, directions, covariance = correlated(10, rank)
        exact = weight @ covariance @ weight.T
        out, found = Tracked()(x, weight, None, directions)
        torch.testing.assert_close(out.variance, exact.diagonal(dim1=1, dim2=2))
        left = exact - torch.einsum("rbi,rbj->bij", found, found)
        assert (torch.linalg.eigvalsh(left) > -1e-9).all()
        traced = left.diagonal(dim1=1, dim2=2).sum() / exact.diagonal(dim1=1, dim2=2).sum()
        assert traced < 0.75  # they tell a good part of it


def test_what_lies_in_few_directions_is_kept() -> None:
    weight = torch.randn(12, 10, dtype=torch.float64)
    x, directions, covariance = correlated(10, 3, alone=0.0)
    _, found = Tracked()(x, weight, None, directions)
    torch.testing.assert_close(torch.einsum("rbi,rbj->bij", found, found), weight @ covariance @ weight.T)


def test_first_layer_finds_directions_of_its_own() -> None:
    weight = torch.randn(12, 4, dtype=torch.float64)  # rank 4: eight test vectors find all of it
    x = Moments(torch.randn(3, 4, dtype=torch.float64), torch.rand(3, 4, dtype=torch.float64) + 0.1)
    out, found = Tracked()(x, weight, None, None)
    exact = weight @ torch.diag_embed(x.variance) @ weight.T
    torch.testing.assert_close(out.variance, exact.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(torch.einsum("rbi,rbj->bij", found, found), exact, rtol=1e-6, atol=1e-6)


def test_no_variance_gives_no_directions() -> None:
    weight = torch.randn(5, 4)
    for directions in (None, torch.zeros(8, 2, 4)):
        out, found = Tracked()(Moments(torch.randn(2, 4), 0.0), weight, None, directions)
        assert (out.variance == 0).all()
        assert (found == 0).all()


def plain(depth: int, width: int = 24) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(2, width), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Dropout(0.2), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(width, 1)).double().eval()


def tracked_in(model: nn.Module) -> int:
    program = mp.convert(model, torch.zeros(1, 2).double())._program
    assert isinstance(program, TwoSweeps)
    return sum(isinstance(call.target, Tracked) for call in program.calls)


def test_used_in_long_rows_of_dense_layers_only() -> None:
    assert tracked_in(plain(3)) == 0
    assert tracked_in(plain(8)) == 8  # the last of nine is the output: its variance leads nowhere

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 8)
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(8)])

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            for layer in self.layers:
                h = h + torch.relu(layer(nn.functional.dropout(h, 0.1, self.training)))
            return h

    assert tracked_in(Residual().double().eval()) == 0


def full_covariance(model: nn.Sequential, x: Tensor) -> Tensor:
    """Std of the output with every layer's whole covariance matrix: O(n^2), and obviously right."""
    mean, covariance = x, torch.zeros(len(x), x.shape[1], x.shape[1], dtype=x.dtype)
    for layer in model:
        variance = covariance.diagonal(dim1=1, dim2=2)
        if isinstance(layer, nn.Dropout):
            odds = layer.p / (1 - layer.p)
            covariance = covariance + torch.diag_embed(odds * (mean * mean + variance))
        elif isinstance(layer, nn.Linear):
            mean, covariance = layer(mean), layer.weight @ covariance @ layer.weight.T
        else:
            gain = positive_probability(mean, variance)
            mean, new = relu_moments(mean, variance)
            covariance = gain[:, :, None] * covariance * gain[:, None, :]
            covariance = covariance + torch.diag_embed(new - covariance.diagonal(dim1=1, dim2=2))
    return covariance.diagonal(dim1=1, dim2=2).sqrt()


@pytest.mark.parametrize("seed", range(3))
def test_deep_networks_come_closer_to_the_full_covariance(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 2 % of it on std, and nearer than the diagonal."""
    torch.manual_seed(seed)
    model = plain(12)
    for layer in model:
        if isinstance(layer, nn.Linear):  # so that noise does not die out on the way
            nn.init.normal_(layer.weight, std=1.4 * layer.weight.shape[1] ** -0.5)
    x = torch.randn(16, 2).double()
    with torch.no_grad():
        exact = full_covariance(model, x)
        error = (mp.convert(model, x)(x).std / exact - 1).abs().mean()
        monkeypatch.setattr(tracking, "_FEWEST_LAYERS", 99)
        diagonal = (mp.convert(model, x)(x).std / exact - 1).abs().mean()
    assert error < 0.02
    assert error < diagonal / 2


def test_compiles() -> None:
    model, x = plain(6).float(), torch.randn(5, 2)
    bnn = mp.convert(model, x)
    with torch.no_grad():
        torch.testing.assert_close(
            torch.compile(bnn, fullgraph=True, backend="eager")(x).std, bnn(x).std, rtol=1e-4, atol=1e-6
        )


def test_plain_inputs_after_uncertain_ones() -> None:
    model, x = plain(8).double(), torch.randn(3, 2).double()
    bnn = mp.convert(model, x)
    before = bnn(x).covariance
    bnn(Moments(x, 0.1))
    torch.testing.assert_close(bnn(x).covariance, before, rtol=0.05, atol=1e-6)
