"""Plain PyTorch: recurrent and temporal networks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from catalogue import Built, network


class RecurrentClassifier(nn.Module):
    """Two recurrent layers with dropout between them; the last step, or the pooled steps, to classes."""

    def __init__(self, kind: type[nn.RNNBase], bidirectional: bool = False) -> None:
        super().__init__()
        self.recurrent = kind(8, 24, 2, batch_first=True, dropout=0.2, bidirectional=bidirectional)
        self.dropout = nn.Dropout(0.2)
        self.last = nn.Linear(48 if bidirectional else 24, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.recurrent(x)
        return self.last(self.dropout(hidden[:, -1]))


@network
def lstm_classifier() -> Built:
    return RecurrentClassifier(nn.LSTM), torch.randn(3, 10, 8)


@network
def gru_classifier() -> Built:
    return RecurrentClassifier(nn.GRU, bidirectional=True), torch.randn(3, 10, 8)


@network
def rnn_classifier() -> Built:
    return RecurrentClassifier(nn.RNN), torch.randn(3, 10, 8)


class Tagger(nn.Module):
    """Word dropout, a bidirectional recurrent network, tags per word."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.words, self.dropout = nn.Embedding(50, 12), nn.Dropout(0.2)
        self.recurrent = kind(12, 16, 2, batch_first=True, dropout=0.2, bidirectional=True)
        self.last = nn.Linear(32, 4)

    def forward(self, words: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.dropout(self.words(words)))
        return self.last(self.dropout(hidden))


@network
def lstm_tagger() -> Built:
    return Tagger(nn.LSTM), torch.randint(0, 50, (3, 8))


@network
def gru_tagger() -> Built:
    return Tagger(nn.GRU), torch.randint(0, 50, (3, 8))


class CellLoop(nn.Module):
    """A cell stepped by hand, with dropout on its input and on its state."""

    def __init__(self, kind: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.cell, self.dropout, self.last = kind(8, 24), nn.Dropout(0.1), nn.Linear(24, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 24)
        c = torch.zeros_like(h)
        for step in x.unbind(1):
            if isinstance(self.cell, nn.LSTMCell):
                h, c = self.cell(self.dropout(step), (self.dropout(h), c))
            else:
                h = self.cell(self.dropout(step), self.dropout(h))
        return self.last(h)


@network
def lstm_cell_loop() -> Built:
    return CellLoop(nn.LSTMCell), torch.randn(3, 6, 8)


@network
def gru_cell_loop() -> Built:
    return CellLoop(nn.GRUCell), torch.randn(3, 6, 8)


class TemporalBlock(nn.Module):
    """Dilated causal convolutions with weight norm (Bai, Kolter & Koltun 2018)."""

    def __init__(self, inputs: int, outputs: int, dilation: int) -> None:
        super().__init__()
        self.cut = 2 * dilation
        padding, options = self.cut, {"dilation": dilation}
        self.first = weight_norm(nn.Conv1d(inputs, outputs, 3, padding=padding, **options))
        self.second = weight_norm(nn.Conv1d(outputs, outputs, 3, padding=padding, **options))
        self.skip = nn.Conv1d(inputs, outputs, 1)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(torch.relu(self.first(x)[..., : -self.cut]))
        y = self.dropout(torch.relu(self.second(y)[..., : -self.cut]))
        return torch.relu(y + self.skip(x))


class TemporalNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            TemporalBlock(4, 16, 1), TemporalBlock(16, 16, 2), TemporalBlock(16, 16, 4)
        )
        self.last = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(x)[..., -1])


@network
def temporal_convolutions() -> Built:
    return TemporalNetwork(), torch.randn(3, 4, 24)
