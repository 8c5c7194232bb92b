import pytest
import torch

# the helper module of this folder reports failed assertions like a test does
pytest.register_assert_rewrite("properties")


@pytest.fixture(autouse=True)
def single_thread():
    """On tensors this small threads only wait for each other: up to a hundred times the work."""
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)
