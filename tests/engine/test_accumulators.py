"""What a sweep adds up: the largest jumps of every output. (Its covariance: test_backward.py.)"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import momentprop as mp


def sorted_effects(out: mp.Moments) -> Tensor:
    return out.jumps.effects.sort(0).values


def test_effects_of_a_linear_network_are_what_is_lost() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.2), nn.Linear(5, 3)).double().eval()
    x = torch.randn(4, 5).double()
    out = mp.convert(model, x, jumps=8)(x)
    lost = -(model[1].weight * x[:, None, :]) / 0.8  # [4, 3, 5]
    torch.testing.assert_close(sorted_effects(out), lost.movedim(-1, 0).sort(0).values)
    torch.testing.assert_close(out.jumps.variance, out.variance)
    assert (out.jumps.probabilities == 0.2).all()


def test_the_largest_are_kept() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.2), nn.Linear(50, 3)).double().eval()
    x = torch.randn(4, 50).double()
    few, all_of_them = (mp.convert(model, x, jumps=m)(x) for m in (4, 64))
    assert few.jumps.effects.shape == (4, 4, 3)
    assert all_of_them.jumps.effects.shape == (50, 4, 3)
    largest = all_of_them.jumps.effects.abs().topk(4, 0).values
    torch.testing.assert_close(few.jumps.effects.abs().sort(0, descending=True).values, largest)
    assert (few.jumps.variance < few.variance).all()
    torch.testing.assert_close(few.covariance, all_of_them.covariance)


def two_layers(first: float, second: float) -> nn.Sequential:
    torch.manual_seed(1)
    return (
        nn.Sequential(nn.Dropout(first), nn.Linear(4, 6), nn.ReLU(), nn.Dropout(second), nn.Linear(6, 2))
        .double()
        .eval()
    )


def test_inputs_and_units_with_their_own_probabilities() -> None:
    """Both kinds of sources, by the definition: E[f | kept] - E[f | dropped], others sampled."""
    model, x = two_layers(0.01, 0.05), 2 * torch.randn(3, 4).double()
    out = mp.convert(model, x, jumps=10)(x)
    for p, count in ((0.01, 4), (0.05, 6)):
        assert ((out.jumps.probabilities - p).abs() < 1e-12).sum(0).eq(count).all()
    hidden = torch.relu(model[1](x))
    units = -(model[4].weight * hidden[:, None, :]).movedim(-1, 0) / 0.95
    inputs = torch.stack(
        [model[1:](torch.where(torch.arange(4) == j, 0.0, x)) - model[1:](x) for j in range(4)]
    )
    expected = torch.cat([units, inputs]).sort(0).values
    error = (sorted_effects(out) - expected).abs()  # others are at their mean here
    assert (error < 0.05 * expected.abs().amax(0) + 0.02).all()


def test_all_jumps_together_make_up_the_variance() -> None:
    model, x = two_layers(0.1, 0.1), torch.randn(3, 4).double()
    out = mp.convert(model, x, jumps=99)(x)
    torch.testing.assert_close(out.jumps.variance, out.variance)


def test_noise_that_is_no_mask_is_no_jump() -> None:
    model = two_layers(0.1, 0.1)
    x = mp.Moments(torch.randn(3, 4).double(), 0.5)
    out = mp.convert(model, x, jumps=99)(x)
    assert (out.jumps.variance < 0.9 * out.variance).all()


def test_channels_are_dropped_as_a_whole() -> None:
    torch.manual_seed(0)
    model = (
        nn.Sequential(nn.Dropout2d(0.1), nn.Conv2d(3, 2, 3), nn.AvgPool2d(4), nn.Flatten()).double().eval()
    )
    x = torch.randn(5, 3, 6, 6).double()
    out = mp.convert(model, x, jumps=8)(x)
    assert out.jumps.effects.shape == (3, 5, 2)
    whole = model(x)
    without = torch.stack([model(x * (torch.arange(3) != c)[:, None, None]) - whole for c in range(3)])
    torch.testing.assert_close(sorted_effects(out), (without / 0.9).sort(0).values)


def test_dropped_pixels_behind_activations() -> None:
    """Gains on the way, and operators element by element merged with the mask."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.2), nn.Tanh(), nn.Flatten(), nn.Linear(32, 1)
    )
    model = model.double().eval()
    x = torch.randn(3, 1, 6, 6).double()
    out = mp.convert(model, x, jumps=5)(x)
    assert out.jumps.effects.shape == (5, 3, 1)
    assert (out.jumps.variance > 0).all()
    assert (out.jumps.variance < out.variance).all()


def test_several_outputs_have_their_own() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.first, self.second = nn.Dropout(0.1), nn.Linear(4, 1), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.drop(x)
            return self.first(h), self.second(h)

    model, x = Two().double().eval(), torch.randn(3, 4).double()
    outs = mp.convert(model, x, jumps=4)(x)
    for out, layer in zip(outs, (model.first, model.second), strict=True):
        lost = -(layer.weight * x[:, None, :]) / 0.9
        torch.testing.assert_close(sorted_effects(out), lost.movedim(-1, 0).sort(0).values)


def test_paths_are_jumps_too() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x) * torch.empty_like(x[:, :1]).bernoulli_(0.8) / 0.8

    model, x = Block().double(), torch.randn(3, 4).double()
    out = mp.convert(model, x, "accurate", jumps=4)(x)
    torch.testing.assert_close(out.jumps.effects[0], -model.inner(x) / 0.8)
    torch.testing.assert_close(out.jumps.probabilities, torch.full((1, 3, 4), 0.2).double())


def test_off_by_default_and_refused_where_unknown() -> None:
    model, x = two_layers(0.1, 0.1), torch.randn(3, 4).double()
    assert mp.convert(model, x)(x).jumps is None
    with pytest.raises(ValueError, match="accurate"):
        mp.convert(model, x, "fast", jumps=4)
    with pytest.raises(ValueError, match="outputs="):
        mp.convert(model, x, outputs=1, jumps=4)
    with pytest.raises(ValueError, match="negative"):
        mp.convert(model, x, jumps=-1)


def test_ensembles_keep_them() -> None:
    x = torch.randn(3, 4).double()
    members = [mp.convert(two_layers(0.1, 0.1), x, jumps=4) for _ in range(2)]
    stacked = mp.Ensemble(members)
    assert stacked.is_stacked
    for out, member in zip(stacked(x), members, strict=True):
        torch.testing.assert_close(out.jumps.effects, member(x).jumps.effects)


def test_compiles_and_moves() -> None:
    model, x = two_layers(0.1, 0.1).float(), torch.randn(3, 4)
    bnn = mp.convert(model, x, jumps=4)
    with torch.no_grad():
        compiled = torch.compile(lambda v: mp.regress(bnn(v), noise=0.1), backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x).nll(x[:, :2]), mp.regress(bnn(x), noise=0.1).nll(x[:, :2]))
    moved = bnn(x).to(torch.float64)
    assert moved.jumps.effects.dtype == torch.float64
    assert moved.detach().jumps is not None
