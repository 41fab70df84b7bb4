"""The largest batches with which nets fit into so much memory, or train so fast in it, before anything runs."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blobmem.devices import Device, SimulatedDevice
from blobmem.errors import NetError, OutOfDeviceMemory
from blobmem.footprint import BOUND, PLANNED, SCHEMES, Held, Scheme, footprint, stated_shapes
from blobmem.net.build import uncollected
from blobmem.net.builder import build_nets, is_solver, specs_of
from blobmem.net.plan.times import COPIES
from blobmem.solvers import updater_for

CARD_OVERHEAD = 839 << 20
"""Bytes of a card that CUDA's context and libraries take: the most that was found on an H200 with cuDNN and cuBLAS
loaded (`benchmarks/results/footprint.json`). Other cards, drivers and versions take others."""

MOST = 1 << 20
"""The largest batch that is tried."""


@dataclass(slots=True)
class Fit:
    """What fits under one scheme.

    Attributes:
        train_batch: items in the largest training batch; 0 if one item does not fit.
        footprint: what is held with that batch and the largest test batches beside it; with one item if 0.
        nbytes: bytes of that, in whole chunks if these were asked for.
    """

    train_batch: int
    footprint: Scheme
    nbytes: int = 0

    @property
    def nets(self) -> list[Held]:
        """What the train net holds, and what each test net adds."""
        return [self.footprint.train, *self.footprint.tests]

    @property
    def test_batches(self) -> list[int]:
        """Items in the batch of each test net."""
        return [held.batch for held in self.footprint.tests]


def fit(
    model: Any,
    room: int,
    *,
    chunks: bool = False,
    test_batch: int | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    schemes: Iterable[str] = SCHEMES,
    dtype: Any = "float32",
    make_device: Callable[[], Device] | None = None,
) -> dict[str, Fit]:
    """The largest training batch with which the nets of a file fit, then the largest test batch beside it, by scheme.

    Both were reckoned, and so was the next larger one, which does not fit. Bytes mostly grow with the batch; where they
    do not, as some algorithms take less workspace for more items, a larger batch might fit again.

    Args:
        model: path of a solver or net prototxt, or its message.
        room: bytes for everything that the nets and the solver hold on the device.
        chunks: count whole chunks of 2 MiB, as a GPU maps them.
        test_batch: items in a batch of each test net. If None the training batch is found beside the file's test
            batches, and then the largest ones, the same for all test nets, beside that.
        input_shapes, schemes, dtype, make_device: as for `footprint`.

    Raises what `footprint` raises.
    """
    tests = len(specs_of(model)[1])

    @functools.cache
    def reckoned(names: tuple[str, ...], train: int, test: int | None) -> dict[str, Scheme]:
        test_batches = [test] * tests if test else []
        return footprint(
            model, train_batch=train, test_batches=test_batches, input_shapes=input_shapes, schemes=names,
            dtype=dtype, make_device=make_device,
        )  # fmt: skip

    def held(name: str, train: int, test: int | None = test_batch) -> Fit:
        # the two come from the same nets, and are mostly asked for the same batches
        names = (PLANNED, BOUND) if name in (PLANNED, BOUND) else (name,)
        result = Fit(train, reckoned(names, train, test)[name])
        result.nbytes = sum(net.total + chunks * net.rounding for net in result.nets)
        return result

    def found(name: str, before: Fit | None) -> Fit:
        train = largest(lambda batch: held(name, batch).nbytes, room, 1, before.train_batch if before else 2)
        best = held(name, max(train, 1))
        if not train:
            best.train_batch = 0
        elif tests and test_batch is None:
            start = max(best.test_batches)
            guess = max(before.test_batches) if before else start
            test = largest(lambda batch: held(name, train, batch).nbytes, room, start, guess)
            best = held(name, train, test) if test else best
        return best

    result: dict[str, Fit] = {}
    before = None
    for name in schemes:
        before = result[name] = found(name, before)
    return result


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a training step is reckoned to take (`net.plan.times`).

    Attributes:
        batch: items in it.
        ms: milliseconds with so much memory; infinite if that does not do.
        free_ms: milliseconds without a limit.
        moved: bytes that leave the device in a step, and that come back.
    """

    batch: int
    ms: float
    free_ms: float
    moved: int

    @property
    def slowdown(self) -> float:
        """How many times as long an item takes."""
        return self.ms / self.free_ms


def largest_at(
    model: Any,
    room: int,
    slowdown: float,
    *,
    test_batch: int | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    dtype: Any = "float32",
    make_device: Callable[[], SimulatedDevice] | None = None,
) -> Pace:
    """The largest training batch in so much memory, with arrays evicted and made anew, of which an item takes at most
    `slowdown` times as long as without a limit.

    If there is none, the pace of one item. The test nets have the file's batches, or `test_batch`. Other arguments, and
    what is raised, are as for `fit`. The next larger batch was reckoned, too; `largest` says what that is worth.
    """
    specs = specs_of(model)
    shapes = {**stated_shapes(specs), **(input_shapes or {})}
    tests = [test_batch] * len(specs[1]) if test_batch else []

    def step(batch: int, limit: int) -> tuple[float, int]:
        """Milliseconds of a step, and the bytes that are moved in it."""
        device = SimulatedDevice(compute=False) if make_device is None else make_device()
        device.capacity = limit
        with uncollected():
            nets = build_nets(
                specs, device=device, seed=0, dtype=dtype, train_batch=batch, test_batches=tests, input_shapes=shapes,
                memory="train",
            )  # fmt: skip
            nets.train.passes = frozenset()  # slices of the batch are for what does not fit otherwise
            if is_solver(model):
                updater_for(model, nets.train).place()
            nets.train.prepare()
            if not nets.train.takes_turns:
                raise NetError(f"{nets.train.identity} has no plan: it has layers whose shapes depend on values")
            calls = (call for schedule in nets.train.compiled() for call in schedule.calls if call.op in COPIES)
            return nets.train.reckoned().ms, sum(call.operand(0).view.nbytes for call in calls)

    @functools.cache
    def pace(batch: int) -> Pace:
        free_ms, _ = step(batch, _UNLIMITED)
        ms, moved = math.inf, 0
        with contextlib.suppress(OutOfDeviceMemory):
            ms, moved = step(batch, room)
        gc.collect()  # nets are circles
        return Pace(batch, ms, free_ms, moved)

    def parts(batch: int) -> int:
        return round(min(pace(batch).slowdown, 2 * slowdown) * _PARTS)

    return pace(max(1, largest(parts, round(slowdown * _PARTS), 1, 2)))


_UNLIMITED = 1 << 46  # bytes
_PARTS = 1_000_000  # of 1, in which a slowdown is counted


def largest(held: Callable[[int], int], room: int, low: int, guess: int) -> int:
    """A batch from `low` on, MOST at the most, that takes at most `room` bytes where the next larger one takes more.

    0 if `low` takes more. `held` gives the bytes for a batch; `guess` is the batch to try after `low`.
    """
    at_low = held(low)
    if at_low > room:
        return 0
    high = at_high = 0  # the least batch that is known to take more
    tries = 0
    while low < MOST and low + 1 != high:
        batch = min(max(guess, low + 1), high - 1 if high else MOST)
        nbytes = held(batch)
        tries += 1
        items, more = (high - batch, at_high - nbytes) if high else (batch - low, nbytes - at_low)
        if nbytes > room:
            high, at_high = batch, nbytes
        else:
            low, at_low = batch, nbytes
        if high and (more <= 0 or tries % 3 == 0):
            guess = (low + high) // 2  # where bytes do not grow evenly this is quicker
        elif high:
            guess = high + (room - at_high) * items // more
        else:
            guess = low + (room - at_low) * items // more if more > 0 else 4 * low
    return low
