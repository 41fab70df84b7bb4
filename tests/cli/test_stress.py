import cuda_devices
import pytest

from blobmem.memory import stress


def test_a_walk(blobmem):
    result = blobmem("stress", "--steps", 200, "--seed", 3)
    assert result.code == 0, result.err
    (record,) = result.records
    assert (record["steps"], record["seed"], record["result"]) == ("200", "3", "ok")
    assert float(record["steps_per_second"]) > 0


@pytest.mark.parametrize("word", ["cpu", "cuda:", "simulated:4"])
def test_devices_that_cannot_be_walked_on(blobmem, word):
    result = blobmem("stress", "--device", word)
    assert result.code == 2 and "expected simulated, cuda or cuda:N" in result.err


def test_without_a_gpu_it_says_so(blobmem, monkeypatch):
    monkeypatch.setattr("blobmem.devices.cuda.context.count", lambda: 0)
    result = blobmem("stress", "--device", "cuda", "--steps", 5)
    assert result.code == 1 and "Traceback" not in result.err and "event=stress" not in result.out


def test_without_a_seed_it_begins_anywhere_and_says_where(blobmem):
    first, second = (blobmem("stress", "--steps", 5).records[0]["seed"] for _ in range(2))
    assert first != second


def test_a_lost_byte_is_found_and_named(blobmem, monkeypatch):
    check = stress.Machine.check
    steps = []

    def forgetful(machine):
        steps.append(1)
        check(machine)
        if len(steps) == 7:
            raise stress.Mismatch("a byte is gone")

    monkeypatch.setattr(stress.Machine, "check", forgetful)
    result = blobmem("stress", "--steps", 200, "--seed", 3)
    assert result.code == 1 and not result.out
    assert "seed 3" in result.err and "step 7" in result.err and "a byte is gone" in result.err


@pytest.mark.parametrize("word", [pytest.param("cuda:0", marks=cuda_devices.needs_gpu)])
def test_on_a_gpu(blobmem, word):
    result = blobmem("stress", "--steps", 300, "--seed", 3, "--device", word)
    assert result.code == 0, result.err
    (record,) = result.records
    assert (record["steps"], record["device"], record["result"]) == ("300", word, "ok")
