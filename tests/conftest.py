"""Deterministic tests: one seed per test, hypothesis without randomness."""

import signal
import sys

import pytest
import torch
from hypothesis import settings

collect_ignore = ["support"]  # what tests share holds no tests itself

settings.register_profile("ci", max_examples=50, derandomize=True, deadline=None, database=None)
settings.register_profile("long", max_examples=2000, deadline=None)  # --hypothesis-profile=long
settings.load_profile("ci")

# A suite started in the background ignores Ctrl-C, and so would the processes in which tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collectstart() -> None:
    """Every module draws the same numbers when it is read: torch starts each process with another seed."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def seeded():
    """Every test draws the same numbers, whichever tests run before it."""
    torch.manual_seed(0)


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
