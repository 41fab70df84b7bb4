"""For all tests: those that need a GPU are skipped together where there is none."""

from cuda_devices import has_gpu


def pytest_collection_modifyitems(config, items):
    """Leave out, without a GPU, what is marked gpu: thousands of skips would take as long as a part of the tests."""
    if has_gpu():
        return
    left = [item for item in items if item.get_closest_marker("gpu") is not None]
    if left and len(left) < len(items):
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item.get_closest_marker("gpu") is None]
