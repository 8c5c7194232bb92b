"""Moments are values: they never change, and their standard deviation can be differentiated everywhere."""

import dataclasses

import pytest
import torch
from torch import nn

import momentprop as mp


@pytest.mark.parametrize("name", ["mean", "variance", "covariance", "facts", "of_my_own"])
def test_moments_are_immutable(name: str) -> None:
    x = mp.Moments(torch.zeros(2), 1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(x, name, torch.ones(2))
    assert not x.mean.any()


def test_std_is_zero_with_a_gradient_of_zero_where_the_variance_is() -> None:
    variance = torch.tensor([0.0, 0.25, 0.0], requires_grad=True)
    std = mp.Moments(torch.ones(3), variance).std
    assert std.tolist() == [0.0, 0.5, 0.0]
    (gradient,) = torch.autograd.grad(std.sum(), variance)
    assert gradient.tolist() == [0.0, 1.0, 0.0]


def test_std_of_a_variance_that_is_no_number_is_none() -> None:
    std = mp.Moments(torch.ones(2), torch.tensor([torch.nan, torch.inf])).std
    assert std[0].isnan()
    assert std[1].isinf()


@pytest.mark.parametrize("fidelity", ["paper", "fast", "accurate"])
def test_gradients_of_a_networks_std_are_finite_where_it_is_zero(fidelity: str) -> None:
    """The second sample is all zeros, so no dropout changes it."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 4, bias=False), nn.ReLU()).eval()
    x = torch.stack([torch.randn(3), torch.zeros(3)]).requires_grad_()
    std = mp.convert(model, x.detach(), fidelity)(x).std
    assert std[1].max() < 1e-12
    assert std[0].max() > 0
    gradients = torch.autograd.grad(std.sum(), [x, *model.parameters()], allow_unused=True)
    assert all(g is None or g.isfinite().all() for g in gradients)
