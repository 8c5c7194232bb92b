"""Noise of training mode that adds to values is no dropout: it is named, and left out unless asked for."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import momentprop as mp

X = torch.linspace(-1, 1, 12).view(3, 4)


class Noisy(nn.Module):
    """The function in training mode, nothing in eval mode."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) if self.training else x


def network(function: Callable[[Tensor], Tensor]) -> nn.Sequential:
    return nn.Sequential(Noisy(function), nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 2))


ADDED: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x + 0.5 * torch.randn_like(x),
    "of a shape": lambda x: x - torch.randn(x.shape) / 4,
    "in place": lambda x: x + torch.empty_like(x).normal_(0, 0.1),
    "about": lambda x: torch.normal(x, 0.2),
    "uniform": lambda x: x + (torch.rand_like(x) - 0.5),
    "uniform in place": lambda x: torch.empty_like(x).uniform_(-1, 1).add(x),
    "clipped": lambda x: x + torch.randn_like(x).clamp(-1, 1),
    "for each sample": lambda x: x + torch.randn(x.shape[0], 1) * 0.1,
    "alpha": lambda x: torch.add(x, torch.randn_like(x), alpha=0.1),
}


@pytest.mark.parametrize("noise", ADDED.values(), ids=ADDED.keys())
class TestAddedNoise:
    def test_is_named_and_left_out(self, noise: Callable[[Tensor], Tensor]) -> None:
        model = network(noise)
        expected = mp.convert(model[1:], X)(X)
        with pytest.warns(
            mp.TraceNote, match=r"left out(.|\n)* in 0\b(.|\n)*test_augmentation(.|\n)*dropout="
        ):
            out = mp.convert(model, X)(X)
        torch.testing.assert_close(out.mean, expected.mean)
        torch.testing.assert_close(out.std, expected.std)
        with pytest.warns(mp.TraceNote, match="left out"):
            mc = mp.monte_carlo(model, X, n_samples=500)
        plain = mp.monte_carlo(model[1:], X, n_samples=500)
        torch.testing.assert_close(mc.std, plain.std)

    def test_counts_where_it_is_asked_for(self, noise: Callable[[Tensor], Tensor]) -> None:
        model = network(noise)
        out = mp.monte_carlo(model, X, n_samples=200, dropout=nn.Module)
        alone = mp.monte_carlo(model, X, n_samples=200, dropout=(Noisy,))
        assert (out.variance > alone.variance * 0.5).all()
        assert (alone.variance > 0).all()
        without = mp.monte_carlo(model, X, n_samples=200, dropout=nn.Dropout)
        torch.testing.assert_close(without.std, mp.monte_carlo(model[1:], X, n_samples=200).std)


class Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.randn_like(x) if self.training else x


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.spread = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.full((4, 4), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(self.spread) * self.spread if self.training else 0
        return nn.functional.linear(x, self.weight + noise)


MULTIPLIED: dict[str, nn.Module] = {
    "gaussian dropout": Noisy(lambda x: x * (1 + 0.3 * torch.randn_like(x))),
    "of values": Noisy(lambda x: x + 0.3 * x * torch.randn_like(x)),
    "by hand": Noisy(lambda x: x * (torch.rand_like(x) < 0.8) / 0.8),
    "stochastic depth": Noisy(lambda x: x * torch.floor(0.8 + torch.rand(x.shape[0], 1)) / 0.8),
    "log-normal": Noisy(lambda x: x * (0.1 * torch.randn_like(x)).exp()),
    "random weights": Weights(),
}


@pytest.mark.parametrize("noise", MULTIPLIED.values(), ids=MULTIPLIED.keys())
def test_noise_that_multiplies_counts(noise: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Noisy with its noise|.*other values than in eval mode")
        mc = mp.monte_carlo(noise, X, n_samples=50)
    assert (mc.variance > 0).any()


def test_a_learned_scale_counts_and_is_named() -> None:
    model = nn.Sequential(Learned(), nn.Linear(4, 2))
    with pytest.warns(mp.TraceNote, match=r"cannot be told(.|\n)*test_augmentation"):
        assert (mp.convert(model, X)(X).std > 0).all()


def test_noise_of_eval_mode_counts() -> None:
    class Always(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randn_like(x)

    torch.testing.assert_close(mp.convert(Always(), X)(X).std, torch.ones(3, 4))


def test_some_noise_of_eval_mode_and_some_more_of_training_mode() -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x + torch.randn_like(x)
            return x + torch.randn_like(x) if self.training else x

    with pytest.warns(mp.TraceNote, match="cannot be told"):
        mp.convert(Both(), X)


def test_shuffling_in_training_mode_gets_advice_that_works() -> None:
    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 2))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                x = x[:, torch.randperm(4)]
            return self.layers(x)

    model = Shuffled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mp.TraceNote)
        with pytest.raises(mp.MissingRuleError, match=r"randperm(.|\n)*leave it out by dropout=nn\.Dropout"):
            mp.convert(model, X)
    expected = mp.convert(model.layers, X)(X).std
    torch.testing.assert_close(mp.convert(model, X, dropout=nn.Dropout)(X).std, expected)
