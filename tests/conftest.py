"""For all tests: those that need a GPU are left out where there is none, and kernels are compiled by all processes."""

import gc
import os

# Before NumPy comes: the processes of a parallel run take all cores, and OpenBLAS's threads would wait by turning round.
if os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

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
    """Let each process of a parallel run compile its share of the kernels: later they would wait for each other's.

    And what has been collected stay out of garbage collections.
    """
    worker = getattr(session.config, "workerinput", None)
    emulated = sum("emulated" in item.name for item in session.items)
    if worker is not None and AVAILABLE and emulated > 1000:
        compile_share(int(worker["workerid"].removeprefix("gw")), worker["workercount"])
    gc.collect()
    gc.freeze()  # thousands of tests, which every full collection would walk over, and some tests ask for many
