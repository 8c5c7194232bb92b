"""Operators of ours are made of torch's own, wherever torch looks into them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from momentprop.gaussian import composites as operators
from momentprop.gaussian import normal as gaussian
from momentprop.rules.max_pooling import ALIKE_MAXIMA, RECTIFIED_MAXIMA, TILED_MAXIMA

OPERATORS: dict[str, tuple[Callable[..., object], Callable[..., object], int]] = {
    "relu_moments": (operators.relu_moments, gaussian.relu_moments, 2),
    "max_moments": (operators.max_moments, gaussian.max_moments, 4),
    "dropped_variance": (
        lambda mean, variance: operators.dropped_variance(mean, variance, 0.25),
        lambda mean, variance: variance + 0.25 * (mean * mean + variance),
        2,
    ),
}


def values(count: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.rand(5, 3, dtype=torch.float64) for _ in range(count)]


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_its_function(name: str) -> None:
    operator, function, count = OPERATORS[name]
    torch.testing.assert_close(operator(*values(count)), function(*values(count)))


@pytest.mark.parametrize("name", OPERATORS)
def test_vmap_maps_what_it_is_made_of(name: str) -> None:
    """Otherwise it would loop over samples, with a warning that nobody can switch off."""
    operator, _, count = OPERATORS[name]
    graph = make_fx(torch.vmap(operator))(*values(count)).graph
    called = [node.target for node in graph.nodes if node.op == "call_function"]
    assert called
    assert {str(target).split(".")[0] for target in called} <= {"aten", "<built-in function getitem>"}
    assert len(called) < 100  # a loop would take five times as many
    torch.testing.assert_close(torch.vmap(operator)(*values(count)), operator(*values(count)))


POOLED = {
    "tiled maxima": lambda mean, variance: TILED_MAXIMA(mean, variance, [2, 2]),
    "alike maxima": lambda mean, variance: ALIKE_MAXIMA(
        mean, variance[..., : mean.shape[-1] // 2], mean.mean((2, 3), keepdim=True).abs(), [2, 2]
    ),
    "rectified maxima": lambda mean, variance: RECTIFIED_MAXIMA(mean, variance, [2, 2]),
    "relu": operators.relu_moments,
}


@pytest.mark.parametrize("name", POOLED)
def test_blocks_of_a_batch_give_what_the_whole_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    mean, variance = torch.randn(7, 3, 4, 5), torch.rand(7, 3, 4, 5)
    whole = POOLED[name](mean, variance)
    monkeypatch.setattr(operators, "_BLOCK", 2 * mean[0].numel())
    seen: list[int] = []
    root = torch.Tensor.sqrt
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda x: (seen.append(1), root(x))[1])
    blocks = POOLED[name](mean, variance)
    assert len(seen) >= 4  # blocks
    torch.testing.assert_close(blocks, whole, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", POOLED)
def test_derivatives_and_traces_see_no_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mean, variance = torch.randn(7, 3, 4, 5, dtype=torch.float64), torch.rand(7, 3, 4, 5, dtype=torch.float64)
    nodes = len(make_fx(POOLED[name])(mean, variance).graph.nodes)
    monkeypatch.setattr(operators, "_BLOCK", 2 * mean[0].numel())
    assert len(make_fx(POOLED[name])(mean, variance).graph.nodes) == nodes
    few = [v[:1, :, :2, :4].clone().requires_grad_() for v in (mean, variance)]
    monkeypatch.setattr(operators, "_BLOCK", 1)
    assert torch.autograd.gradcheck(POOLED[name], few)
