import itertools
import os
import threading
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from fake_driver import FakeDriver
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from blobmem import SimulatedDevice, build_nets
from blobmem.devices.cuda.chunks import NoRoom
from blobmem.devices.cuda.space import ALIGNMENT, Space
from blobmem.footprint import stated_shapes
from blobmem.net.builder import specs_of
from blobmem.proto.text import read_solver
from blobmem.solvers import updater_for

ROOT = Path(__file__).parents[3]
MIB = 1 << 20
CHUNK = 4096


def made(capacity=1 << 50, reservation=lambda nbytes: 64 * CHUNK, **kwargs):
    driver = FakeDriver(capacity=capacity, **kwargs)
    return driver, Space(driver, reservation)


def fill(driver, address, nbytes, seed):
    data = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    driver.write(address, data)
    return data


def test_a_large_allocation_grows_where_it_is_and_nothing_is_copied():
    driver, space = made()
    address = space.allocate(2 * CHUNK)
    data = fill(driver, address, 2 * CHUNK, 1)
    driver.calls.clear()
    assert space.grows_in_place(address, 40 * CHUNK)
    assert space.grow(address, 2 * CHUNK, 40 * CHUNK) == address
    assert driver.calls == {"create": 1, "map": 1}
    assert np.array_equal(driver.read(address, 2 * CHUNK), data)
    assert space.physical_bytes == driver.held == 40 * CHUNK
    driver.calls.clear()
    space.shrink(address, 40 * CHUNK, 2 * CHUNK)
    assert driver.calls == {"synchronize": 1, "unmap": 1, "release": 1}
    assert space.physical_bytes == 2 * CHUNK


def test_two_large_allocations_meet_in_a_chunk():
    driver, space = made()
    first = space.allocate(CHUNK + 1000)
    second = space.allocate(CHUNK + 2000)
    assert space.physical_bytes == 3 * CHUNK
    assert second % CHUNK == 1024
    one, two = fill(driver, first, CHUNK + 1000, 1), fill(driver, second, CHUNK + 2000, 2)
    assert np.array_equal(driver.read(first, one.size), one)
    assert np.array_equal(driver.read(second, two.size), two)
    space.free(first)
    assert space.physical_bytes == 2 * CHUNK
    assert np.array_equal(driver.read(second, two.size), two)
    space.free(second)
    assert driver.state() == ({}, {}, [], 0)


def test_only_the_bytes_in_a_crowded_chunk_are_copied():
    driver, space = made()
    address = space.allocate(3 * CHUNK + 1024)
    neighbour = space.allocate(CHUNK + 3072)
    assert space.physical_bytes == 5 * CHUNK
    data, other = fill(driver, address, 3 * CHUNK + 1024, 1), fill(driver, neighbour, CHUNK + 3072, 2)
    data[-1] += 1
    driver.queue_write(address + data.size - 1, data[-1:])
    copies = []
    driver.copy, copy = lambda *args: (copies.append(args[2]), copy(*args)), driver.copy
    assert space.grow(address, data.size, 20 * CHUNK + 512) == address
    assert copies == [1024]
    assert np.array_equal(driver.read(address, data.size), data)
    assert np.array_equal(driver.read(neighbour, other.size), other)
    assert space.physical_bytes == (3 + 1 + 16 + 1 + 2) * CHUNK
    space.shrink(address, 20 * CHUNK + 512, data.size)
    assert space.physical_bytes == 5 * CHUNK, "what the growth took has been given back"
    assert np.array_equal(driver.read(address, data.size), data)


def test_the_last_chunk_is_used_up_where_nobody_else_is_in_it():
    driver, space = made()
    address = space.allocate(CHUNK + 512)
    driver.calls.clear()
    assert space.grow(address, CHUNK + 512, 2 * CHUNK) == address
    assert not driver.calls
    assert space.physical_bytes == 2 * CHUNK


def test_small_allocations_share_a_chunk_and_grow_into_what_is_free():
    driver, space = made()
    first, second = space.allocate(100), space.allocate(1000)
    assert second == first + 512
    assert space.physical_bytes == CHUNK
    assert space.grows_in_place(first, 512) and not space.grows_in_place(first, 513)
    assert space.grows_in_place(second, 2000)
    assert space.grow(second, 1000, 2000) == second
    data = fill(driver, first, 100, 1)
    moved = space.grow(first, 100, 1500)
    assert moved != first
    assert np.array_equal(driver.read(moved, 100), data)
    assert space.allocate(512) == first
    assert space.physical_bytes == CHUNK


def test_a_small_allocation_becomes_large():
    driver, space = made()
    address = space.allocate(3000)
    data = fill(driver, address, 3000, 1)
    assert not space.grows_in_place(address, 5 * CHUNK)
    large = space.grow(address, 3000, 5 * CHUNK)
    assert np.array_equal(driver.read(large, 3000), data)
    assert space.physical_bytes == 5 * CHUNK
    assert space.grows_in_place(large, 9 * CHUNK)


def test_beyond_its_reservation_a_large_allocation_moves():
    driver, space = made(reservation=lambda nbytes: 2 * nbytes)
    address = space.allocate(2 * CHUNK)
    data = fill(driver, address, 2 * CHUNK, 1)
    assert space.grows_in_place(address, 4 * CHUNK) and not space.grows_in_place(address, 4 * CHUNK + 1)
    moved = space.grow(address, 2 * CHUNK, 5 * CHUNK)
    assert np.array_equal(driver.read(moved, data.size), data)
    assert list(driver.reservations.values()) == [10 * CHUNK]
    assert space.physical_bytes == 5 * CHUNK


def test_where_addresses_are_short_it_reserves_what_it_needs():
    driver, space = made()
    driver.fail_in = 1
    address = space.allocate(3 * CHUNK)
    assert list(driver.reservations.values()) == [3 * CHUNK]
    assert not space.grows_in_place(address, 3 * CHUNK + 1)


def test_a_cut_inside_one_piece_makes_a_smaller_one():
    driver, space = made(capacity=16 * CHUNK)
    address = space.allocate(10 * CHUNK)
    data = fill(driver, address, 10 * CHUNK, 1)
    space.shrink(address, 10 * CHUNK, 4 * CHUNK + 100)
    assert space.physical_bytes == 5 * CHUNK
    assert np.array_equal(driver.read(address, 4 * CHUNK + 100), data[: 4 * CHUNK + 100])
    assert space.grow(address, 4 * CHUNK + 100, 16 * CHUNK) == address
    assert space.physical_bytes == 16 * CHUNK


def test_a_cut_that_has_no_room_keeps_the_piece_for_later():
    driver, space = made(capacity=12 * CHUNK)
    address = space.allocate(10 * CHUNK)
    before = driver.state()
    space.shrink(address, 10 * CHUNK, 4 * CHUNK)
    assert driver.state() == before
    assert space.grow(address, 4 * CHUNK, 12 * CHUNK) == address
    assert space.physical_bytes == 12 * CHUNK


def test_the_growth_that_a_copy_would_not_leave_room_for():
    """A test pass, then a larger step, with room for exactly what the step needs."""
    driver, space = made(capacity=100 * CHUNK, reservation=lambda nbytes: 256 * CHUNK)
    address = space.allocate(40 * CHUNK)
    assert space.grow(address, 40 * CHUNK, 100 * CHUNK) == address
    space.shrink(address, 100 * CHUNK, 40 * CHUNK)
    before = driver.state()
    with pytest.raises(NoRoom):
        space.grow(address, 40 * CHUNK, 101 * CHUNK)
    assert driver.state() == before
    assert space.grow(address, 40 * CHUNK, 100 * CHUNK) == address


def growth_that_fails(at):
    """A growth with all its steps, of which the `at`-th that takes something fails; whether there were so many."""
    driver, space = made()
    address, neighbour = space.allocate(CHUNK + 1024), space.allocate(CHUNK + 3072)
    data, other = fill(driver, address, CHUNK + 1024, 1), fill(driver, neighbour, CHUNK + 3072, 2)
    before = driver.state()
    driver.fail_in = at
    failed = False
    try:
        space.grow(address, data.size, 9 * CHUNK + 512)
    except NoRoom:
        failed = True
        assert driver.state() == before
    driver.fail_in = 0
    assert np.array_equal(driver.read(neighbour, other.size), other)
    assert space.grow(address, data.size, 9 * CHUNK + 512) == address
    assert np.array_equal(driver.read(address, data.size), data)
    assert space.physical_bytes == 12 * CHUNK
    space.free(address)
    space.free(neighbour)
    assert driver.state() == ({}, {}, [], 0)
    return failed


def test_a_growth_may_fail_anywhere():
    failures = [growth_that_fails(at) for at in range(1, 12)]
    steps = 3 + 2 + 1 + 2  # creates; maps of middle and end; addresses for the copy; maps there and in place
    assert failures == [True] * steps + [False] * (11 - steps)


class Allocations(RuleBasedStateMachine):
    """Random calls, with contents, neighbours, failures and what is held checked after each."""

    def __init__(self):
        super().__init__()
        self.driver = FakeDriver(CHUNK, capacity=64 * CHUNK)
        self.space = Space(self.driver, lambda nbytes: 3 * nbytes)
        self.live = {}  # address -> contents
        self.seed = 0
        self.slack = 0  # bytes that cuts without room for another piece may have kept

    def attempt(self, call, *args):
        """The call's result, or None if there was no room, and then nothing has changed."""
        before = self.driver.state()
        try:
            return call(*args)
        except NoRoom:
            assert self.driver.state() == before
            return None
        finally:
            self.driver.fail_in = 0

    def write(self, address, nbytes, start=0):
        """New contents from `start` on, not all of which have arrived."""
        self.seed += 1
        old = self.live.get(address, np.empty(0, np.uint8))
        new = np.random.default_rng(self.seed).integers(0, 256, nbytes - start, np.uint8)
        self.live[address] = np.concatenate([old[:start], new])
        self.driver.queue_write(address + start, new)

    def draw(self, data):
        return data.draw(st.sampled_from(sorted(self.live)))

    sizes = st.one_of(st.integers(1, CHUNK), st.integers(1, 12 * CHUNK), st.integers(1, 12).map(lambda n: n * CHUNK))

    @rule(nbytes=sizes, fail_in=st.integers(0, 8))
    def allocate(self, nbytes, fail_in):
        self.driver.fail_in = fail_in
        address = self.attempt(self.space.allocate, nbytes)
        if address is not None:
            assert address % ALIGNMENT == 0 and address not in self.live
            self.write(address, nbytes)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), more=sizes, fail_in=st.integers(0, 12), undo=st.booleans())
    def grow(self, data, more, fail_in, undo):
        address = self.draw(data)
        old = self.live[address].size
        in_place, held = self.space.grows_in_place(address, old + more), self.space.physical_bytes
        self.driver.fail_in = fail_in
        moved = self.attempt(self.space.grow, address, old, old + more)
        if moved is None:
            return
        assert (moved == address) == in_place
        self.live[moved] = self.live.pop(address)
        if undo and in_place:
            self.space.shrink(moved, old + more, old)
            assert self.space.physical_bytes <= held
        else:
            self.write(moved, old + more, old)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), fail_in=st.integers(0, 8))
    def shrink(self, data, fail_in):
        address = self.draw(data)
        old = self.live[address].size
        new = data.draw(st.integers(1, old))
        if fail_in or self.driver.held + new > self.driver.capacity - CHUNK:
            self.slack += old - new
        self.driver.fail_in = fail_in
        self.space.shrink(address, old, new)
        self.driver.fail_in = 0
        self.live[address] = self.live[address][:new]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data):
        address = self.draw(data)
        self.space.free(address)
        del self.live[address]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def rewrite(self, data):
        address = self.draw(data)
        self.write(address, self.live[address].size)

    @rule()
    def check(self):
        self.driver.synchronize()
        for address, contents in self.live.items():
            assert np.array_equal(self.driver.read(address, contents.size), contents)

    @invariant()
    def nothing_more_is_held(self):
        assert self.space.physical_bytes == self.driver.held
        most = sum((contents.size // CHUNK + 2) * CHUNK for contents in self.live.values())
        assert self.driver.held <= most + self.slack

    def teardown(self):
        self.check()
        for address in self.live:
            self.space.free(address)
        assert self.driver.state() == ({}, {}, [], 0)


Allocations.TestCase.settings = settings(
    max_examples=int(os.environ.get("BLOBMEM_STRESS_EXAMPLES", "60")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestAllocations = Allocations.TestCase


def test_from_many_threads():
    driver, space = made()

    def work(seed):
        random = np.random.default_rng(seed)
        for _ in range(60):
            nbytes = int(random.integers(1, 4 * CHUNK))
            address = space.grow(space.allocate(nbytes), nbytes, 2 * nbytes)
            space.shrink(address, 2 * nbytes, nbytes)
            space.free(address)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert driver.state() == ({}, {}, [], 0)


# What real nets ask for


class Mirror(SimulatedDevice):
    """Does in a space, over chunks of 2 MiB, whatever nets ask of it."""

    def __init__(self):
        super().__init__(compute=False)
        self.driver = FakeDriver(2 * MIB, contents=False)
        self.space = Space(self.driver)
        self.places = {}

    def allocate(self, nbytes, label=""):
        address = super().allocate(nbytes, label)
        self.places[address] = self.space.allocate(nbytes)
        return address

    def grow(self, address, old, new):
        moved = super().grow(address, old, new)
        self.places[moved] = self.space.grow(self.places.pop(address), old, new)
        return moved

    def free(self, address):
        super().free(address)
        self.space.free(self.places.pop(address))

    @property
    def padding(self):
        """As a share of the bytes held."""
        return self.space.physical_bytes / self.statistics.bytes_held - 1


@pytest.mark.parametrize("order", ["train, test", "test, train"])
@pytest.mark.parametrize("model, train, test, most", [("caffenet", 256, 50, 0.01), ("resnet50", 32, 25, 0.03)])
def test_padding_of_real_nets(model, train, test, most, order, monkeypatch):
    monkeypatch.chdir(ROOT)
    device = Mirror()
    solver = f"models/{model}/solver.prototxt"
    specs = specs_of(solver)
    nets = build_nets(
        specs,
        share=True,
        device=device,
        seed=0,
        train_batch=train,
        test_batches=[test],
        input_shapes=stated_shapes(specs),
    )
    update = updater_for(read_solver(solver), nets.train)

    def step():
        nets.train.clear_param_diffs()
        nets.train.run_forward()
        nets.train.run_backward()
        update.run(0)

    passes = [step, nets.tests[0].run_forward]
    for run in passes if order == "train, test" else reversed(passes):
        run()
    assert 0 < device.padding < most
    calls = device.driver.calls.copy()
    for run in passes:
        run()
    assert device.driver.calls == calls, "from the second step on nothing is asked of the driver"
    addresses = sorted((device.places[a], n.nbytes) for a, n in device._allocations.items())
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(addresses))
