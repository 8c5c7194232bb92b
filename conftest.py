"""For tests and for the examples in docstrings alike."""

import pytest

import momentprop.rules  # noqa: F401  (registers the rules)
from momentprop.rules.registry import RULES


@pytest.fixture(autouse=True)
def own_rules():
    """A rule that a test or an example registers does not outlive it."""
    before = dict(RULES._rules)
    yield
    RULES._rules.clear()
    RULES._rules.update(before)
