"""Moments of small networks in every tier are those on record, to twelve digits.

A restructuring keeps every number. Where a change of method moves some, `golden_record.py NAME ...`
writes them anew, and CHANGED says what moved and why.
"""

import json

import pytest
import torch
from golden_networks import NETWORKS
from golden_record import FILE, TIERS, moments_of

RECORD = json.loads(FILE.read_text())

# Networks whose numbers are not those of the first record.
_ONE_CASE = "of a small layer's dropped inputs the largest goes case by case, not three; more inputs by pairs"
_HEAD = "a final softmax or sigmoid is integrated over the covariance of its logits; " + _ONE_CASE
_GATES = "tanh and sigmoid of gates are one sum: means by 1e-8 of their largest, variances by 4e-6"
_MAXIMA = "the maximum of dropped values in any window is taken case by case, in every tier"
CHANGED = {
    "attention_by_hand": "images of one tensor count as uncorrelated; fixed-sign deviations are gone",
    "deep_cnn": f"fixed-sign deviations are gone; {_MAXIMA}",
    "dropout_before_pooling": _MAXIMA,
    "unsupported_sample": "operators that work element by element are taken by quadrature, not by a sample",
    "unsupported_linearize": "operators that work element by element are taken by quadrature in any case",
    "gru_first": "a number of steps that the tracer works out is no free size, so it converts",
    "dense_relu": _ONE_CASE,
    "dense_tanh": _ONE_CASE,
    "dense_gelu": _ONE_CASE,
    "dense_silu": _ONE_CASE,
    "dense_elu": _ONE_CASE,
    "dense_hardswish": _ONE_CASE,
    "dense_softplus": _ONE_CASE,
    "dense_leakyrelu": _ONE_CASE,
    "dense_softshrink": _ONE_CASE,
    "dense_mish": _ONE_CASE,
    "dropout_on_input_cases": _ONE_CASE,
    "rare_dropout_twice": _ONE_CASE,
    "deep_dense": _ONE_CASE,
    "batch_norm_dense": _ONE_CASE,
    "softmax_head": _HEAD,
    "log_softmax_head": _HEAD,
    "sigmoid_head": _HEAD,
    "softmax_of_two": _HEAD,
    "alpha_dropout": _ONE_CASE,
    "most_likely_outputs": "beside the largest, probes are swept, which scale the other variances; "
    + _ONE_CASE,
    "chosen_outputs": _ONE_CASE,
    "uncertain_input_and_dropout": _ONE_CASE,
    "two_outputs": _ONE_CASE,
    "lstm": _GATES,
    "rnn_tagger": _GATES,
}


def test_record_is_complete():
    assert list(RECORD) == list(NETWORKS)
    assert set(CHANGED) <= set(NETWORKS)


@pytest.mark.parametrize("name", NETWORKS)
def test_moments_are_those_on_record(name):
    for tier in TIERS:
        found, expected = moments_of(name, tier), RECORD[name][tier]
        assert found.keys() == expected.keys(), tier
        for part, values in expected.items():
            mine, theirs = (torch.tensor(v, dtype=torch.float64) for v in (found[part], values))
            error = (mine - theirs).abs().max() / theirs.abs().max().clamp_min(1e-300) if values else 0.0
            assert error <= 1e-12, f"{tier}, {part}: off by {error:.1e}"
