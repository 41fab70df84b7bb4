"""For all tests: those that need a GPU are left out where there is none, and kernels are compiled by all processes."""

from cuda_devices import has_gpu
from cuda_emulation import AVAILABLE, compile_share


def pytest_collection_modifyitems(config, items):
    """Leave out, without a GPU, what is marked gpu: thousands of skips would take as long as a part of the tests."""
    if has_gpu():
        return
    left = [item for item in items if item.get_closest_marker("gpu") is not None]
    if left and len(left) < len(items):
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item.get_closest_marker("gpu") is None]


def pytest_collection_finish(session):
    """Let each process of a parallel run compile its share of the kernels: later they would wait for each other's."""
    worker = getattr(session.config, "workerinput", None)
    emulated = sum("emulated" in item.name for item in session.items)
    if worker is not None and AVAILABLE and emulated > 1000:
        compile_share(int(worker["workerid"].removeprefix("gw")), worker["workercount"])
