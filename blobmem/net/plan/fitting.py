"""Whether a net's arena fits into what its device has for it, and if not, by which calls it does."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from blobmem.devices.base import readable_bytes
from blobmem.errors import OutOfDeviceMemory
from blobmem.memory import Side, SyncedMemory
from blobmem.memory.blob import Blob
from blobmem.memory.parked import Parked
from blobmem.net.plan.evict import LINK, MEMORY, Candidate, ahead, candidates, choose, evict, loads, lowest, travelling
from blobmem.net.plan.liveness import Lifetime
from blobmem.net.plan.places import Draft, draft
from blobmem.net.plan.uses import Remade
from blobmem.net.schedule import Need, Schedule, joints
from blobmem.ops.call import Call, memories
from blobmem.ops.registry import table

if TYPE_CHECKING:
    from blobmem.net.net import Net

log = logging.getLogger("blobmem")

SHARES = (1.0, 0.0, math.inf)
"""How many times the usual share of a pass may be spent to make arrays anew, and the rest is evicted."""

TRIES = 8
"""How often a plan that came out too large, for the gaps in it, is made again with more evicted."""


EARLY = 0.97
"""How much of the room arrays may take that come back early: there have to be gaps."""


@dataclasses.dataclass(slots=True)
class Made:
    """The calls of a net, and what they became.

    Attributes:
        forward, backward: the calls.
        remade: what backward fills by other calls than its layers'.
        kept: memories that somebody reads after the pass.
        passing: memories that nobody reads but these calls.
        schedules: of forward and backward.
        drawn: their lifetimes, where the net's arrays take turns.
        homes: of memories that are evicted, where their bytes go.
        fetched: arrays in which they come back.
        evicted: bytes that leave the device in a pass, or come back.
    """

    forward: list[Call]
    backward: list[Call]
    remade: list[Remade]
    kept: list[SyncedMemory]
    passing: set[SyncedMemory]
    schedules: tuple[Schedule, Schedule]
    drawn: Draft | None = None
    homes: Mapping[SyncedMemory, Parked] = dataclasses.field(default_factory=dict)
    fetched: list[Blob] = dataclasses.field(default_factory=list)
    evicted: int = 0

    @property
    def places(self) -> Draft:
        """The lifetimes, which are known."""
        assert self.drawn is not None
        return self.drawn


def fitting(net: Net, made: Made) -> Made:
    """The calls, drafted; by others, if they need more than the device may hold.

    Of all ways that fit, the one that is reckoned to take least time for what it does beside the usual calls. Raises
    OutOfDeviceMemory, naming the least that would do, if none does.
    """
    made.drawn = draft(net, made.schedules, made.kept)
    most = net.device.most_bytes
    if most is None or net.forward_only:
        return made
    beside = _beside(net, made)
    room, usual = most - beside, made
    if made.places.layout.nbytes <= room:
        return made
    ways = sorted((_way(net, usual, times, room) for times in SHARES), key=lambda way: way.seconds)
    smallest = usual
    for way in ways:
        for fitted in _evicted(net, way, room):
            if fitted.places.layout.nbytes <= room:
                log.info(
                    "%s has room for %s of the %s that it would take: %s leave the device or come back in a pass",
                    net.identity, readable_bytes(room), readable_bytes(usual.places.layout.nbytes),
                    readable_bytes(fitted.evicted),
                )  # fmt: skip
                net.streams, net.open_streams = 1, None  # which is not to be tried on two
                return fitted
            smallest = min(smallest, fitted, key=lambda each: each.places.layout.nbytes)
    raise _too_little(net, smallest, most, beside)


@dataclasses.dataclass(slots=True)
class _Way:
    """So much made anew, and the rest evicted.

    Attributes:
        made: the calls, before anything is evicted.
        found: what may be.
        load: bytes in use in each step.
        seconds: reckoned for what is done beside the usual calls; more than any other if it does not do.
    """

    made: Made
    found: list[Candidate]
    load: np.ndarray
    seconds: float


def _way(net: Net, usual: Made, times: float, room: int) -> _Way:
    """The way that makes so many times the usual share anew; `usual` are the usual calls."""
    made = usual
    if times != 1 or net.streams > 1:  # the copies have streams enough
        made = net._made(times, streams=1)
        made.drawn = draft(net, made.schedules, made.kept)
    free = net._free({*memories((*made.forward, *made.backward))})
    found = candidates(made.forward, made.backward, made.places, free, table(net.device.family))
    load = loads(made.places)
    chosen = choose(found, load, room)
    if chosen is None:
        return _Way(made, found, load, math.inf)
    return _Way(made, found, load, (_traffic(made) - _traffic(usual)) / MEMORY + travelling(chosen) / LINK)


def _beside(net: Net, made: Made) -> int:
    """Bytes that all but the arena takes of the device, by the time that the nets have run."""
    assert net._arena is not None
    arena = net._arena.memory(net.device)
    within = {arena, *(life.key for life in _own(made.places))}
    needs = net.beside()
    taking = [_outside(made.schedules, within), _most(needs() if needs is not None else (), within)]
    for other in net.group.members:
        if other is not net and other.device is net.device and (other.forward_only or other._schedules is not None):
            taking.append(_outside(other.compiled(), {arena}))
    taken = {memory: max(each.get(memory, 0) for each in taking) for memory in chain.from_iterable(taking)}
    more = sum(max(0, nbytes - memory.gpu_capacity) for memory, nbytes in taken.items())
    return net.device.statistics.bytes_held - arena.gpu_capacity + more


def _outside(schedules: Iterable[Schedule], arena: Container[Any]) -> dict[SyncedMemory, int]:
    """Bytes on the device of each memory that is not in the arena."""
    return _most((need for schedule in schedules for need in schedule.blob_needs()), arena)


def _most(needs: Iterable[Need], arena: Container[Any]) -> dict[SyncedMemory, int]:
    taken: dict[SyncedMemory, int] = {}
    for memory, side, nbytes in needs:
        if side is Side.DEVICE and memory not in arena:
            taken[memory] = max(taken.get(memory, 0), nbytes)
    return taken


def _traffic(made: Made) -> int:
    """Bytes that the calls read and write."""
    return sum(operand.view.nbytes for each in (*made.forward, *made.backward) for operand in each.present())


def _evicted(net: Net, way: _Way, room: int) -> Iterator[Made]:
    """The calls with as little evicted as makes them fit into the room by their loads; then with more and more, for the
    gaps in a plan, and at last with all. Each time with what comes back early, and without. If none can fit, the least.
    """
    floor = lowest(way.found, way.load)
    target = max(room, floor)
    for _ in range(TRIES):
        chosen = choose(way.found, way.load, target)
        assert chosen is not None
        if floor <= room:
            yield _without(net, way, chosen, int(EARLY * room))
        trial = _without(net, way, chosen)
        yield trial
        if target == floor:
            break
        target = max(floor, target - max(trial.places.layout.nbytes - room, room // 64))
    yield _without(net, way, way.found)


def _without(net: Net, way: _Way, chosen: Sequence[Candidate], room: int = 0) -> Made:
    """The calls with these arrays evicted; up to `room` bytes in use, they come back as early as their copies want."""
    made, device, last = way.made, net.device, bool(net._images_last)
    first, starts = len(made.places.units[0]), [unit.start for unit in made.places.units[1]]
    early = {each: starts[step - first] for each, step in ahead(chosen, way.load, made.places, room).items()}
    read_again = {view.memory for each in made.backward for view in each.reads}
    places = (
        joints(made.forward, device, last, made.passing - read_again),
        joints(made.backward, device, last, made.passing),
    )
    found = evict(made.forward, made.backward, chosen, places, made.remade, device, early)
    net._fetched = found.fetched
    schedules = net._scheduled(found.forward, found.backward, made.passing)
    return Made(
        found.forward, found.backward, found.remade, made.kept, made.passing, schedules,
        draft(net, schedules, made.kept), found.homes, found.fetched, travelling(chosen),
    )  # fmt: skip


def _too_little(net: Net, least: Made, most: int, beside: int) -> OutOfDeviceMemory:
    """What to say where no plan fits into the `most` bytes that there may be; `least` is the smallest of them."""
    needed = beside + least.places.layout.nbytes
    units = list(chain.from_iterable(least.places.units))
    load = loads(least.places)
    step = int(load.argmax())
    here = [life for life in _own(least.places) if life.first <= step <= life.last]
    largest = max(here, key=lambda life: life.nbytes)
    layer = units[step].calls[0].layer_name
    what = f"'{largest.key.name}'" if isinstance(largest.key, SyncedMemory) else "its scratch"
    return OutOfDeviceMemory(
        f"{net.identity} needs at least {needed} bytes on the {net.device.name} device, which may hold {most}, even "
        f"with all evicted that can be: beside {readable_bytes(beside)} that stay there, layer '{layer}' sets that, "
        f"whose largest array is {what} ({readable_bytes(largest.nbytes)}). Grant that much, or take a smaller batch",
        needed, most - net.device.statistics.bytes_held, most, net.device.holders(),
    )  # fmt: skip


def _own(drawn: Draft) -> Iterator[Lifetime]:
    """The lifetimes, of arrays that take over each other's bytes one by one."""
    for life in drawn.lives.arena:
        yield from drawn.lives.turns.get(life.key, [life])
