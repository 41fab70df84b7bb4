"""What runs need: looked at when it may not be met any more."""

import pytest

from blobmem import SimulatedDevice
from blobmem.memory import Side, SyncedMemory
from blobmem.net.needs import Constant, Need, secure


@pytest.mark.parametrize("side", Side)
def test_needs_that_were_met_are_looked_at_again_once_a_memory_has_shrunk(side):
    memory = SyncedMemory(0, SimulatedDevice())
    needs = Constant([Need(memory, side, 4096)])
    for _ in range(2):
        assert needs.missing() == needs.needs
        secure(needs.missing())
        assert needs.missing() == []
        memory.unreserve(side, 0)
