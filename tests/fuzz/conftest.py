import pytest
from strangers import memory_within


@pytest.fixture(autouse=True)
def little_memory():
    """No damaged file makes the process hold much more, whatever it claims to contain."""
    with memory_within(2**28):
        yield
