"""For all tests: those that need a GPU are left out where there is none, and what is compiled is kept between runs."""

import gc
import os
import sys
import tempfile

import pytest

# Before NumPy comes: the processes of a parallel run take all cores, and OpenBLAS's threads would wait by turning round.
if os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# All processes, and later runs of other checkouts, share what numba makes: each file is named by all that it is made of.
os.environ.setdefault("NUMBA_CACHE_DIR", f"{tempfile.gettempdir()}/blobmem-kernels-{os.getuid()}")

# Where Python is not to write beside modules, what it makes of them is kept elsewhere: each process of a run, and each
# that a test starts, would compile all that it imports.
if sys.dont_write_bytecode:
    sys.dont_write_bytecode, sys.pycache_prefix = False, f"{tempfile.gettempdir()}/blobmem-modules-{os.getuid()}"
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix

from cuda_devices import has_gpu
from cuda_emulation import forget_workspaces

from blobmem.net.plan import arena, levels, rounds, sooner, ways

gc.set_threshold(10_000, 20, 50)  # nets, and what numba compiles, are many objects that stay


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Let a process that has run its share take from another's, as the slow tests are next to each other.

    In xdist's usual way, which hands out tests in their order, one process had all of tests/net/plan, and the other none
    left long before.
    """
    if config.getoption("dist") == "load":
        from xdist.scheduler import WorkStealingScheduling

        return WorkStealingScheduling(config, log)


def pytest_collection_modifyitems(config, items):
    """Leave out, without a GPU, what is marked gpu: thousands of skips would take as long as a part of the tests."""
    if has_gpu():
        return
    left = [item for item in items if item.get_closest_marker("gpu") is not None]
    if left and len(left) < len(items):
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item.get_closest_marker("gpu") is None]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    """Give back what emulated devices hold for a thread: gigabytes in a run, and a fresh page takes longer than a used one."""
    forget_workspaces()


@pytest.fixture(autouse=True, scope="session")
def _searches():
    """Plans are searched for: not what another test, or run, has found for a net and kept."""
    from blobmem.net.plan import levels

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(levels.Kept, "find", lambda kept: None)
        patch.setattr(levels.Kept, "keep", lambda kept, found: None)
        yield


@pytest.fixture(autouse=True, scope="module")
def _small_heap():
    """Keep what there is when a module begins (the tests, what numba has read and compiled) out of garbage collections.

    Some tests ask for many, and each would walk over all of it.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def few_plans():
    """Of the plans that are compared where there is no room for all, which take most of the time, few are made, and
    layouts are looked for less long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena, "WORK", arena.WORK // 10)
        patch.setattr(arena, "LEAST", arena.LEAST // 10)
        patch.setattr(levels, "LEVELS", levels.LEVELS[1::2])
        patch.setattr(sooner, "PARTS", sooner.PARTS[1::3])
        patch.setattr(sooner, "WORK", sooner.WORK // 100)
        patch.setattr(sooner, "MORE", sooner.MORE // 1000)
        patch.setattr(levels, "REFINED", 1)
        patch.setattr(levels, "STAYING", ())
        patch.setattr(rounds, "WALKS", rounds.WALKS // 32)
        patch.setattr(ways, "PRICES", ways.PRICES[-1:])
        patch.setattr(ways, "MADE", 2)
        patch.setattr(ways, "COMPARED", 1)
        yield
