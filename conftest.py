"""For the tests of both distributions and for the examples in docstrings: one seed each, own rules."""

import signal
import sys

import pytest
import torch
from hypothesis import settings

import momentprop.rules  # noqa: F401  (registers the rules)
from momentprop.rules.registry import RULES

pytest.register_assert_rewrite("properties")  # a module of helpers that fails like a test does

collect_ignore = ["tests/support", "reproduction/tests/support"]  # what tests share holds no tests itself

settings.register_profile("ci", max_examples=50, derandomize=True, deadline=None, database=None)
settings.register_profile("long", max_examples=2000, deadline=None)  # --hypothesis-profile=long
settings.load_profile("ci")

# A suite started in the background ignores Ctrl-C, and so would the processes in which tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collectstart() -> None:
    """Every module draws the same numbers when it is read: torch starts each process with another seed."""
    torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def seeded():
    """Every test draws the same numbers, whichever tests run before it.

    Tests run on the CPU. For other devices `torch.manual_seed` would keep every seed with a traceback, which
    takes 0.4 ms a test.
    """
    torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def compiled_anew():
    """Dynamo counts compilations of one function over all tests, and refuses after eight."""
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@pytest.fixture(scope="module")
def one_thread():
    """For many small sums, which threads only slow down, and for sums in one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def own_rules():
    """A rule that a test or an example registers does not outlive it."""
    before = dict(RULES._rules)
    yield
    RULES._rules.clear()
    RULES._rules.update(before)
