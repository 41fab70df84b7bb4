"""The stress test of SyncedMemory: a random walk over everything one can do to a memory, against two plain byte arrays.

`run(steps, seed)` walks; `python -m blobmem.memory.stress` does it from the command line. A rule takes `draw`, a
function that gives an integer from 0 up to, not including, its argument: here from a seeded generator, in the tests
from hypothesis, which then shrinks what it finds.
"""

from __future__ import annotations

import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from blobmem.devices.base import Stream
from blobmem.errors import BlobmemError, DeviceError, OutOfDeviceMemory
from blobmem.memory.slot import Slot
from blobmem.memory.stress_model import (
    BLOCKS,
    LIMIT,
    SLOTS,
    STREAMS,
    VIEWS,
    CrampedDevice,
    CrampedMemory,
    Draw,
    Mismatch,
    Model,
)
from blobmem.memory.views import ALIGNMENT, Intent, Side, View

_RULES: dict[str, int] = {}


def rule(weight: int) -> Callable[[Any], Any]:
    """Mark a method of Machine as a rule, taken this often among all in a walk."""

    def mark(method: Any) -> Any:
        _RULES[method.__name__] = weight
        return method

    return mark


class Machine(Model):
    """The rules. `rules` lists their names with their weights; each raises Mismatch as soon as anything differs."""

    rules = _RULES

    def __init__(self, make_device: Callable[[], Any] = CrampedDevice) -> None:
        super().__init__(make_device)
        self.threads: ThreadPoolExecutor | None = None

    def close(self) -> None:
        """End the threads, if there are any, and let the devices go."""
        if self.threads is not None:
            self.threads.shutdown()
        self.device.close()
        self.other.close()

    # Rules: views and sizes

    @rule(10)
    def make_view(self, draw: Draw) -> None:
        view = self.memory.view(*self._range(draw))
        if len(self.views) < VIEWS:
            self.views.append(view)
        else:
            self.views[draw(VIEWS)] = view

    @rule(2)
    def drop_view(self, draw: Draw) -> None:
        if len(self.views) > 1:
            del self.views[draw(len(self.views))]

    @rule(6)
    def make_slot(self, draw: Draw) -> None:
        """A place in the memory, which is a memory to whoever has views of it; accesses go through one by chance."""
        slot = Slot(self.memory, *self._range(draw), "a slot")
        if len(self.slots) < SLOTS:
            self.slots.append(slot)
        else:
            self.slots[draw(SLOTS)] = slot

    @rule(2)
    def drop_slot(self, draw: Draw) -> None:
        if self.slots:
            del self.slots[draw(len(self.slots))]

    @rule(4)
    def use_whole_slot(self, draw: Draw) -> None:
        """What a slot says of itself, and the calls on all of it."""
        if not self.slots:
            return
        slot = self.slots[draw(len(self.slots))]
        start, nbytes, kind = slot.place.offset, slot.place.nbytes, draw(5)
        if kind == 0:
            before, own = self.memory.gpu_capacity, slot.gpu_capacity
            slot.reserve(Side.DEVICE, nbytes)
            self._require(slot.gpu_capacity == nbytes, "what a slot reserved is not there")
            if own < nbytes:
                slot.unreserve(Side.DEVICE, own)
                self._require(self.memory.gpu_capacity == max(before, start), "a slot's unreserve kept something")
        elif kind == 1:
            self._let_go(start, start + nbytes)
            slot.async_gpu_push(self.streams[draw(STREAMS)])
            for _, _, bits in self.memory._extents.runs(start, start + nbytes):
                self._require(bool(bits & Side.DEVICE), "something of a slot was not pushed")
        elif kind == 2:
            self._let_go(start, start + nbytes)
            slot.clear(0, nbytes)
            self._require(slot.is_zero(0, nbytes), "a cleared slot is not zero")
            self._wrote(start, 0, start + nbytes)
        else:
            slot.fetch()
            self._require(slot.cpu_capacity == nbytes, "what a slot fetched is not there")
            self._same(slot.host_array(0, (nbytes,), np.uint8, False), self.host[start : start + nbytes], "slot", start)

    @rule(4)
    def change_size(self, draw: Draw) -> None:
        size = draw(LIMIT + 1) if draw(3) else 0
        self.memory.set_size(size)
        self._require(self.memory.size == size, "set_size was not heard")

    @rule(2)
    def reserve(self, draw: Draw) -> None:
        side, nbytes = (Side.HOST, Side.DEVICE)[draw(2)], draw(LIMIT + 1)
        before = self._capacity(side)
        self.memory.reserve(side, nbytes)
        self._require(self._capacity(side) >= nbytes, f"{nbytes} bytes reserved at the {side.name} are not there")
        if nbytes > before and draw(2):
            self.memory.unreserve(side, before)
            self._require(self._capacity(side) == before, "unreserve kept something")

    # Rules: the host side

    @rule(12)
    def read_on_host(self, draw: Draw) -> None:
        view = self._view(draw)
        got = self._to_host(draw, view, Intent.READ)
        self._same(got, self.host[view.offset : view.offset + view.nbytes], "read on host", view.offset)
        self._require(not got.flags.writeable, "an array to read is writable")

    @rule(8)
    def write_on_host(self, draw: Draw) -> None:
        view = self._view(draw)
        array = self._to_host(draw, view, Intent.WRITE)
        start, stop = self._part(draw, view.nbytes)
        data = self._data(draw, stop - start)
        array[start:stop] = data
        self._wrote(view.offset + start, data)
        self._same(array, self.host[view.offset : view.offset + view.nbytes], "write on host", view.offset)
        if draw(2):
            self._hold(view, array[start:stop], start)

    @rule(6)
    def overwrite_on_host(self, draw: Draw) -> None:
        view = self._view(draw)
        array, data = self._to_host(draw, view, Intent.OVERWRITE), self._data(draw, view.nbytes)
        array[:] = data
        self._wrote(view.offset, data)
        if draw(2):
            self._hold(view, array, 0)

    @rule(6)
    def write_through_held_array(self, draw: Draw) -> None:
        """A write through an array counts until the other side is next accessed."""
        if not self.held:
            return
        held = self.held[draw(len(self.held))]
        if held.counts and self._over_our_pages(held.array):
            data = self._data(draw, held.array.size)
            held.array[:] = data
            self._wrote(held.start, data)
        else:
            held.array.sum()  # it is valid memory still

    @rule(2)
    def drop_held_array(self, draw: Draw) -> None:
        if self.held:
            del self.held[draw(len(self.held))]

    @rule(2)
    def pin(self, draw: Draw) -> None:
        memory = self.memory
        memory.pin()
        holds = memory.adopted or memory.pinned_bytes >= memory.cpu_capacity
        self._require(bool(holds), f"{memory.pinned_bytes} bytes are pinned")

    # Rules: the device side, at once and on streams

    @rule(12)
    def read_on_device(self, draw: Draw) -> None:
        view, got = self._view(draw), np.zeros(LIMIT, np.uint8)
        got = got[: view.nbytes]
        self.device.memcpy_dtoh(got, self._to_device(draw, view, Intent.READ))
        self._same(got, self.far[view.offset : view.offset + view.nbytes], "read on device", view.offset)

    @rule(14)
    def write_on_device(self, draw: Draw) -> None:
        view, stream = self._view(draw), self._stream(draw)
        address = self._to_device(draw, view, Intent.WRITE, stream)
        start, stop = self._part(draw, view.nbytes)
        data = self._data(draw, stop - start)
        self.device.memcpy_htod(address + start, data, stream)
        self._wrote(view.offset + start, data)

    @rule(10)
    def overwrite_on_device(self, draw: Draw) -> None:
        view, stream = self._view(draw), self._stream(draw)
        address = self._to_device(draw, view, Intent.OVERWRITE, stream)
        if draw(2):
            data = self._data(draw, view.nbytes)
            self.device.memcpy_htod(address, data, stream)
            self._wrote(view.offset, data)
        else:
            value = 1 + draw(199)
            self.device.memset(address, value, view.nbytes, stream)
            self._wrote(view.offset, value, view.offset + view.nbytes)

    @rule(10)
    def read_on_stream(self, draw: Draw) -> None:
        view, stream = self._view(draw), self.streams[draw(STREAMS)]
        address = self._to_device(draw, view, Intent.READ, stream)
        self._read_later(view, address, stream)

    @rule(8)
    def push(self, draw: Draw) -> None:
        self.memory.set_size(draw(LIMIT + 1))
        self._let_go(0, self.memory.size)
        self.memory.async_gpu_push(self.streams[draw(STREAMS)])
        for _, _, bits in self.memory._extents.runs(0, self.memory.size):
            self._require(bool(bits & Side.DEVICE), "something was not pushed")

    @rule(4)
    def wait(self, draw: Draw) -> None:
        index = draw(STREAMS + 1)
        if index < STREAMS:
            self.streams[index].synchronize()
        else:
            self.device.synchronize()

    # Rules: the calls without a view

    @rule(6)
    def use_without_view(self, draw: Draw) -> None:
        memory, size, kind = self.memory, self.memory.size, draw(4)
        if kind < 2:
            got = memory.mutable_cpu_data() if kind else memory.cpu_data()
            self._same(got, self.host[:size], "cpu_data", 0)
            self._require(size == 0 or memory.head == "at_cpu" or not kind, "mutable_cpu_data left the head elsewhere")
            return
        self._let_go(0, size)
        address = memory.mutable_gpu_data() if kind == 3 else memory.gpu_data()
        got = np.zeros(size, np.uint8)
        if size:
            self.device.memcpy_dtoh(got, address)
            self._same(got, self.far[:size], "gpu_data", 0)
            self._require(memory.head == "at_gpu" or kind == 2, "mutable_gpu_data left the head elsewhere")

    # Rules: zero, trim, beginnings and ends

    @rule(4)
    def clear(self, draw: Draw) -> None:
        offset, nbytes = self._range(draw)
        before = self.device.statistics.snapshot()
        self._let_go(offset, offset + nbytes)
        self.memory.clear(offset, nbytes)
        self._require(self.memory.is_zero(offset, nbytes), "cleared bytes are not zero")
        self._require(self.device.statistics == before, "clear touched the device")
        self._wrote(offset, 0, offset + nbytes)

    @rule(4)
    def trim(self, draw: Draw) -> None:
        memory = self.memory
        self.seen.clear()  # it has views, which would keep their bytes
        keep = max(
            [
                memory.size,
                memory._host.adopted,
                *(view.offset + view.nbytes for view in [*self.views, *(slot.place for slot in self.slots)]),
            ]
        )
        in_use = any(held.lent_stop > keep and self._over_our_pages(held.array) for held in self.held)
        in_use = in_use and keep < memory.cpu_capacity
        before = self._picture()
        try:
            memory.trim()
        except BlobmemError as error:
            self._require(in_use, f"trim refused for nothing: {error}")
            self._require("'stressed'" in str(error), "trim does not name the memory")
            self._require(self._picture() == before, "a refused trim changed something")
            return
        self._require(not in_use, "trim took the pages of an array in use")
        self._require(max(memory.cpu_capacity, memory.gpu_capacity) <= keep, "trim left something")
        self._let_go(keep, LIMIT)
        self._wrote(keep, 0, LIMIT)

    @rule(2)
    def start_again(self, draw: Draw) -> None:
        """Drop the memory, whose device bytes are then free, and begin with a fresh or an adopted one."""
        self._let_go(0, LIMIT)
        del self.memory, self.views, self.slots
        self.seen.clear()
        if self.device.statistics.bytes_held:
            raise Mismatch(f"a memory that is gone still holds {self.device.holders()} on the device")
        self._wrote(0, 0, LIMIT)
        if draw(3):
            self._start(CrampedMemory(0, self.device, "stressed"))
            return
        array = self._data(draw, 1 + draw(LIMIT)).copy()
        self._start(CrampedMemory.adopt(array, self.device, "stressed"))
        self._wrote(0, array)

    # Rules: other places for the bytes

    @rule(2)
    def adopt_array(self, draw: Draw) -> None:
        """The host side is another array from now on, and writing to that counts as through any other."""
        array = self._data(draw, 1 + draw(LIMIT)).copy()
        self._let_go(0, LIMIT)
        self.memory.set_host_array(array)
        self._wrote(0, 0, LIMIT)
        self._wrote(0, array)
        self._require(self.memory.adopted == array.size, "the array was not adopted")
        if draw(2):
            self._hold(self.memory.view(0, array.size), array, 0)

    @rule(2)
    def move_to(self, draw: Draw) -> None:
        """To the other device and, by chance, only when a copy that failed first is made again."""
        if draw(2):
            self.device.fail_at = lambda name, _: name == "memcpy_dtoh"
            try:
                self.memory.move_to(self.other)
            except DeviceError:
                self.device.fail_at = None
                self._require(self.memory.device is self.device, "a move that failed moved it")
                self.check()
            finally:
                self.device.fail_at = None
        self.memory.move_to(self.other)
        self._require(self.memory.gpu_capacity == 0, "the old device's bytes are said to be on the new one")
        self.device, self.other = self.other, self.device
        self.streams, self.other_streams = self.other_streams, self.streams

    # Rules: failures

    @rule(5)
    def run_out_of_memory(self, draw: Draw) -> None:
        """By script, or because somebody else has all the room: nothing changes, and the same call succeeds after."""
        view, intent, stream = self._view(draw), list(Intent)[draw(3)], self._stream(draw)
        hog = 0
        if draw(2):
            self.device.fail_at = lambda name, _: name in ("allocate", "grow")
        elif free := self.device.memory_info()[0]:
            hog = self.device.allocate(free, "hog")
        before = self._picture()
        try:
            self._fill(draw, view, intent, stream)
        except OutOfDeviceMemory as error:
            self._require(self._picture() == before, "running out of memory changed something")
            self._require("'stressed'" in str(error), "the error does not name who asked")
            self._room_again(hog)
            self._fill(draw, view, intent, stream)
        finally:
            self._room_again(hog)

    def _room_again(self, hog: int) -> None:
        self.device.fail_at = None
        if hog and any(label == "hog" for label, _ in self.device.holders()):
            self.device.free(hog)

    def _fill(self, draw: Draw, view: View, intent: Intent, stream: Stream | None) -> None:
        address = self._to_device(draw, view, intent, stream)
        if intent is Intent.OVERWRITE:
            data = self._data(draw, view.nbytes)
            self.device.memcpy_htod(address, data, stream)
            self._wrote(view.offset, data)
        elif stream is not None:
            self._read_later(view, address, stream)

    @rule(5)
    def fail_to_copy(self, draw: Draw) -> None:
        """One of the first three copies of an access fails: no byte is lost, and the same access succeeds after."""
        view, kind, intent = self._view(draw), draw(3), (Intent.READ, Intent.WRITE)[draw(2)]
        must = self.host[view.offset : view.offset + view.nbytes]
        countdown = [1 + draw(3)]

        def fails(name: str, _: int) -> bool:
            countdown[0] -= name.startswith("mem")
            return countdown[0] == 0

        stream = self._stream(draw)
        for fail_at in (fails, None):
            self.device.fail_at = fail_at
            try:
                if kind == 0:
                    got = self._to_host(draw, view, intent)
                    self._same(got, must, "read on host after a failed copy", view.offset)
                elif kind == 1:
                    self._to_device(draw, view, intent, stream)
                else:
                    self.push(draw)
                return
            except DeviceError:
                self._require(fail_at is not None, "a copy failed unasked")
            finally:
                self.device.fail_at = None
            self.check()

    # Rules: the epoch, and threads

    @rule(8)
    def repeat(self, draw: Draw) -> None:
        """Any access made at the present epoch is a no-op when made again."""
        made = [key for key, (epoch, _) in self.seen.items() if epoch == key[1].memory.epoch]
        if not made:
            self.seen.clear()
            return
        key = made[draw(len(made))]
        epoch, address = self.seen[key]
        before, picture = self.device.statistics.snapshot(), self._picture()
        side, view, intent, *rest = key
        again = view.memory.access(side, view.offset, view.nbytes, intent, *rest)
        self._require(again == address, f"repeating {key} gave {again}, not {address}")
        self._require(view.memory.epoch == epoch, f"repeating {key} moved the epoch")
        self._require(self.device.statistics == before and self._picture() == picture, f"repeating {key} did something")

    @rule(2)
    def two_threads(self, draw: Draw) -> None:
        """Two threads at once, on either side of some offset, each with its stream; then all must be there."""
        if self.threads is None:
            self.threads = ThreadPoolExecutor(2)
        middle = (1 + draw(BLOCKS - 1)) * ALIGNMENT
        plans = [self._plan(draw, start, stop) for start, stop in ((0, middle), (middle, LIMIT))]
        # A thread that holds an array or an address while another makes the memory move has lost, so grow before.
        end = max(offset + view.nbytes for plan in plans for _, offset, view, _ in plan)
        for side in Side:
            self.memory.reserve(side, end)
        self._let_go(0, LIMIT)
        work = [self.threads.submit(self._act, plan, stream) for plan, stream in zip(plans, self.streams, strict=False)]
        for future in work:
            future.result()

    def _plan(self, draw: Draw, start: int, stop: int) -> list[tuple[int, int, View, np.ndarray]]:
        plan = []
        for _ in range(3):
            offset = start + draw((stop - start) // ALIGNMENT) * ALIGNMENT
            nbytes = 1 + draw(stop - offset)
            view = self._door(draw, self.memory.view(offset, nbytes))
            plan.append((draw(6), offset, view, self._data(draw, nbytes)))
        return plan

    def _act(self, plan: list[tuple[int, int, View, np.ndarray]], stream: Stream) -> None:
        for kind, offset, view, data in plan:
            nbytes = view.nbytes
            if kind == 0:
                self._same(view.cpu_data(), self.host[offset : offset + nbytes], "read on host in a thread", offset)
            elif kind == 1:
                view.cpu_data("write")[nbytes // 2 :] = data[nbytes // 2 :]
                self._wrote(offset + nbytes // 2, data[nbytes // 2 :])
            elif kind == 2:
                view.cpu_data("overwrite")[:] = data
                self._wrote(offset, data)
            elif kind == 3:
                self._read_later(self.memory.view(offset, nbytes), view.gpu_data("read", stream), stream)
            else:
                on = stream if kind == 4 else None
                self.device.memcpy_htod(view.gpu_data("overwrite", on), data, on)
                self._wrote(offset, data)


def run(
    steps: int,
    seed: int,
    progress: Callable[[int], None] | None = None,
    make_device: Callable[[], Any] = CrampedDevice,
) -> Counter[str]:
    """Take `steps` random rules, the same ones for the same seed; how often each was taken.

    `progress` is called with the number of steps done, every hundred steps and at the end; `make_device` is as for
    Model. Raises Mismatch, with the seed, the step and the last rules, as soon as the memory is not what the two arrays
    say.
    """
    random_ = random.Random(seed)
    names, weights = list(Machine.rules), list(Machine.rules.values())
    walk = random_.choices(names, weights, k=steps)
    machine = Machine(make_device)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # adopted memory that grows warns, as it should
            for step, name in enumerate(walk, start=1):
                try:
                    getattr(machine, name)(random_.randrange)
                    machine.check()
                except Exception as error:
                    last = ", ".join(walk[max(0, step - 5) : step])
                    raise Mismatch(
                        f"seed {seed}, step {step}, after {last}: {type(error).__name__}: {error}. "
                        f"To see it again: blobmem.memory.stress.run({step}, {seed})"
                    ) from error
                if progress is not None and (step % 100 == 0 or step == steps):
                    progress(step)
    finally:
        machine.close()
    return Counter(walk)


def main(arguments: list[str]) -> int:
    """`python -m blobmem.memory.stress [STEPS [SEED]]`."""
    steps, seed = (*map(int, arguments), *(100_000, 0)[len(arguments) :])
    start = time.perf_counter()
    try:
        run(steps, seed)
    except Mismatch as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{steps} steps from seed {seed}: every byte where it should be ({time.perf_counter() - start:.1f} s)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
