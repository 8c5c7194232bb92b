"""A small wide residual network on CIFAR-10: 14 layers, batch norm, and dropout in every block.

Training takes about ten minutes on one core, stops at any time and goes on from its last epoch.

    python benchmarks/wide_resnet.py
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from images import CACHE, cifar10, scaled
from torch import Tensor, nn

EPOCHS, IMAGES, BATCH = 8, 20_000, 128


class Block(nn.Module):
    """Pre-activation: BN, ReLU, convolution, BN, ReLU, dropout, convolution; plus the input."""

    def __init__(self, channels: int, width: int, stride: int, drop_probability: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(width)
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.dropout = nn.Dropout(drop_probability)
        same = stride == 1 and channels == width
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(x))
        h = self.conv1(h)
        return self.shortcut(x) + self.conv2(self.dropout(F.relu(self.norm2(h))))


class WideResNet(nn.Module):
    """WRN-16-2 with a strided stem, so that it can be sampled thousands of times on a small machine."""

    def __init__(self, n_classes: int = 10, widths: tuple[int, ...] = (32, 64, 128), blocks: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1, bias=False)
        layers, channels = [], 16
        for i, width in enumerate(widths):
            for j in range(blocks):
                layers.append(Block(channels, width, 2 if i > 0 and j == 0 else 1, 0.3))
                channels = width
        self.blocks = nn.Sequential(*layers)
        self.norm, self.head = nn.BatchNorm2d(channels), nn.Linear(channels, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(self.blocks(self.stem(x))))
        return self.head(F.adaptive_avg_pool2d(h, 1).flatten(1))


def trained_wide_resnet() -> nn.Module:
    """The network after training, from the cache where it is there."""
    torch.manual_seed(0)
    model = WideResNet()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    steps = EPOCHS * (IMAGES // BATCH)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
    path = CACHE / "wide_resnet.pt"
    first = 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first = state["epoch"]
    if first < EPOCHS:
        images, labels = cifar10("train")
        chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:IMAGES]
        images, labels = images[chosen], labels[chosen]
    for epoch in range(first, EPOCHS):
        generator = torch.Generator().manual_seed(epoch)
        torch.manual_seed(epoch)
        model.train()
        total = 0.0
        order = torch.randperm(IMAGES, generator=generator)[: IMAGES // BATCH * BATCH]
        for index in order.split(BATCH):
            x = scaled(images[index])
            if torch.rand((), generator=generator) < 0.5:
                x = x.flip(-1)
            loss = F.cross_entropy(model(x), labels[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            total += loss.item()
        print(
            f"epoch {epoch + 1}/{EPOCHS}: loss {total / (IMAGES // BATCH):.3f}", file=sys.stderr, flush=True
        )
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "epoch": epoch + 1,
        }
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)
    return model.eval()


if __name__ == "__main__":
    network = trained_wide_resnet()
    images, labels = cifar10("test")
    with torch.no_grad():
        logits = torch.cat([network(scaled(x)) for x in images[::10].split(100)])
    print(f"accuracy on 1,000 test images: {(logits.argmax(1) == labels[::10]).float().mean():.3f}")
