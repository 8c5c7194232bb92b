"""The k-th marked row of every sample: the same values, and a graph of known sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import momentprop as mp
from momentprop.capture.trace import trace

END = 2
TOKENS = torch.tensor([[3, END, 4, END, 1], [END, 5, END, 1, 1], [5, 6, 7, END, END]])


class Classifier(nn.Module):
    def __init__(self, number: int, heads: int = 0) -> None:
        super().__init__()
        self.embedding, self.dropout, self.output = nn.Embedding(9, 6), nn.Dropout(0.2), nn.Linear(6, 2)
        self.number, self.heads = number, heads

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.dropout(self.embedding(tokens))
        if self.heads:
            hidden = hidden.unflatten(-1, (self.heads, -1))
        marked = hidden[tokens.eq(END), :]
        picked = marked.view(hidden.size(0), -1, *hidden.shape[2:])[:, self.number]
        return self.output(picked.flatten(1))


@pytest.mark.parametrize("heads", [0, 3])
@pytest.mark.parametrize("number", [-1, -2, 0, 1])
def test_values_and_moments(number: int, heads: int) -> None:
    model = Classifier(number, heads).eval()
    bnn = mp.convert(model, TOKENS, fidelity="accurate")
    out = bnn(TOKENS)
    torch.testing.assert_close(out.mean, model(TOKENS))
    place = [[3, 1, 1, 3], [2, 0, 0, 2], [4, 3, 3, 4]]
    rows = [row[[-1, -2, 0, 1].index(number)] for row in place]
    embedded = model.embedding(TOKENS)[torch.arange(3), rows]
    expected = (embedded**2 * 0.25) @ (model.output.weight**2).T
    torch.testing.assert_close(out.variance, expected)
    for batch in (1, 2):
        torch.testing.assert_close(bnn(TOKENS[:batch]).mean, out.mean[:batch])


def test_no_size_depends_on_values() -> None:
    made = trace(Classifier(-1), TOKENS)
    assert not any(n.target is torch.ops.aten.index.Tensor for n in made.graph.nodes)
    symbols = {
        symbol
        for n in made.graph.nodes
        if isinstance(n.meta.get("val"), Tensor)
        for size in n.meta["val"].shape
        if isinstance(size, torch.SymInt)
        for symbol in size.node.expr.free_symbols
    }
    assert len(symbols) == 1  # the batch


def test_other_uses_of_a_mask_are_left_alone() -> None:
    class Mean(Classifier):
        def forward(self, tokens: Tensor) -> Tensor:
            hidden = self.embedding(tokens)
            return self.dropout(hidden[tokens.eq(END)].mean(0, keepdim=True) + hidden[:, 0])

    made = trace(Mean(0), TOKENS)
    assert any(n.target is torch.ops.aten.index.Tensor for n in made.graph.nodes)
