"""For all tests: those that need a GPU are left out where there is none, and kernels are compiled by all processes."""

import gc
import os
from pathlib import Path

import pytest

# Before NumPy comes: the processes of a parallel run take all cores, and OpenBLAS's threads would wait by turning round.
if os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from cuda_devices import has_gpu
from cuda_emulation import AVAILABLE, compile_share

gc.set_threshold(10_000, 20, 50)  # nets, and what numba compiles, are many objects that stay


def pytest_collection_modifyitems(config, items):
    """Put the files directly in tests/ first, and leave out, without a GPU, what is marked gpu.

    A parallel run hands out tests in their order, fewer at a time towards the end: there one process would still be at
    those, each as long as a hundred others, when the rest has none left. And thousands of skips would take as long as a
    part of the tests.
    """
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)
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


@pytest.fixture(autouse=True, scope="module")
def _small_heap():
    """Keep what there is when a module begins (the tests, what numba has read and compiled) out of garbage collections.

    Some tests ask for many, and each would walk over all of it.
    """
    gc.collect()
    gc.freeze()
