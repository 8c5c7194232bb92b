"""Operators of ours are made of torch's own, wherever torch looks into them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from momentprop import gaussian, operators

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
