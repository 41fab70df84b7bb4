"""What devices say of themselves."""

import mmap
import os

import pytest

from blobmem.devices import HOST, SimulatedDevice, processor

CPUINFO = """processor\t: 0
model name\t: Intel(R)  Xeon(R) @ 2.50GHz
physical id\t: 0
core id\t\t: 0

processor\t: 1
model name\t: Intel(R)  Xeon(R) @ 2.50GHz
physical id\t: 0
core id\t\t: 0

processor\t: 2
physical id\t: 1
core id\t\t: 0
"""


def test_the_host():
    facts = HOST.describe()
    assert facts["device"] == "cpu" and facts["model"]
    assert facts["page_bytes"] == mmap.PAGESIZE
    assert 1 <= facts["usable_processors"] <= facts["processors"] == os.cpu_count()
    if facts["memory_bytes"] is not None:
        assert 0 < facts["available_bytes"] <= facts["memory_bytes"]


def test_the_simulated_device():
    device = SimulatedDevice(2**20)
    device.allocate(1000)
    assert device.describe() == {"device": "simulated", "memory_bytes": 2**20, "free_bytes": 2**20 - 1000}


@pytest.fixture
def cpuinfo(tmp_path, monkeypatch):
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(processor, "_CPUINFO", path)
    return path


def test_linux_tells_model_and_cores(cpuinfo):
    cpuinfo.write_text(CPUINFO)
    assert processor.model() == "Intel(R) Xeon(R) @ 2.50GHz"
    assert processor.cores() == 2  # the first two processors share one


def test_a_machine_that_tells_less(cpuinfo):
    cpuinfo.write_text("processor\t: 0\nBogoMIPS\t: 50\n\nprocessor\t: 1\n")
    assert processor.cores() is None and processor.model()
    cpuinfo.unlink()
    assert processor.cores() is None and processor.model()
