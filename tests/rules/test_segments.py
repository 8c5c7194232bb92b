"""Reductions over segments."""

import pytest
import torch

from momentprop.moments import Moments
from properties import ApproximateRule, LinearRule
from rule_settings import C, X, reason_of, setting

aten = torch.ops.aten


def rows(*values):
    return C(2, len(values), make=lambda shape, generator: torch.tensor([values, values[::-1]]))


SUMS = [
    setting(aten.scatter_reduce.two, *args, reduce, include_self=include_self)
    for reduce in ("sum", "mean")
    for include_self in (True, False)
    for args in (
        (X(2, 4), 1, rows(3, 3), X(2, 2)),
        (C(2, 4), -1, rows(3, 3, 0), X(2, 4)),
        (X(2, 4), 0, rows(1, 1, 0), C(2, 3)),
    )
]


@pytest.mark.parametrize("setting", SUMS, ids=str)
class TestSumOfASegment(LinearRule):
    pass


GREATEST = [
    setting(aten.scatter_reduce.two, *args, reduce, include_self=include_self)
    for reduce in ("amax", "amin")
    for include_self in (True, False)
    for args in (
        (X(2, 4), 1, rows(3, 3, 0, 3), X(2, 4)),
        (C(2, 4), -1, rows(3, 3, 1, 1), X(2, 5)),
        (X(2, 4), 0, rows(1, 0, 1), C(2, 3)),
    )
]


@pytest.mark.parametrize("setting", GREATEST, ids=str)
class TestGreatestOfASegment(ApproximateRule):
    unexplained = 1e-9
    overexplained = 0.05  # of correlated winners
    mean_bound = 0.005
    variance_bound = 0.03


@pytest.mark.parametrize("fill", [float("-inf"), -1e30])
def test_greatest_of_nothing_is_what_was_there(fill):
    rule = setting(aten.scatter_reduce.two).rule
    src = Moments(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 4.0]))
    out = rule(torch.full((3,), fill), 0, torch.tensor([2, 1]), src, "amax")
    assert out.mean[0] == fill
    torch.testing.assert_close(out.mean[1:], torch.tensor([2.0, 1.0]), rtol=1e-3, atol=0)
    torch.testing.assert_close(out.variance, torch.tensor([0.0, 4.0, 0.0]), rtol=1e-2, atol=0)


def test_products_are_refused():
    refused = setting(aten.scatter_reduce.two, C(2, 4), 1, rows(3, 3), X(2, 2), "prod")
    assert "product" in reason_of(refused)
