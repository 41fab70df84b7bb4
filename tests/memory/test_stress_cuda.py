"""The state machine on a GPU."""

import functools
import os

import pytest
from cuda_devices import needs_gpu

from blobmem.memory import stress
from blobmem.memory.device_side import DeviceSide
from blobmem.memory.stress_cuda import StressedCuda

pytestmark = [*needs_gpu]

STEPS = int(os.environ.get("BLOBMEM_STRESS_STEPS", "100000")) // 10  # of each walk


@pytest.mark.parametrize("seed", range(10))
def test_a_walk(seed):
    counts = stress.run(STEPS, seed, make_device=StressedCuda)
    assert set(counts) == set(stress.Machine.rules)


def test_a_walk_where_all_growth_moves():
    stress.run(5000, 4, make_device=functools.partial(StressedCuda, red_zones=True))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_machine_sees_a_memory_that_does_not_wait(monkeypatch):
    monkeypatch.setattr(DeviceSide, "order", lambda *_: False)
    with pytest.raises(stress.Mismatch):
        stress.run(20000, 0, make_device=StressedCuda)
