import pytest
import torch

from properties import LinearRule
from rule_settings import C, X, normal, positive, reason_of, setting

aten = torch.ops.aten


def batch_norm(x, channels, weight=True, bias=True, eps=1e-5):
    return setting(
        aten.batch_norm.default,
        x,
        C(channels) if weight else None,
        C(channels) if bias else None,
        C(channels, make=normal),
        C(channels, make=positive),
        False,
        0.1,
        eps,
        False,
    )


SETTINGS = [
    batch_norm(X(2, 3), 3),
    batch_norm(X(2, 3, 4), 3),
    batch_norm(X(2, 3, 2, 3), 3),
    batch_norm(X(1, 2, 2, 2, 2), 2),
    batch_norm(X(2, 3), 3, weight=False, bias=False),
    batch_norm(X(2, 3, 4), 3, bias=False),
    batch_norm(X(2, 3, 4), 3, weight=False),
    batch_norm(X(2, 3, 2, 2), 3, eps=0.5),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
class TestBatchNorm(LinearRule):
    pass


def test_batch_statistics_are_refused():
    trained = setting(
        aten.batch_norm.default,
        X(2, 3),
        None,
        None,
        C(3, make=normal),
        C(3, make=positive),
        True,
        0.1,
        1e-5,
        False,
    )
    without = setting(aten.batch_norm.default, X(2, 3), None, None, None, None, False, 0.1, 1e-5, False)
    for refused in (trained, without):
        assert "statistics of the batch" in reason_of(refused)


def test_random_statistics_and_parameters_are_refused():
    for name in ("weight", "bias", "running_mean", "running_var"):
        assert f"{name} is random" in reason_of(SETTINGS[0], name)
