import pytest

from blobmem.cli import device_query
from blobmem.ops.host.parallel import num_threads, set_num_threads


@pytest.fixture
def threads():
    yield set_num_threads
    set_num_threads(0)


def test_the_cpu(blobmem, threads):
    threads(3)
    result = blobmem("device-query")
    assert result.code == 0 and not result.err
    assert result.out.startswith("event=device device=cpu model=")
    assert result.out.rstrip().endswith("threads=3") and " page_bytes=" in result.out


def test_a_simulated_device(blobmem):
    (facts,) = blobmem("device-query", "--device", "simulated:8MiB").events("device")
    assert facts == {
        "event": "device", "device": "simulated", "memory_bytes": str(2**23), "free_bytes": str(2**23),
        "threads": str(num_threads()),
    }  # fmt: skip


def test_for_people(capsys):
    facts = {"device": "x", "page_bytes": 4096, "memory_bytes": 3 * 2**30, "cores": 4}
    shown = [f"{device_query._title(name)}: {device_query._text(name, value)}" for name, value in facts.items()]
    assert shown == ["device: x", "page: 4096 bytes", "memory: 3072.0 MiB", "cores: 4"]


def test_a_wrong_number_of_threads(blobmem, monkeypatch):
    monkeypatch.setattr("blobmem.ops.host.parallel._threads", 0)
    monkeypatch.setenv("BLOBMEM_NUM_THREADS", "many")
    result = blobmem("device-query")
    assert result.code == 1 and "BLOBMEM_NUM_THREADS is 'many'" in result.err


def test_a_device_that_is_not_there(blobmem):
    result = blobmem("device-query", "--device", "cuda:99")
    assert result.code != 0 and "cuda" in result.err.lower()
