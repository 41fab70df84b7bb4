import os
import warnings

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import blobmem.memory as memory_package
from blobmem.memory import SyncedMemory, stress
from blobmem.memory.device_side import DeviceSide
from blobmem.memory.host_side import HostSide
from blobmem.memory.slot import Slot
from blobmem.memory.stress import Machine, Mismatch, run


def as_rule(name):
    """The machine's rule of that name, with what it draws coming from hypothesis."""

    @rule(data=st.data())
    def step(self, data):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            getattr(self.machine, name)(lambda n: data.draw(st.integers(0, n - 1)))

    step.__name__ = name
    return step


class MemoryIsTwoPlainArrays(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.machine = Machine()

    @invariant()
    def nothing_is_lost(self):
        self.machine.check()

    def teardown(self):
        self.machine.device.synchronize()
        self.machine.check()
        self.machine.close()


for _name in Machine.rules:
    setattr(MemoryIsTwoPlainArrays, _name, as_rule(_name))

MemoryIsTwoPlainArrays.TestCase.settings = settings(
    max_examples=int(os.environ.get("BLOBMEM_STRESS_EXAMPLES", "60")),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestMemoryIsTwoPlainArrays = MemoryIsTwoPlainArrays.TestCase


def test_a_walk():
    seen = []
    counts = run(2000, seed=1, progress=seen.append)
    assert set(counts) == set(Machine.rules) and counts.total() == 2000
    assert seen[-1] == 2000 and seen == sorted(seen)


def test_a_walk_is_the_same_for_the_same_seed():
    assert run(50, seed=3) == run(50, seed=3)


def test_a_walk_in_debug_mode_reports_no_late_write(monkeypatch):
    monkeypatch.setattr(memory_package, "debug", True)
    run(1000, seed=2)


def break_state(monkeypatch):
    """What Caffe's pull request did: one state for the whole memory, whatever part was synced."""
    put = SyncedMemory._put

    def whole(self, start, stop, bits):
        put(self, 0, min(self.cpu_capacity, self.gpu_capacity) if bits == 3 else stop, bits)

    monkeypatch.setattr(SyncedMemory, "_put", whole)


def break_waiting(monkeypatch):
    monkeypatch.setattr(DeviceSide, "land_for_host", lambda *args: False)


def break_order_of_streams(monkeypatch):
    monkeypatch.setattr(DeviceSide, "order", lambda *args: False)


def break_zeroing(monkeypatch):
    monkeypatch.setattr(SyncedMemory, "clear", lambda self, offset, nbytes: self._put(offset, offset + 1, 0))


def break_epoch(monkeypatch):
    monkeypatch.setattr(SyncedMemory, "_put", lambda self, start, stop, bits: self._extents.put(start, stop, bits))


def break_landing(monkeypatch):
    monkeypatch.setattr(DeviceSide, "land", lambda self: False)


def break_fetching(monkeypatch):
    monkeypatch.setattr(SyncedMemory, "fetch", lambda self: None)


def break_adoption(monkeypatch):
    def adopt(self, array):
        self._far.land()
        self._host.adopt(array)
        self.epoch += 1

    monkeypatch.setattr(SyncedMemory, "set_host_array", adopt)


def break_pinning(monkeypatch):
    monkeypatch.setattr(HostSide, "wants_pin", lambda self, stop: False)


def break_places(monkeypatch):
    """A slot that begins where its arena does."""
    monkeypatch.setattr(Slot, "_at", lambda self, offset, nbytes: offset)


def break_epoch_of_slots(monkeypatch):
    """Slots that do not see what happens to their arena by other ways."""
    monkeypatch.setattr(Slot, "epoch", 0)


def break_clearing_of_slots(monkeypatch):
    monkeypatch.setattr(Slot, "clear", lambda self, offset, nbytes: None)


@pytest.mark.parametrize(
    "mutation",
    [
        break_state, break_waiting, break_order_of_streams, break_zeroing, break_epoch, break_landing, break_fetching,
        break_adoption, break_pinning, break_places, break_epoch_of_slots, break_clearing_of_slots,
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_machine_sees_a_memory_that_is_wrong(monkeypatch, mutation):
    mutation(monkeypatch)
    with pytest.raises(Mismatch, match=r"seed 1, step \d+, after .*stress.run\(\d+, 1\)"):
        run(5000, seed=1)


def test_command_line(capsys, monkeypatch):
    assert stress.main(["200", "5"]) == 0
    assert "200 steps from seed 5" in capsys.readouterr().out
    break_state(monkeypatch)
    assert stress.main(["5000", "5"]) == 1
    assert "seed 5, step" in capsys.readouterr().err
