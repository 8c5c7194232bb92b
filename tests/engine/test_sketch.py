"""Deviations carried through deep convolutional networks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import momentprop as mp
from momentprop.engine import sketch
from momentprop.engine.adjoint import TwoSweeps
from momentprop.engine.layouts import Layout
from momentprop.engine.sketch import Sketch, signs
from momentprop.moments import Moments
from momentprop.rules.local import Elementwise


class Block(nn.Module):
    def __init__(self, drop: nn.Module) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(6, 6, 3, padding=1) for _ in range(2))
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.first(torch.relu(x)).split(3, 1)
        return x + self.second(self.drop(torch.relu(torch.cat([two, one], 1))))


def network(blocks: int = 6, drop: nn.Module | None = None) -> nn.Sequential:
    """Weights of one sign inside, so that noise of many units adds up."""
    torch.manual_seed(0)
    drop = drop or nn.Dropout(0.3)
    body = [Block(copy.deepcopy(drop)) for _ in range(blocks)]
    with torch.no_grad():
        for block in body:
            block.second.weight.abs_()
    head = [nn.MaxPool2d(2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)]
    return nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), *body, *head).eval()


def without(monkeypatch: pytest.MonkeyPatch, model: nn.Module, x: Tensor) -> Moments:
    with monkeypatch.context() as m:
        m.setattr(sketch, "_FEWEST_LAYERS", 10**6)
        return mp.convert(model, x, "accurate")(x)


def test_means_are_closer_to_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = network(), torch.randn(30, 1, 8, 8)
    samples = mp.monte_carlo(model, x, 4000, seed=0)
    plain = without(monkeypatch, model, x)
    sketched = mp.convert(model, x, "accurate")(x)
    errors = [((out.mean - samples.mean) / samples.std).abs().mean() for out in (sketched, plain)]
    assert errors[0] < 0.6 * errors[1]


@pytest.mark.parametrize(("blocks", "deep"), [(1, False), (2, False), (3, True)])
def test_used_where_many_convolutions_stand_in_a_row(blocks: int, deep: bool) -> None:
    """The first convolution of a network has nothing random to work on, nor has that of the first block."""
    program = mp.convert(network(blocks), torch.randn(1, 1, 8, 8), "accurate")._program
    assert isinstance(program, TwoSweeps)
    assert (program.signs is not None) is deep


def test_dropout_of_channels_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = network(drop=nn.Dropout2d(0.2)), torch.randn(3, 1, 8, 8)
    out = mp.convert(model, x, "accurate")(x)
    torch.testing.assert_close(out.mean, without(monkeypatch, model, x).mean)


def test_parallel_branches_are_not_deep() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Conv2d(1, 1, 3) for _ in range(12))
            self.drop = nn.Dropout(0.2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.drop(x)
            return torch.stack([layer(x) for layer in self.layers]).mean((0, 2, 3, 4))

    program = mp.convert(Wide().eval(), torch.randn(2, 1, 5, 5), "accurate")._program
    assert isinstance(program, TwoSweeps)
    assert program.signs is None


def test_result_does_not_depend_on_the_place_in_the_batch() -> None:
    model, x = network().double(), torch.randn(5, 1, 8, 8).double()
    bnn = mp.convert(model, x, "accurate")
    whole = bnn(x)
    for i in range(5):
        alone = bnn(x[i : i + 1])
        torch.testing.assert_close(alone.mean[0], whole.mean[i])
        torch.testing.assert_close(alone.covariance[0], whole.covariance[i])
    torch.testing.assert_close(bnn(x).mean, whole.mean, rtol=0, atol=0)


def test_deviations_estimate_the_variance_without_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """One linear map of independent noise, many signs: the mean square is the true variance."""
    monkeypatch.setattr(sketch, "_DEVIATIONS", 20_000)
    layouts = {"noise": Layout(1, 8), "out": Layout(1, 5)}
    found = Sketch(signs(layouts), layouts)
    noise, weight = torch.rand(2, 8).double(), torch.randn(5, 8).double()
    source = Moments(torch.zeros(2, 8).double(), noise)
    found.follow("noise", [], source, Elementwise(noise=noise), lambda j: None)
    exact = noise @ weight.square().T
    square = (found.deviations["noise"] @ weight.T).square().mean(0)
    torch.testing.assert_close(square, exact, rtol=0.05, atol=0)


def test_signs_begin_anew_where_the_table_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketch, "_LONGEST", 101)
    model, x = network(), torch.randn(2, 1, 8, 8)
    out = mp.convert(model, x, "accurate")(x)
    assert out.mean.isfinite().all()
    assert (out.variance > 0).all()


def test_no_noise_leaves_the_means_of_the_network() -> None:
    """An uncertain input of variance zero, and no dropout: nothing is divided by zero."""
    model, x = network(6, nn.Identity()), torch.randn(2, 1, 8, 8)
    out = mp.convert(model, Moments(x, torch.zeros_like(x)), "accurate")(Moments(x, torch.zeros_like(x)))
    torch.testing.assert_close(out.mean, model(x), rtol=1e-4, atol=1e-5)
    assert (out.variance < 1e-8).all()


def test_softmax_at_the_end_keeps_its_logits() -> None:
    model, x = network(5), torch.randn(2, 1, 8, 8)
    expected = mp.classify(mp.convert(model, x, "accurate")(x))
    found = mp.classify(mp.convert(nn.Sequential(model, nn.Softmax(-1)).eval(), x, "accurate")(x))
    torch.testing.assert_close(found.probs, expected.probs, rtol=1e-4, atol=1e-5)


def test_empty_batch() -> None:
    model, x = network(5), torch.randn(2, 1, 8, 8)
    assert mp.convert(model, x, "accurate")(x[:0]).covariance.shape == (0, 3, 3)


def test_gradients_reach_the_parameters() -> None:
    model, x = network(), torch.randn(2, 1, 8, 8)
    out = mp.convert(model, x, "accurate")(x)
    (out.mean.sum() + out.covariance.sum()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_compiles() -> None:
    model, x = network(3), torch.randn(2, 1, 8, 8)
    bnn = mp.convert(model, x, "accurate")
    compiled = torch.compile(bnn, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x).covariance, bnn(x).covariance, rtol=1e-3, atol=1e-6)
