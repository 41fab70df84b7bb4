"""Whether a net's arena fits into what its device has for it, and if not, by which calls it does."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

from blobmem.devices.base import readable_bytes
from blobmem.devices.pages import round_up
from blobmem.errors import OutOfDeviceMemory
from blobmem.memory import Side, SyncedMemory
from blobmem.net.needs import Need
from blobmem.net.plan.divisions import Divisions
from blobmem.net.plan.evict import Candidate, choose, evict, loads, lowest, travelling
from blobmem.net.plan.liveness import Lifetime
from blobmem.net.plan.moments import ahead, lingering
from blobmem.net.plan.places import Draft, draft
from blobmem.net.plan.slices import Runs, in_the_way
from blobmem.net.plan.times import Times, least_ms, reckon
from blobmem.net.plan.ways import Made, Way, ways
from blobmem.net.schedule import Schedule
from blobmem.ops.registry import table

if TYPE_CHECKING:
    from blobmem.net.net import Net

GRAIN = 1 << 16
"""The least of a net that needs a thousand times as many bytes is told in whole pieces of so many: in less a gap of a
few hundred between small arrays would be in the way of copies that come sooner."""

MANY_LIVES, GAPS = 2000, 64
"""Of a net of so many lifetimes such a part of the room is left for gaps: to lay its arrays out anew takes seconds."""

TRIES = 8
"""How often a plan that came out too large, for the gaps in it, is made again with more evicted."""

EARLY = 0.97
"""How much of the room arrays may take that come back early: there have to be gaps."""

NEXT = 3
"""How many of those that may take least time with evicted state that comes sooner are looked at so."""


def fitting(
    net: Net, made: Made, good: float, slices: Sequence[Runs] | None = None, most_ms: float = math.inf
) -> list[Made]:
    """The calls, drafted; by others, if they need more than the device may hold.

    Of all ways that fit, those that are reckoned to take least time for what they do beside the usual calls, or may
    once evicted state comes sooner, the best first; or with `slices` of the batch, of those in which runs of layers
    take these, up to the first that takes no more than `good` ms. What seems to take much longer than `most_ms` is not
    laid out. Raises OutOfDeviceMemory, naming the least that would do, if none does.
    """
    if made.drawn is None:
        made.drawn = draft(net, made.schedules, made.kept)
    most, times = net.device.most_bytes, Times(net.device)
    if most is None:
        return [made]
    beside = _beside(net, made)
    room, usual = most - beside, made
    others, who = _others(net, room)
    if max(made.places.layout.nbytes, others) <= room and slices is None:
        made.ms = reckon(made.places, times).ms
        return [made]
    smallest, best, usual_ms = usual, list[Made](), reckon(usual.places, times).ms
    tight = int((net.spread or (1.0 if slices is None else EARLY)) * room)
    tight -= tight // GAPS if len(usual.places.lives.arena) >= MANY_LIVES else 0
    search = Divisions(net, tight if net.spread else room, good)
    search.best, rank = most_ms, _sooner_ms(times) if net._evicted else attrgetter("ms")
    for way in ways(net, tight, times, lambda: search.best) if slices is None else search.ways(slices):
        if not isinstance(way, Way):
            if best and min(each.ms for each in best) <= way * usual_ms:
                break
            continue
        if lowest(way.found, way.load) > max(room, smallest.places.layout.nbytes):
            continue  # neither fits nor needs less than others
        if least_ms(way.made.places, times) >= search.best:
            continue  # no copies make that less
        for fitted in _evicted(net, way, (tight, room), times):
            if max(fitted.places.layout.nbytes, others) <= room:
                fitted.ms = reckon(fitted.places, times).ms
                best = sorted([*best, fitted], key=rank)[: NEXT if net._evicted else 1]
                search.best = min(search.best, fitted.ms)
                break
            smallest = min(smallest, fitted, key=lambda each: each.places.layout.nbytes)
    if best:
        return best
    if others > smallest.places.layout.nbytes:
        raise _too_little_for(who, others, net, most, beside)
    raise _too_little(net, smallest, usual, most, beside)


def _sooner_ms(times: Times) -> Callable[[Made], float]:
    """About how many ms plans come to whose state comes sooner than just before it is needed: half way to what they
    take if none of their streams waits for another."""
    return lambda each: (each.ms + least_ms(each.places, times)) / 2


def fits(net: Net, made: Made) -> bool:
    """Whether the calls do as they are. They are drafted; and reckoned, if they do under a limit."""
    made.drawn = draft(net, made.schedules, made.kept)
    if net.device.most_bytes is None:
        return True
    if not has_room(net, made):
        return False
    made.ms = reckon(made.places, Times(net.device)).ms
    return True


def has_room(net: Net, made: Made) -> bool:
    """Whether there is room for the calls, on a device that has a limit, and for what others need of the arena."""
    room = room_of(net, made)
    return max(made.places.layout.nbytes, _others(net, room)[0]) <= room


def forward_fitting(net: Net, made: Made) -> Made:
    """The calls of a net that only runs forward, drafted; the batch in parts if the device may not hold its arena
    otherwise."""
    made.drawn = draft(net, made.schedules, made.kept)
    if net.device.most_bytes is None:
        return made
    room = wanted = room_of(net, made)
    for _ in range(TRIES):
        if made.places.layout.nbytes <= room or not net.take_parts(wanted):
            break
        made = net._made()
        made.drawn = draft(net, made.schedules, made.kept)
        wanted -= max(0, made.places.layout.nbytes - room)  # for scratch, say
    return made


def settle(net: Net, made: Made) -> None:
    """Let the others that share a net's arena be as they were when this plan was found to fit, not as for the last that
    was tried."""
    for _ in _sharers(net, room_of(net, made)):
        pass


def _others(net: Net, room: int) -> tuple[int, str]:
    """Of what others need of its arena (`_sharers`) the most, and who does."""
    return max(_sharers(net, room), key=itemgetter(0))


def _sharers(net: Net, room: int) -> Iterator[tuple[int, str]]:
    """What others need of its arena, who have no other way, and who these are: nets that run forward alone, in parts of
    the batch if there is no such room, and updates that come after backward, with whose needs those of these nets
    are."""
    for other in net.group.members:
        if other.forward_only and other._arena is net._arena:
            other.compiled()
            wanted, wants = room, other.lacks_room
            for _ in range(TRIES):
                if not (wants or other.plan_bytes > room) or not other.take_parts(wanted):
                    break
                other._end_plan()
                other.compiled()
                wanted, wants = wanted - max(0, other.plan_bytes - room), False
            yield other.plan_bytes, str(other.identity)
    arena, needs = net.arena_memory(), net.beside()
    yield (
        max((need.nbytes for need in (() if needs is None else needs()) if need.memory is arena), default=0),
        "updates",
    )


def room_of(net: Net, made: Made) -> int:
    """Bytes that there are for the arena, on a device that has a limit."""
    assert net.device.most_bytes is not None
    return net.device.most_bytes - _beside(net, made)


def _beside(net: Net, made: Made) -> int:
    """Bytes that all but the arena takes of the device, by the time that the nets have run; of a net that only runs
    forward, beside those that are compiled."""
    assert net._arena is not None
    arena = net._arena.memory(net.device)
    within = {arena, *(life.key for life in _own(made.places))}
    needs = net.beside()
    taking = [_outside(made.schedules, within), _most(needs() if needs is not None else (), within)]
    for other in net.group.members:
        known = other._schedules is not None or (other.forward_only and not net.forward_only)
        if other is not net and other.device is net.device and known:
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


def _evicted(net: Net, way: Way, rooms: tuple[int, int], times: Times) -> Iterator[Made]:
    """The calls with as little evicted as makes them fit into the first of the rooms by their loads; then with more and
    more, for the gaps in a plan, and at last with all. Each time with what comes back early, and without. If none can
    fit, the least. An arena of the second of the rooms is small enough, but the last is as small as can be.
    """
    floor, (room, enough) = lowest(way.found, way.load), rooms
    target, chosen = max(room, floor), None
    for _ in range(TRIES):
        before, chosen = chosen, choose(way.found, way.load, target, way.away or ())
        if chosen != before:
            if floor <= room:
                yield without(net, way, chosen, times, enough, room)
            trial = without(net, way, chosen, times, enough)
            yield trial
        if target == floor:
            break
        target = max(floor, target - max(trial.places.layout.nbytes - room, room // 64))
    else:
        yield without(net, way, choose(way.found, way.load, floor, way.away or ()), times, enough)
    yield without(net, way, way.found, times)  # as small as can be


def without(net: Net, way: Way, chosen: Sequence[Candidate], times: Times, enough: int = 0, room: int = 0) -> Made:
    """The calls with these arrays evicted, in an arena of `enough` bytes or as small as can be. With `room` for their
    loads they come back as early as their copies want, and stay until they have left."""
    made, device, number = way.made, net.device, {each: at for at, each in enumerate(way.found)}
    recipe = made.recipe._replace(away=tuple(number[each] for each in chosen), room=room, enough=enough)
    first, starts = len(made.places.units[0]), [unit.start for unit in made.places.units[1]]
    soon = ahead(chosen, way.load, made.places, times, int(EARLY * room))
    early = {each: starts[step - first] for each, step in soon.items()}
    places = made.schedules[0].joints(), made.schedules[1].joints()
    found = evict(made.forward, made.backward, chosen, places, made.remade, device, early)
    fetched = [*made.fetched, *found.fetched]
    net._have(dataclasses.replace(made, fetched=fetched))
    schedules = net._scheduled(found.forward, found.backward, made.passing)
    drawn = draft(net, schedules, made.kept)
    drawn.enough = enough
    if room:
        drawn = lingering(drawn, times, room)
    return dataclasses.replace(
        made, forward=found.forward, backward=found.backward, remade=found.remade, bound=schedules, drawn=drawn,
        homes=found.homes, fetched=fetched, evicted=travelling(chosen), recipe=recipe,
    )  # fmt: skip


def _too_little(net: Net, least: Made, usual: Made, most: int, beside: int) -> OutOfDeviceMemory:
    """What to say where no plan fits into the `most` bytes that there may be; `least` is the smallest of them, and
    `usual` are the calls of a whole batch."""
    needed = beside + least.places.layout.nbytes
    needed = round_up(needed, GRAIN) if needed > 1000 * GRAIN else needed
    units = list(chain.from_iterable(least.places.units))
    load = loads(least.places)
    step = int(load.argmax())
    here = [life for life in _own(least.places) if life.first <= step <= life.last]
    largest = max(here, key=lambda life: life.nbytes)
    layer = units[step].calls[0].layer_name
    what = f"'{largest.key.name}'" if isinstance(largest.key, SyncedMemory) else "its scratch"
    how, why = _about_slices(net, least, usual, units[step].calls[0].layer)
    return OutOfDeviceMemory(
        f"{net.identity} needs at least {needed} bytes on the {net.device.name} device, which may hold {most}, even "
        f"with all evicted that can be{how}: beside {readable_bytes(beside)} that stay there, layer '{layer}' sets "
        f"that, whose largest array is {what} ({readable_bytes(largest.nbytes)}).{why} Grant that much, or take a "
        "smaller batch",
        needed, most - net.device.statistics.bytes_held, most, net.device.holders(),
    )  # fmt: skip


def _about_slices(net: Net, least: Made, usual: Made, layer: int) -> tuple[str, str]:
    """How the batch is taken in slices, and which layer is in the way of more, if one is; `layer` needs most."""
    how = ""
    found = in_the_way(usual.forward, usual.backward, layer, table(net.device.family))
    if least.sliced is not None:
        how = f" and {least.sliced.told(net.layer_names)} of the batch"
        if found is not None and found.layer != layer:
            near = any(first - 1 <= found.layer <= last + 1 for first, last in least.sliced.layers)
            found = found if near else None  # it has not come to that
    if found is None or "slices" not in net.passes:
        return how, ""
    return how, f" Layer '{found.layer_name}' takes no slices of the batch, for '{found.op}'."


def _too_little_for(who: str, nbytes: int, net: Net, most: int, beside: int) -> OutOfDeviceMemory:
    """What to say where others need more of a net's arena than there may be."""
    needed = beside + nbytes
    return OutOfDeviceMemory(
        f"{who}, beside {net.identity}, needs at least {needed} bytes on the {net.device.name} device, which may hold "
        f"{most}: {readable_bytes(nbytes)} for its arrays, and {readable_bytes(beside)} that stay there. Grant that "
        f"much, or take a smaller batch there",
        needed, most - net.device.statistics.bytes_held, most, net.device.holders(),
    )  # fmt: skip


def _own(drawn: Draft) -> Iterator[Lifetime]:
    """The lifetimes, of arrays that take over each other's bytes one by one."""
    for life in drawn.lives.arena:
        yield from drawn.lives.turns.get(life.key, [life])
