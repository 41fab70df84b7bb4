"""The device that most tests of the memory core run on."""

import pytest

from blobmem.devices import SimulatedDevice


@pytest.fixture
def device():
    return SimulatedDevice(64 << 20)
