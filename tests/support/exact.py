"""Small models written as functions, and checks of moments: against all masks, and a full covariance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import momentprop as mp
from enumeration import enumerate_masks


class Model(nn.Module):
    """A function of (self, *inputs), with layers and a dropout to use."""

    def __init__(self, function: Callable[..., Any], **layers: Any) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.double().eval()

    def drop(self, x: Tensor, p: float = 0.4) -> Tensor:
        return F.dropout(x, p, self.training)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def values(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def uncertain(*shape: int) -> mp.Moments:
    return mp.Moments(values(*shape), values(*shape).exp())


def constant(*shape: int) -> nn.Parameter:
    return nn.Parameter(values(*shape))


def layers() -> dict[str, Any]:
    """A dense layer, a batch norm, a weight and a matrix, all for three features."""
    norm = nn.BatchNorm1d(3)
    for tensor in (norm.weight, norm.bias, norm.running_mean):
        nn.init.normal_(tensor)
    nn.init.uniform_(norm.running_var, 0.5, 2.0)
    return {"a": nn.Linear(3, 3), "norm": norm.eval(), "w": constant(3), "matrix": constant(3, 3)}


def accurate(model: nn.Module, *inputs: Any) -> list[mp.Moments]:
    out = mp.convert(model, inputs, "accurate")(*inputs)
    return pytree.tree_leaves(out, is_leaf=lambda v: isinstance(v, mp.Moments))


def assert_is_a_covariance(out: mp.Moments, tolerance: float = 1e-10) -> None:
    """Symmetric, its diagonal the variance, positive semidefinite to rounding."""
    covariance, batch = out.covariance, len(out.covariance)
    assert torch.equal(covariance, covariance.mT)
    size = covariance.shape[-1]
    scale = covariance.diagonal(dim1=1, dim2=2).amax(1, keepdim=True) if size else 1.0
    if out.indices is None and out.mean.shape[:1] == (batch,):
        assert torch.equal(out.variance.reshape(batch, -1), covariance.diagonal(dim1=1, dim2=2))
    if batch and size:
        assert (torch.linalg.eigvalsh(covariance) >= -tolerance * size * scale).all()


def assert_exact(model: nn.Module, *inputs: Any) -> None:
    """Mean and covariance of every output are those of all masks."""
    for out, (mean, covariance) in zip(
        accurate(model, *inputs), enumerate_masks(model, *inputs), strict=True
    ):
        assert out.covariance.shape == covariance.shape
        torch.testing.assert_close(out.covariance, covariance, rtol=1e-10, atol=1e-10)
        if out.mean.shape[:1] == mean.shape[:1]:
            torch.testing.assert_close(out.mean.reshape(mean.shape), mean, rtol=1e-10, atol=1e-10)
        assert_is_a_covariance(out)


def full_covariance(model: nn.Sequential, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and whole covariance matrix from layer to layer, O(n^2), by the formulas as they are printed."""
    mean, covariance = x, torch.zeros(*x.shape, x.shape[1], dtype=x.dtype)
    for layer in model:
        variance = covariance.diagonal(dim1=1, dim2=2)
        if isinstance(layer, nn.Linear):
            mean, covariance = layer(mean), layer.weight @ covariance @ layer.weight.T
        elif isinstance(layer, nn.Dropout):
            odds = layer.p / (1 - layer.p)
            covariance = covariance + torch.diag_embed(odds * (mean**2 + variance))
        elif isinstance(layer, nn.ReLU) and not variance.any():
            mean = mean.relu()
        else:
            std = variance.sqrt()
            a = mean / std
            cdf, pdf = torch.special.ndtr(a), torch.exp(-a * a / 2) / (2 * torch.pi) ** 0.5
            out = mean * cdf + std * pdf
            new = (mean**2 + variance) * cdf + mean * std * pdf - out**2
            covariance = cdf[:, :, None] * covariance * cdf[:, None, :]
            covariance = (
                covariance - torch.diag_embed(covariance.diagonal(dim1=1, dim2=2)) + torch.diag_embed(new)
            )
            mean = out
    return mean, covariance
