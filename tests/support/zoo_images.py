"""Plain PyTorch: convolutional networks for images and volumes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from catalogue import Built, images, network


def convolution(inputs: int, outputs: int) -> nn.Sequential:
    layers = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Two levels; up by a transposed convolution or by bilinear interpolation; `pool` to few outputs."""

    def __init__(self, bilinear: bool, pool: bool = False) -> None:
        super().__init__()
        self.pool, self.dropout = pool, nn.Dropout2d(0.2)
        self.down = nn.ModuleList([convolution(1, 8), convolution(8, 16), convolution(16, 32)])
        ups = [nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), nn.Conv2d(32, 16, 1)]
        ups2 = [nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False), nn.Conv2d(16, 8, 1)]
        self.up2 = nn.Sequential(*ups) if bilinear else nn.ConvTranspose2d(32, 16, 2, 2)
        self.up1 = nn.Sequential(*ups2) if bilinear else nn.ConvTranspose2d(16, 8, 2, 2)
        self.join2, self.join1, self.last = convolution(32, 16), convolution(16, 8), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down[0](x)
        b = self.down[1](F.max_pool2d(a, 2))
        c = self.dropout(self.down[2](F.max_pool2d(b, 2)))
        b = self.dropout(self.join2(torch.cat([b, self.up2(c)], 1)))
        a = self.join1(torch.cat([a, self.up1(b)], 1))
        x = self.last(a)
        return x.mean((2, 3)) if self.pool else x


@network
def unet_transposed() -> Built:
    return UNet(bilinear=False), images(2, 1, 16)


@network
def unet_bilinear() -> Built:
    return UNet(bilinear=True), images(2, 1, 16)


@network
def unet_transposed_area() -> Built:
    return UNet(bilinear=False, pool=True), images(3, 1, 16)


@network
def unet_bilinear_area() -> Built:
    return UNet(bilinear=True, pool=True), images(3, 1, 16)


class SegNet(nn.Module):
    """Unpooling with the indices of pooling, which are random behind dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = convolution(1, 8), convolution(8, 16)
        self.third, self.last = convolution(16, 8), nn.Conv2d(8, 2, 3, padding=1)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x, i = F.max_pool2d(self.first(x), 2, return_indices=True)
        x, j = F.max_pool2d(self.second(self.dropout(x)), 2, return_indices=True)
        x = self.third(F.max_unpool2d(self.dropout(x), j, 2))
        return self.last(F.max_unpool2d(x, i, 2))


@network
def segnet() -> Built:
    return SegNet(), images(2, 1, 16)


class SqueezeExcitation(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(channels, channels // 4), nn.Linear(channels // 4, channels)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.up(torch.relu(self.down(x.mean((2, 3))))))
        return x * gate[:, :, None, None]


@network
def squeeze_excitation() -> Built:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [convolution(inputs, outputs), nn.Dropout(0.2), SqueezeExcitation(outputs), nn.MaxPool2d(2)]

    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4)]
    return nn.Sequential(*block(3, 16), *block(16, 32), *head), images(size=16)


class WideBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.skip = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(x))
        return self.conv2(self.dropout(torch.relu(self.norm2(self.conv1(y))))) + self.skip(y)


@network
def wide_resnet() -> Built:
    blocks = [WideBlock(16, 32, 1), WideBlock(32, 64, 2), WideBlock(64, 64, 2)]
    head = [nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 5)]
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, *head), images(size=16)


class ResponseNormBlock(nn.Module):
    """ConvNeXt V2's block: depthwise convolution, layer norm, GELU, global response norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 64), nn.Linear(64, width)
        self.gamma, self.beta = nn.Parameter(torch.randn(64) * 0.5), nn.Parameter(torch.zeros(64))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.up(self.norm(self.depthwise(x).permute(0, 2, 3, 1))))
        size = torch.norm(y, p=2, dim=(1, 2), keepdim=True)
        y = self.gamma * (y * (size / (size.mean(-1, keepdim=True) + 1e-6))) + self.beta + y
        return x + self.dropout(self.down(y)).permute(0, 3, 1, 2)


@network
def global_response_norm() -> Built:
    blocks = [nn.Conv2d(3, 24, 2, 2), ResponseNormBlock(24), ResponseNormBlock(24)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 4)), images(size=16)


@network
def volumes_3d() -> Built:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        convolution = nn.Conv3d(inputs, outputs, 3, padding=1)
        return [convolution, nn.InstanceNorm3d(outputs, affine=True), nn.LeakyReLU(), nn.Dropout3d(0.2)]

    head = [nn.MaxPool3d(2), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(16, 3)]
    return nn.Sequential(*block(1, 8), nn.AvgPool3d(2), *block(8, 16), *head), images(2, 1, 8, dims=3)


@network
def group_norm_cnn() -> Built:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.GroupNorm(4, outputs),
            nn.ELU(),
            nn.Dropout2d(0.1),
        ]

    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4)]
    return nn.Sequential(*block(3, 16), nn.MaxPool2d(2), *block(16, 32), *head), images(size=16)


@network
def speech_1d() -> Built:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [
            nn.Conv1d(inputs, outputs, 5, padding=2),
            nn.BatchNorm1d(outputs),
            nn.ReLU(),
            nn.Dropout1d(0.1),
        ]

    head = [nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 4), nn.LogSoftmax(1)]
    return nn.Sequential(*block(1, 16), nn.MaxPool1d(4), *block(16, 32), *head), torch.randn(3, 1, 64)
