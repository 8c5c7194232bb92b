"""Directions carried through dense layers, against full covariances."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import momentprop as mp
from exact import full_covariance
from momentprop.engine import tracking
from momentprop.engine.tracking import Tracked
from momentprop.moments import Moments
from momentprop.network import inside
from momentprop.rules.facts import Directions, knowing


def correlated(n: int, rank: int, alone: float = 1.0) -> tuple[Moments, Tensor, Tensor]:
    """Moments with directions, and their full covariance [batch, n, n]."""
    directions = torch.randn(rank, 3, n, dtype=torch.float64)
    diagonal = alone * torch.rand(3, n, dtype=torch.float64)
    covariance = torch.diag_embed(diagonal) + torch.einsum("rbi,rbj->bij", directions, directions)
    x = Moments(torch.randn(3, n, dtype=torch.float64), covariance.diagonal(dim1=1, dim2=2))
    return x, directions, covariance


def through(weight: Tensor, x: Moments, directions: Tensor | None = None) -> tuple[Moments, Tensor]:
    """What a dense layer gives, and the directions behind it."""
    given = x if directions is None else knowing(x, Directions(directions))
    out = Tracked().propagate(given, weight, None).moments
    return out, out.fact(Directions).rows


def test_variance_is_exact_and_directions_do_not_exceed_it() -> None:
    """diag(W C W^T); and W C W^T - U^T U is positive semi-definite."""
    weight = torch.randn(12, 10, dtype=torch.float64)
    for rank in (2, 8):
        x, directions, covariance = correlated(10, rank)
        exact = weight @ covariance @ weight.T
        out, found = through(weight, x, directions)
        torch.testing.assert_close(out.variance, exact.diagonal(dim1=1, dim2=2))
        left = exact - torch.einsum("rbi,rbj->bij", found, found)
        assert (torch.linalg.eigvalsh(left) > -1e-9).all()
        traced = left.diagonal(dim1=1, dim2=2).sum() / exact.diagonal(dim1=1, dim2=2).sum()
        assert traced < 0.75  # they tell a good part of it


def test_what_lies_in_few_directions_is_kept() -> None:
    weight = torch.randn(12, 10, dtype=torch.float64)
    x, directions, covariance = correlated(10, 3, alone=0.0)
    _, found = through(weight, x, directions)
    torch.testing.assert_close(torch.einsum("rbi,rbj->bij", found, found), weight @ covariance @ weight.T)


def test_first_layer_finds_directions_of_its_own() -> None:
    weight = torch.randn(12, 4, dtype=torch.float64)  # rank 4: eight test vectors find all of it
    x = Moments(torch.randn(3, 4, dtype=torch.float64), torch.rand(3, 4, dtype=torch.float64) + 0.1)
    out, found = through(weight, x)
    exact = weight @ torch.diag_embed(x.variance) @ weight.T
    torch.testing.assert_close(out.variance, exact.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(torch.einsum("rbi,rbj->bij", found, found), exact, rtol=1e-6, atol=1e-6)


def test_no_variance_gives_no_directions() -> None:
    weight = torch.randn(5, 4)
    for directions in (None, torch.zeros(8, 2, 4)):
        out, found = through(weight, Moments(torch.randn(2, 4), 0.0), directions)
        assert (out.variance == 0).all()
        assert (found == 0).all()


def plain(depth: int, width: int = 24) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(2, width), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Dropout(0.2), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(width, 1)).double().eval()


def tracked_in(model: nn.Module) -> int:
    plan = inside(mp.convert(model, torch.zeros(1, 2).double())).built.program.plan
    return sum(isinstance(step.operator, Tracked) for step in plan.steps)


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
        exact = full_covariance(model, x)[1].diagonal(dim1=1, dim2=2).sqrt()
        error = (mp.convert(model, x)(x).std / exact - 1).abs().mean()
        monkeypatch.setattr(tracking, "_FEWEST_LAYERS", 99)
        diagonal = (mp.convert(model, x)(x).std / exact - 1).abs().mean()
    assert error < 0.02
    assert error < diagonal / 2
