"""Plain PyTorch: dense networks with every kind of noise."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from catalogue import Built, network


@network
def selu_alpha_dropout() -> Built:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Linear(inputs, outputs), nn.SELU(), nn.AlphaDropout(0.1)]

    model = nn.Sequential(*block(16, 48), *block(48, 48), nn.Linear(48, 3))
    return model, torch.randn(4, 16)


class DropConnectLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, F.dropout(self.weight, 0.2, self.training), self.bias)


@network
def drop_connect() -> Built:
    return nn.Sequential(DropConnectLinear(16, 32), nn.ReLU(), DropConnectLinear(32, 3)), torch.randn(4, 16)


class GaussianDropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 0.3 * torch.randn_like(x)) if self.training else x


@network
def gaussian_dropout() -> Built:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Linear(inputs, outputs), nn.ReLU(), GaussianDropout()]

    return nn.Sequential(*block(16, 48), *block(48, 48), nn.Linear(48, 3)), torch.randn(4, 16)


class DropPathDiv(nn.Module):
    """Stochastic depth as new_empty -> bernoulli_ -> div_ -> mul."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = 0.8
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        mask.div_(keep)
        return x * mask


class DropPathFloor(nn.Module):
    """Stochastic depth as rand -> add -> floor, with x.div(keep) * mask."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = 0.8
        mask = keep + torch.rand((x.shape[0],) + (1,) * (x.ndim - 1), dtype=x.dtype, device=x.device)
        mask.floor_()
        return x.div(keep) * mask


class ResidualMLP(nn.Module):
    def __init__(self, path: type[nn.Module], blocks: int = 3, width: int = 32) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, width), nn.Linear(width, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width), path())
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


@network
def drop_path_div() -> Built:
    return ResidualMLP(DropPathDiv), torch.randn(4, 16)


@network
def drop_path_floor() -> Built:
    return ResidualMLP(DropPathFloor), torch.randn(4, 16)


class TanhGELU(nn.Module):
    """GELU's tanh approximation, written out."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


@network
def tanh_gelu_written_out() -> Built:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Dropout(0.1), nn.Linear(inputs, outputs), TanhGELU()]

    return nn.Sequential(*block(16, 48), *block(48, 48), nn.Linear(48, 3)), torch.randn(4, 16)


class ManyActivations(nn.Module):
    """One dense layer and one dropout per activation."""

    def __init__(self) -> None:
        super().__init__()
        kinds = [nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Hardswish, nn.Hardsigmoid]
        kinds += [nn.Tanh, nn.Sigmoid, nn.ReLU6, nn.Softsign, nn.Hardtanh, nn.CELU, nn.LogSigmoid]
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Dropout(0.2), nn.Linear(16, 16), kind()) for kind in kinds
        )
        self.last = nn.Linear(16 * len(kinds), 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([branch(x) for branch in self.branches], 1))


@network
def many_activations() -> Built:
    return ManyActivations(), torch.randn(4, 16)


class LayerDropMLP(nn.Module):
    """Whole layers dropped per sample, and blended by torch.where on a constant condition."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.dropout, self.last = nn.Dropout(0.1), nn.Linear(24, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = self.dropout(torch.tanh(layer(x)))
            if self.training:
                y = y * torch.bernoulli(torch.full((x.shape[0], 1), 0.9)) / 0.9
            x = x + y
        even = torch.arange(24) % 2 == 0
        return self.last(torch.where(even, x, -x).clamp(-2, 2))


@network
def layer_drop_mlp() -> Built:
    return LayerDropMLP(), torch.randn(4, 24)
