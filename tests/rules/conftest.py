import pytest
import torch


@pytest.fixture(autouse=True)
def single_thread():
    """On tensors this small threads only wait for each other: up to a hundred times the work."""
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)
