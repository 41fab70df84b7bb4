"""Slots: memories that lie over each other in an arena, against plain bytes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blobmem import SimulatedDevice
from blobmem.devices import HOST
from blobmem.errors import BlobmemError
from blobmem.memory import Intent, Side, SyncedMemory
from blobmem.memory.blob import Blob
from blobmem.memory.slot import Slot

BLOCK = 512


def arena_on(device):
    return SyncedMemory(0, device, name="arena", pinnable=False)


def values(memory, offset, nbytes):
    memory.access(Side.HOST, offset, nbytes, Intent.READ)
    return memory.host_array(offset, (nbytes,), np.uint8, writeable=False).tolist()


def fill(memory, side, offset, nbytes, value, intent=Intent.OVERWRITE, stream=None):
    address = memory.access(side, offset, nbytes, intent, stream)
    if side is Side.HOST:
        memory.host_array(offset, (nbytes,), np.uint8, lend=False)[...] = value
    else:
        memory.device.memset(address, value, nbytes, stream)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["read", "write", "overwrite", "clear", "is zero", "grow", "trim"]),
        st.sampled_from([Side.HOST, Side.DEVICE]),
        st.integers(0, 3),  # slot
        st.integers(0, 1),  # of its two halves; beyond: all
        st.integers(1, 255),
        st.integers(0, 2),  # stream
    ),
    max_size=30,
)


@given(STEPS, st.sampled_from([7, BLOCK, 3 * BLOCK + 1]))
@settings(max_examples=80, deadline=None)
def test_a_byte_written_through_one_is_what_all_read(steps, nbytes):
    """On two sides and two streams, slots that overlap; the model is an array of bytes."""
    device = SimulatedDevice()
    arena = arena_on(device)
    streams = [None, device.create_stream(), device.create_stream()]
    slots = [Slot(arena, at * BLOCK, nbytes, name=str(at)) for at in (0, 1, 1, 3)]
    model = np.zeros(8 * BLOCK, np.uint8)
    for what, side, index, half, value, stream in steps:
        slot = slots[index]
        offset = half * BLOCK if nbytes > BLOCK else 0
        start, stop = slot.place.offset + offset, slot.place.offset + nbytes
        count = stop - start
        if what in ("write", "overwrite"):
            fill(slot, side, offset, count, value, what, streams[stream] if side is Side.DEVICE else None)
            model[start:stop] = value
        elif what == "clear":
            slot.clear(offset, count)
            model[start:stop] = 0
        elif what == "is zero":
            assert not slot.is_zero(offset, count) or not model[start:stop].any()
        elif what == "grow":
            arena.reserve(side, 8 * BLOCK)
        elif what == "trim":
            arena.trim()
        else:
            assert values(slot, offset, count) == model[start:stop].tolist()
    for slot in slots:
        at = slot.place.offset
        assert values(slot, 0, nbytes) == model[at : at + nbytes].tolist()


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["fill", "use", "read", "other"])), max_size=25))
@settings(max_examples=80, deadline=None)
def test_at_the_same_epoch_another_access_would_change_nothing(steps):
    """What bound schedules rely on, across slots that overlap."""
    device = SimulatedDevice()
    arena = arena_on(device)
    slots = [Slot(arena, at * BLOCK, 2 * BLOCK, name=str(at)) for at in range(3)]
    bound = {}
    for index, what in steps:
        slot = slots[index]
        if what == "other":
            slot.epoch += 2
        elif what == "read":
            values(slot, 0, 2 * BLOCK)
        else:
            intent = Intent.OVERWRITE if what == "fill" else Intent.READ
            bound[index, intent] = slot.access(Side.DEVICE, 0, 2 * BLOCK, intent), slot.epoch
        for (at, intent), (address, epoch) in bound.items():
            if slots[at].epoch == epoch:
                before = arena.epoch, list(arena._extents), device.statistics.snapshot()
                assert slots[at].access(Side.DEVICE, 0, 2 * BLOCK, intent) == address
                assert before == (arena.epoch, list(arena._extents), device.statistics.snapshot())


@pytest.mark.parametrize(
    "use",
    [
        lambda slot: slot.access(Side.HOST, 0, 801, Intent.READ),
        lambda slot: slot.access(Side.DEVICE, 512, 400, Intent.OVERWRITE),
        lambda slot: slot.clear(0, 801),
        lambda slot: slot.reserve(Side.DEVICE, 801),
        lambda slot: slot.resident_side(0, 801),
        lambda slot: slot.is_at_host(0, 801),
        lambda slot: slot.is_zero(512, 400),
    ],
)
def test_beyond_its_end_there_are_the_bytes_of_others(use):
    arena = arena_on(SimulatedDevice())
    slot = Slot(arena, 512, 800, name="conv1")
    with pytest.raises(BlobmemError, match=r"'conv1' are beyond the 800 .*net.reshape\(\)"):
        use(slot)
    assert arena.gpu_capacity == arena.cpu_capacity == 0


def test_it_cannot_become_an_array_of_the_users_or_move():
    slot = Slot(arena_on(SimulatedDevice()), 0, 800, name="conv1")
    for use in (
        lambda: slot.set_host_array(np.zeros(800, np.uint8)),
        lambda: slot.set_device_array(1, 800, object()),
        lambda: slot.move_to(HOST),
    ):
        with pytest.raises(BlobmemError, match=r"'conv1' takes turns .*keep=\['conv1'\]"):
            use()


def test_capacity_is_that_of_its_part():
    device = SimulatedDevice()
    arena = arena_on(device)
    first, second = Slot(arena, 0, 800), Slot(arena, 512, 800)
    first.reserve(Side.DEVICE, 700)
    assert (first.gpu_capacity, second.gpu_capacity, second.cpu_capacity) == (700, 188, 0)
    second.unreserve(Side.DEVICE, 0)
    assert (first.gpu_capacity, second.gpu_capacity, device.statistics.bytes_held) == (512, 0, 512)


def test_the_arena_keeps_what_a_slot_may_use_and_gives_back_the_rest():
    device = SimulatedDevice()
    arena = arena_on(device)
    arena.reserve(Side.DEVICE, 5000)
    slot = Slot(arena, 1024, 800)
    assert slot.trim() == 0 and arena.trim() == 5000 - 1824
    del slot
    assert arena.trim() == 1824 and device.statistics.bytes_held == 0


def test_the_writer_moves_the_epoch_only_of_a_slot_whose_array_was_handed_out():
    arena = arena_on(SimulatedDevice())
    seen, other = Slot(arena, 0, 800), Slot(arena, 0, 800)
    blob = Blob(200, device=arena.device)
    blob.bind_data(seen)
    fill(seen, Side.DEVICE, 0, 800, 1)
    before = seen.epoch, other.epoch
    seen.set_writer("net")
    assert (seen.epoch, other.epoch) == before
    _ = blob.data
    before = seen.epoch, other.epoch, arena.epoch
    seen.set_writer("spent")
    other.set_writer("spent")
    assert seen.epoch > before[0] and (other.epoch, arena.epoch) == before[1:]
    assert other.hold_device().memory is arena


def test_a_clear_that_is_undone_leaves_the_epoch_as_it_was():
    arena = arena_on(SimulatedDevice())
    slot = Slot(arena, 512, 512)
    slot.epoch += 4
    fill(slot, Side.DEVICE, 0, 512, 3)
    epoch = slot.epoch
    slot.clear(0, 512)
    assert slot.is_cleared_since(epoch, 0, 512) and not slot.is_cleared_since(epoch - 2, 0, 512)
    assert slot.refill(epoch, 0, 512) and slot.epoch == epoch


def test_what_is_in_an_arena_is_never_page_locked():
    class Locking(SimulatedDevice):
        def pin(self, address, nbytes):
            return True

        def unpin(self, address):
            pass

    device = Locking()
    arena = arena_on(device)
    slot = Slot(arena, 0, 1 << 20)
    for _ in range(4):
        fill(slot, Side.DEVICE, 0, 1 << 20, 5)
        assert values(slot, 0, 1 << 20)[0] == 5
    slot.pin()
    assert slot.pinned_bytes == arena.pinned_bytes == 0
    own = SyncedMemory(0, device)
    for _ in range(4):
        fill(own, Side.DEVICE, 0, 1 << 20, 5)
        values(own, 0, 1 << 20)
    assert own.pinned_bytes > 0, "or this says nothing"


def test_two_slots_each_know_their_blobs_and_the_others_bytes():
    """A blob in a slot is a blob: NumPy's face, reshape, and growth beyond the place, which is refused."""
    arena = arena_on(SimulatedDevice())
    a, b = Blob(100, device=arena.device, name="a"), Blob(100, device=arena.device, name="b")
    a.bind_data(Slot(arena, 0, 400, "a"))
    b.bind_data(Slot(arena, 0, 400, "b"))
    assert a.data_view.memory is not b.data_view.memory
    a.data[...] = 7
    assert (b.cpu_data() == 7).all()
    a.reshape(50)
    assert a.cpu_data().shape == (50,)
    a.reshape(101)
    with pytest.raises(BlobmemError, match="plans anew"):
        _ = a.data
