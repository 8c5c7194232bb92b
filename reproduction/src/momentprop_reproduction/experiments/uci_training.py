"""Training of many small networks at once: dropout, dense, ReLU, dropout, dense, stacked.

Networks of one hidden layer are too small to fill a processor one by one: most of the time goes to calling
operators. Here the parameters of all networks lie in one tensor [networks, parameters] and every operator
works on all of them, one step of each at a time. Numbers are those of an ordinary training of each network by
itself (`tests/test_uci_training.py`), since all its random numbers come from a stream of its own.

Forward and backward are written out, in few passes over the hidden layer. With inputs x (dropped, and
1/(1-p) of what is kept; one more column of ones for the bias), M = [h > 0] of the dropped hidden layer and
r = d loss / d output,

    A = (r x)^T M,    dW1 = A * w2/(1-p),    dw2 = sum_q (A * W1)_q / (1-p),    db2 = sum r,

because h = M * (x W1): what backpropagation gets from a second pass over h is in A already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from momentprop_reproduction.experiments.uci_draws import dropped, glorot, shuffles

LEARNING_RATE, EPSILON = 1e-3, 1e-7  # Adam as Keras has it
BATCH_SIZE = 128
_BLOCK = 8192  # rows per network for which random numbers are drawn at once: at least one epoch
_WORKING_SET = 2**20  # elements of the stacked hidden layer: more fall out of the caches, measured

Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Task:
    """One network to be trained: its data, in standardised units, and what sets it apart.

    `rng` is used up by the training. `decay` times the sum of squared weights is added to the loss.
    """

    features: Tensor  # [n, Q]
    target: Tensor  # [n]
    drop_probability: float
    decay: float
    rng: Any


@dataclass(frozen=True, eq=False)
class Stack:
    """Parameters of several networks [networks, (Q + 1) H + H + 1]: W1 with its bias as last row, w2, b2."""

    parameters: Tensor
    n_features: int
    n_hidden: int

    def __len__(self) -> int:
        return len(self.parameters)

    def views(self, of: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """First layer [networks, Q + 1, H], second [networks, H], its bias [networks]."""
        flat = self.parameters if of is None else of
        q, h = self.n_features + 1, self.n_hidden
        return flat[:, : q * h].view(-1, q, h), flat[:, q * h : -1], flat[:, -1]

    def network(self, i: int, drop_probability: float) -> nn.Sequential:
        """Return the i-th as an ordinary network, in evaluation mode."""
        first, second, bias = (view[i] for view in self.views())
        model = nn.Sequential(
            nn.Dropout(drop_probability),
            nn.Linear(self.n_features, self.n_hidden),
            nn.ReLU(),
            nn.Dropout(drop_probability),
            nn.Linear(self.n_hidden, 1),
        ).to(self.parameters.dtype)
        values = {
            "1.weight": first[:-1].T,
            "1.bias": first[-1],
            "4.weight": second[None],
            "4.bias": bias[None],
        }
        model.load_state_dict(values)
        return model.eval()


def train(
    tasks: Sequence[Task],
    n_hidden: int,
    epochs: int,
    *,
    batch_size: int = BATCH_SIZE,
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
) -> Stack:
    """Train all networks, with mean squared error, weight decay and Adam.

    Networks with equally many observations run as one stack; a split may be one larger than another.

    Args:
        tasks: one per network.
        n_hidden: units of the hidden layer.
        epochs: passes over the observations.
        batch_size: observations per step; what remains at the end of an epoch is a step of its own.
        dtype: of parameters and arithmetic.
        progress: called as progress(done, total) with numbers of steps, over all networks.
    """
    sizes = [len(task.target) for task in tasks]
    n_features = tasks[0].features.shape[1]
    at_most = max(1, _WORKING_SET // (n_hidden * batch_size))
    groups = _groups(sizes, at_most)
    totals = [len(group) * epochs * -(-sizes[group[0]] // batch_size) for group in groups]
    n_parameters = (n_features + 2) * n_hidden + 1
    stack = Stack(torch.empty(len(tasks), n_parameters, dtype=dtype), n_features, n_hidden)
    before = 0
    with torch.no_grad():
        for group, total in zip(groups, totals, strict=True):
            training = _Training([tasks[i] for i in group], n_hidden, batch_size, dtype)
            for done in training.run(epochs):
                if progress is not None:
                    progress(before + len(group) * done, sum(totals))
            stack.parameters[group] = training.stack.parameters
            before += total
    return stack


def _groups(sizes: Sequence[int], at_most: int) -> list[list[int]]:
    """Networks of equal size, in stacks as even as can be."""
    groups = []
    for size in sorted(set(sizes)):
        equal = [i for i, n in enumerate(sizes) if n == size]
        groups += [part.tolist() for part in np.array_split(equal, -(-len(equal) // at_most))]
    return groups


class _Training:
    """Networks with equally many observations."""

    def __init__(self, tasks: Sequence[Task], n_hidden: int, batch_size: int, dtype: torch.dtype) -> None:
        self.tasks, self.batch_size = tasks, batch_size
        self.n, self.n_features = tasks[0].features.shape
        self.n_hidden = n_hidden
        table, self.offsets = _table(tasks, dtype)
        self.table = table.numpy()
        flat = [_initial(task, self.n_features, n_hidden) for task in tasks]
        parameter = nn.Parameter(torch.from_numpy(np.stack(flat)).to(dtype))
        parameter.grad = torch.empty_like(parameter)
        self.gradient = parameter.grad
        self.stack = Stack(parameter.detach(), self.n_features, n_hidden)
        self.optimizer = torch.optim.Adam([parameter], LEARNING_RATE, eps=EPSILON, fused=True)
        rates = torch.tensor([task.drop_probability for task in tasks], dtype=dtype)
        self.scale = (1 / (1 - rates)).unsqueeze(1)
        self.decay = torch.zeros_like(self.gradient)  # twice: the derivative of a square
        doubled = 2 * torch.tensor([task.decay for task in tasks], dtype=dtype)
        first, second, _ = self.stack.views(self.decay)
        first[:, :-1], second[:] = doubled[:, None, None], doubled[:, None]
        self.buffers: dict[int, tuple[Tensor, Tensor]] = {}

    def run(self, epochs: int) -> Any:
        """Train; yields the number of steps done, now and then."""
        done, at_once = 0, max(1, _BLOCK // self.n)
        for start in range(0, epochs, at_once):
            for step in self._block(min(at_once, epochs - start)):
                self._step(*step)
                done += 1
            yield done

    def _block(self, epochs: int) -> Any:
        """Rows [networks, batch] and dropped positions of inputs and hidden units, step by step."""
        n, wide = self.n, self.n_features + 2
        starts = [e * n + b for e in range(epochs) for b in range(0, n, self.batch_size)]
        ends = [*starts[1:], epochs * n]
        order = np.empty((len(self.tasks), epochs * n), np.int64)
        inputs, hidden = _Drops(ends, wide, self.batch_size), _Drops(ends, self.n_hidden, self.batch_size)
        for i, task in enumerate(self.tasks):
            order[i] = shuffles(task.rng, epochs, n)
            order[i] += self.offsets[i]
            places = dropped(task.rng, epochs * n * self.n_features, task.drop_probability)
            inputs.add(places + 2 * (places // self.n_features))  # two columns of the table are not inputs
            hidden.add(dropped(task.rng, epochs * n * self.n_hidden, task.drop_probability))
        for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
            rows = np.ascontiguousarray(order[:, start:end])
            yield rows, inputs.at(i, start, end), hidden.at(i, start, end)

    def _step(self, rows: Any, dropped_inputs: Any, dropped_hidden: Any) -> None:
        size = rows.shape[1]
        gathered, hidden = self._buffers(size)
        # gathering and sparse zeros by numpy: up to three times faster than torch; "clip" spares a copy
        np.take(self.table, rows, axis=0, out=gathered.numpy(), mode="clip")
        gathered.view(-1).numpy()[dropped_inputs] = 0
        x, target = gathered[..., :-1], gathered[..., -1]
        first, second, bias = self.stack.views()
        grad_first, grad_second, grad_bias = self.stack.views(self.gradient)

        # hidden units are rows, observations columns: the faster way round for these sizes
        torch.bmm(first.mT, x.mT, out=hidden)
        hidden.relu_()
        hidden.view(-1).numpy()[dropped_hidden] = 0
        scaled = second * self.scale
        output = torch.bmm(scaled.unsqueeze(1), hidden).squeeze(1)
        residual = (output + bias.unsqueeze(1) - target).mul_(2 / size)
        torch.sum(residual, 1, out=grad_bias)
        hidden.gt_(0)
        product = torch.bmm((x * residual.unsqueeze(2)).mT, hidden.mT)
        torch.mul(product, scaled.unsqueeze(1), out=grad_first)
        torch.sum(product.mul_(first), 1, out=grad_second)
        grad_second.mul_(self.scale)
        self.gradient.addcmul_(self.stack.parameters, self.decay)
        self.optimizer.step()

    def _buffers(self, size: int) -> tuple[Tensor, Tensor]:
        """Return buffers of inputs [networks, batch, Q + 2] and of hidden units [networks, H, batch].

        Batches have two sizes: the last one of an epoch may be smaller.
        """
        if size not in self.buffers:
            count = len(self.tasks)
            self.buffers[size] = (
                self.gradient.new_empty(count, size, self.n_features + 2),
                self.gradient.new_empty(count, self.n_hidden, size),
            )
        return self.buffers[size]


class _Drops:
    """Dropped positions of all networks, cut into steps."""

    def __init__(self, ends: Sequence[int], width: int, batch_size: int) -> None:
        self.width, self.batch_size = width, batch_size
        self.bounds = np.array([0, *ends]) * width
        self.positions: list[Any] = []
        self.cuts: list[list[int]] = []

    def add(self, positions: Any) -> None:
        """Add the dropped positions of the next network, over all its steps."""
        self.cuts.append(np.searchsorted(positions, self.bounds).tolist())
        # where its part begins in a full batch
        positions += len(self.positions) * self.batch_size * self.width
        self.positions.append(positions)

    def at(self, step: int, start: int, end: int) -> Any:
        """Flat positions in a tensor [networks, batch, width] (or [networks, width, batch]) of one step."""
        parts = [p[c[step] : c[step + 1]] for p, c in zip(self.positions, self.cuts, strict=True)]
        joined = np.concatenate(parts)
        joined -= start * self.width
        missing = self.batch_size - (end - start)
        if missing:
            shift = np.arange(len(parts)) * missing * self.width
            joined -= np.repeat(shift, [len(part) for part in parts])
        return joined


def _table(tasks: Sequence[Task], dtype: torch.dtype) -> tuple[Tensor, list[int]]:
    """Rows (x/(1-p), 1, y) of every data set with every drop probability, and where each task's begin."""
    blocks: dict[tuple[int, int, float], Tensor] = {}
    keys = [(id(task.features), id(task.target), task.drop_probability) for task in tasks]
    for task, key in zip(tasks, keys, strict=True):
        if key not in blocks:
            x = task.features.to(dtype) / (1 - task.drop_probability)
            y = task.target.to(dtype).unsqueeze(1)
            blocks[key] = torch.cat([x, torch.ones_like(y), y], 1)
    places = {key: i * len(block) for i, (key, block) in enumerate(blocks.items())}
    return torch.cat(list(blocks.values())), [places[key] for key in keys]


def _initial(task: Task, n_features: int, n_hidden: int) -> Any:
    """W1 with a bias of zero, w2 and b2 = 0, flat."""
    first = glorot(task.rng, n_features, n_hidden).reshape(-1)
    second = glorot(task.rng, n_hidden, 1).reshape(-1)
    return np.concatenate([first, np.zeros(n_hidden), second, [0.0]])
