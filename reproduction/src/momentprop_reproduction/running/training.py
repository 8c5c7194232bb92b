"""Trains from a seed, without leaving a trace in the caller's random state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Progress = Callable[[int, int], None]
"""Called as progress(done, total)."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run a block from a seed and restore the global random state after it.

    >>> import torch
    >>> before = torch.get_rng_state()
    >>> with seeded(0):
    ...     _ = torch.rand(3)
    >>> torch.equal(before, torch.get_rng_state())
    True
    """
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also seed the other devices, which are not restored
        torch.default_generator.manual_seed(seed)
        yield


def fit(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    inputs: Tensor,
    targets: Tensor,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    progress: Progress | None = None,
) -> None:
    """Train with Adam and a cosine schedule; the model is left in evaluation mode."""
    if epochs < 1:
        raise ValueError(f"epochs must be at least 1, not {epochs}")
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    model.train()
    with torch.enable_grad():
        for epoch in range(epochs):
            for batch in torch.randperm(len(inputs)).split(batch_size):
                optimizer.zero_grad()
                loss(model(inputs[batch]), targets[batch]).backward()
                optimizer.step()
            schedule.step()
            if progress is not None:
                progress(epoch + 1, epochs)
    model.eval()
