"""Where the arrays of a net lie in an arena, and which of them have their bytes."""

from __future__ import annotations

import dataclasses
import functools
from bisect import bisect_left
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blobmem.devices import Device
from blobmem.errors import SharedBlobError
from blobmem.memory import Intent, Side, SyncedMemory
from blobmem.memory.extents import Extents
from blobmem.memory.parked import Parked
from blobmem.memory.reordered import Reordered
from blobmem.memory.slot import Slot
from blobmem.net.layouts import turn
from blobmem.net.plan.arena import Layout, layout
from blobmem.net.plan.liveness import Lifetime, Lifetimes, lasting, lifetimes
from blobmem.net.plan.streams import kept_until
from blobmem.net.plan.uses import Remade
from blobmem.net.sharing import Bind, Halves, Spent, halves
from blobmem.ops.call import memories

if TYPE_CHECKING:
    from blobmem.net.net import Net
    from blobmem.net.schedule import Schedule, Span, Unit

Places = Mapping[Hashable, tuple[Lifetime, int]]
"""Of an array, or a step's scratch, its lifetime and its offset in the arena."""


class Arena:
    """Bytes in which the arrays of a net take turns, or those of several nets that run one at a time.

    Attributes:
        buffers: by name, what data comes through to the device. It lies beside the arena, since the next batch is on
            its way while a pass runs, and the nets have one for all.
    """

    def __init__(self) -> None:
        self.buffers: dict[str, SyncedMemory] = {}
        self._memory: SyncedMemory | None = None
        self._last: Plan | None = None

    def memory(self, device: Device) -> SyncedMemory:
        """The bytes; others, if the device is another one than when they were last asked for."""
        if self._memory is None or self._memory.device is not device:
            self._memory = SyncedMemory(0, device, name="arena", pinnable=False)
        return self._memory

    def leave(self, device: Device) -> None:
        """Nets have moved to that device: give the bytes back if they are on another one."""
        if self._memory is not None and self._memory.device is not device:
            self._memory = self._last = None
            self.buffers.clear()

    def is_of(self, plan: Plan | None) -> bool:
        """Whether the last pass was under this plan."""
        return self._last is plan

    def vacate(self) -> None:
        """Who has no plan is about to use the bytes: no array has any."""
        if self._last is not None:
            self._last.spend(self._last.memories)
            self._last._send_home()
            self._last = None

    def enter(self, plan: Plan) -> bool:
        """A pass under this plan begins: the arrays of other plans have no bytes any more. Whether that is news."""
        if self._last is plan:
            return False
        self.vacate()
        self._last = plan
        return True


class _Tenant(NamedTuple):
    """An array (no memory: scratch), and where in the arena it lies from which step to which.

    Attributes:
        heirs: of each of the ranges, the array that takes it over in the last step; None where there is none.
    """

    memory: SyncedMemory | None
    ranges: list[tuple[int, int]]
    first: int
    last: int
    heirs: Sequence[SyncedMemory | None] = (None,)

    @property
    def untils(self) -> list[int]:
        """Of each range, the last step that counts it as this array's: if it has an heir, the one before its last."""
        return [self.last - (heir is not None) for heir in self.heirs]

    def take(self, taken: Extents) -> None:
        for start, stop in self.ranges:
            taken.put(start, stop, 1)

    def meets(self, taken: Extents) -> bool:
        return any(bits for start, stop in self.ranges for _, _, bits in taken.runs(start, stop))


@dataclasses.dataclass
class Draft:
    """What a plan is made of: nothing has moved yet.

    Attributes:
        units: of each schedule, what runs in order.
        used: the memories that these use.
        lying: what of the net lies in each.
        lives: from when to when each is in use.
        pinned: memories that stay where they are.
        enough: bytes of an arena that is small enough.
    """

    units: list[list[Unit]]
    used: dict[SyncedMemory, None]
    lying: dict[SyncedMemory, Halves]
    lives: Lifetimes
    pinned: Collection[SyncedMemory] = ()
    enough: int = 0

    @functools.cached_property
    def layout(self) -> Layout:
        """Where each of `lives.arena` lies, found once somebody asks."""
        return layout(self.lives.arena, enough=self.enough)

    def lasting(self, until: Sequence[int]) -> Draft:
        """The same, where what each step uses counts as used up to another one."""
        steps = [*chain.from_iterable(self.units)]
        lives = lasting(self.lives.uses, [step.running for step in steps], [step.scratch for step in steps], until)
        return dataclasses.replace(self, lives=lives)

    def places(self) -> Places:
        """Where each lies by its key, those that take over each other's bytes one by one."""
        return {
            own.key: (own, offset)
            for life, offset in zip(self.lives.arena, self.layout.offsets, strict=True)
            for own in self.lives.turns.get(life.key, [life])
        }


def draft(net: Net, schedules: Sequence[Schedule], keep: Iterable[SyncedMemory]) -> Draft:
    """Lifetimes for the schedules of a net; arguments as for `Plan`."""
    return drafted(net, [schedule.units() for schedule in schedules], keep)


def drafted(net: Net, units: list[list[Unit]], keep: Iterable[SyncedMemory]) -> Draft:
    """The same for what runs in each."""
    steps = list(chain.from_iterable(units))
    used = dict.fromkeys(memories(call for step in steps for call in step.calls))
    lying = halves(net, used, params=True)
    free = unseen(lying)
    pinned = {*keep, *(memory for memory in used if memory not in free)}
    pinned.update(memories(call for step in steps if step.travels for call in step.calls))
    calls, scratch = [step.running for step in steps], [step.scratch for step in steps]
    lives = lifetimes(calls, scratch, pinned)
    if any(step.lane for step in steps):
        lives = lasting(lives.uses, calls, scratch, kept_until(steps, lives))
    return Draft(units, used, lying, lives, pinned)


class Plan:
    """The places of a net's arrays in an arena, for the schedules of a pass that run one after the other.

    Making it moves into slots of the arena what the pass fills before it reads it, scratch too. None of these arrays
    has bytes before it is written.

    Args:
        net: whose blobs these are.
        schedules: of the pass, in order.
        keep: memories that somebody reads after the pass, which stay where they are.
        arena: the bytes where the others take turns.
        remade: what the last of the schedules makes anew.
        drawn: the `draft` of these, if it was made.
        homes: of memories that the first of them evicts, where their bytes go.

    Attributes:
        arena, nbytes: the bytes, and how many of them it takes.
        tenants: what takes turns there.
        memories: those of the tenants that are arrays, as views see them.
        spent: the writer of those that have no bytes now.
    """

    def __init__(
        self,
        net: Net,
        schedules: Sequence[Schedule],
        keep: Iterable[SyncedMemory],
        arena: SyncedMemory,
        remade: Iterable[Remade] = (),
        drawn: Draft | None = None,
        homes: Mapping[SyncedMemory, Parked] | None = None,
    ) -> None:
        gradients, state = {f"{entry.blob.name}.diff" for entry in net.learnable}, {each.name for each in net.brings}
        self.spent = Spent(net.memory, gradients, state)
        self.arena, self._side = arena, schedules[0].side
        drawn = drawn or draft(net, schedules, keep)
        units, lives, lying = drawn.units, drawn.lives, drawn.lying
        places, self.nbytes = drawn.places(), drawn.layout.nbytes
        self._places: list[tuple[Lifetime, int]] = []  # the same of the slots
        self._homes = dict(homes or {})  # by the slots, once these are there
        self._tight = bool(net._fetched)
        self.tenants: list[_Tenant] = []
        self.memories: set[SyncedMemory] = set()
        self._binds: list[tuple[SyncedMemory, Sequence[Bind]]] = []  # puts into each of these what of the net is there
        self._number = 0  # of the last pass
        self._ran: dict[SyncedMemory, int] = {}  # of what makes an array anew, how many have run, in their order
        self._times: list[tuple[int, list[tuple[int, int]]]] = []  # of each schedule: its first step, its units
        try:
            heirs = {one.key: other.key for turn in lives.turns.values() for one, other in pairwise(turn)}
            moved: dict[Hashable, SyncedMemory] = {}
            for memory in reversed(drawn.used):  # heirs, whose first use is later, are there when they are named
                self._move(memory, lying.get(memory), places, heirs, moved)
            self._leave_out(chain.from_iterable(units), lives)
            self._remade = {each.array.view.memory: each for each in remade}
            first = 0
            for schedule, own in zip(schedules, units, strict=True):
                rooms = {unit.start: self._room(places[at]) for at, unit in enumerate(own, first) if at in places}
                schedule.lie_in(self.arena, self.nbytes, rooms)
                self._times.append((first, [(unit.start, unit.stop) for unit in own]))
                first += len(own)
            self._bound = [*_bound(schedules)]
        except BaseException:  # an interruption, say
            self.end(net)
            raise

    def _move(
        self,
        memory: SyncedMemory,
        lying: Halves | None,
        places: Places,
        heirs: Mapping[Hashable, Hashable],
        moved: dict[Hashable, SyncedMemory],
    ) -> None:
        """Put an array, and what keeps it channels last, where it has a place in the arena, if it has one.

        `heirs` has the keys of places by those whose bytes they take over; `moved`, what has been put in each.
        """
        own, last = places.get(memory), None
        if memory.reordered is not None:
            last = places.get(memory.reordered.array)
        found = [place for place in (own, last) if place is not None]
        if not found:
            return
        if own is not None:
            assert lying is not None
            home = self._homes.pop(memory, None)
            memory = slot = self._slot(own, memory.name)
            self._places.append((own[0]._replace(key=slot), own[1]))
            if home is not None:
                slot.home = self._homes[slot] = home
                home.source = slot
            self.memories.add(memory)
            lying.move(memory)
        self.memories.add(memory)
        if last is not None:
            # where nobody uses the usual order it is made when somebody asks for it, in bytes outside the arena
            memory.reordered = Reordered(memory, turn, self._slot(last, f"{memory.name} (channels last)"))
            self._places.append((last[0]._replace(key=memory.reordered.array), last[1]))
            memory.reordered.on_host = own is None and self._tight
            if own is None and memory in self._homes:
                home = memory.reordered.home = self._homes[memory]
                home.source = memory.reordered
        if lying is not None:
            self._binds.append((memory, lying.binds))
        memory.shared = True
        memory.set_writer(self.spent)
        moved.update((life.key, memory) for life, _ in found)
        ranges = [(at, at + life.nbytes) for life, at in found]
        life, _ = found[0]
        named = [moved[heirs[life.key]] if life.key in heirs else None for life, _ in found]
        self.tenants.append(_Tenant(memory, ranges, life.first, life.last, named))

    def _leave_out(self, steps: Iterable[Unit], lives: Lifetimes) -> None:
        """Arrays of calls in whose place another one runs, always, have no bytes."""
        for at, step in enumerate(steps):
            for memory in dict.fromkeys(memories(step.calls)):
                if memory not in lives.uses and memory not in self.memories:
                    self.memories.add(memory)
                    self.miss([memory])
                    self.tenants.append(_Tenant(memory, [], at, at, ()))

    def _room(self, place: tuple[Lifetime, int]) -> Slot:
        """Scratch of a step."""
        life, at = place
        self._places.append(place)
        self.tenants.append(_Tenant(None, [(at, at + life.nbytes)], life.first, life.last))
        return self._slot(place, "scratch")

    def _slot(self, place: tuple[Lifetime, int], name: str) -> Slot:
        life, offset = place
        return Slot(self.arena, offset, life.nbytes, name)

    def drawn(self, schedules: Sequence[Schedule]) -> Draft:
        """Of the plan's schedules, a draft in which all lies where it does in the plan, and no array lies elsewhere."""
        lives = Lifetimes([life for life, _ in self._places], {}, {}, {})
        found = Draft([schedule.units() for schedule in schedules], {}, {}, lives)
        found.layout = Layout([at for _, at in self._places], self.nbytes)
        return found

    def loads(self, steps: int) -> np.ndarray:
        """Bytes in use in each step of the pass, of so many."""
        load = np.zeros(steps + 1, np.int64)
        for tenant in self.tenants:
            for (start, stop), until in zip(tenant.ranges, tenant.untils, strict=True):
                load[tenant.first] += stop - start
                load[until + 1] -= stop - start
        return np.cumsum(load)[:-1]

    # ---------------------------------------------------------------- while it holds

    def fits(self, schedules: Sequence[Schedule]) -> bool:
        """Whether arrays still lie over each other as they did, and what takes turns is where it was."""
        renamed: dict[SyncedMemory, SyncedMemory] = {}
        for then, now in zip(self._bound, _bound(schedules), strict=True):
            if renamed.setdefault(then, now) is not now or (now is not then and {now, then} & self.memories):
                return False
        return len(set(renamed.values())) == len(renamed)

    def follow(self, span: Span, backward: bool) -> None:
        """Work out which arrays' bytes the span gives to others."""
        begin, units = self._times[backward]
        steps = {at for at, (start, stop) in enumerate(units, begin) if start < span.stop and span.start < stop}
        written = [t for t in self.tenants if t.memory in span.written or (t.memory is None and t.first in steps)]
        taken, later = Extents(), Extents()
        for tenant in written:
            tenant.take(taken)
        for tenant in self.tenants:
            if tenant.memory is not None and tenant.memory not in span.written and tenant.meets(taken):
                span.overrun.append(tenant.memory)
        if not backward:
            # which were of the pass before; but what has gone comes back in this one already, where there is time
            span.overrun += [memory for memory in self._remade if memory not in span.written]
            for memory, (_, makers, start, _) in self._remade.items():
                first, stop = (bisect_left(makers, position) for position in (span.start, span.stop))
                span.made += [(memory, 0 if first <= start else first, stop)] if first < stop else []
        anew = {memory for memory, each in self._remade.items() if not each.array.diff}
        skipped = span.schedule.skipped(span.start, span.stop)
        coming = sorted(written, key=lambda tenant: tenant.first)
        for tenant in sorted(written, key=lambda tenant: tenant.last, reverse=True):
            while coming and coming[-1].first > tenant.last:
                coming.pop().take(later)
            over = tenant.memory in anew or tenant.memory in self._homes
            used_up = tenant.memory in skipped or (over and tenant.last in steps)
            inherited = any(heir in span.written for heir in tenant.heirs if heir is not None)
            if tenant.memory is not None and (used_up or inherited or tenant.meets(later)):
                span.spent.append(tenant.memory)
        spent = {*span.spent}
        span.left = dict.fromkeys(memory for memory in span.written if memory not in spent)

    def check(self, span: Span, identity: Any) -> None:
        """Raise SharedBlobError if a span of backward would make anew what was made in another way last."""
        for memory, (_, makers, *_) in self._remade.items():
            if memory in span.first_uses and self._ran.get(memory, 0) < len(makers):
                raise SharedBlobError(
                    f"{identity} would make '{memory.name}' anew, but parts of what makes it have run by themselves: "
                    f"run it forward from its first layer again, or build the net with keep=['{memory.name}']"
                )

    def begin(self, span: Span, arena: Arena, number: int = 0) -> None:
        """The span, which has been secured, is about to run, in the pass of that number."""
        another, self._number = number != self._number, number
        for memory, first, stop in span.made:
            goes_on = first == self._ran.get(memory, 0) and not (another and self._remade[memory].at_once)
            self._ran[memory] = stop if first == 0 or goes_on else 0
        for memory, home in self._homes.items():
            if memory in span.written:
                memory.away = home.holds = False
        if arena.enter(self):
            # all at once, so that the epoch does not move with each array, and steps need not look again
            stream = self.arena.device.compute_stream() if self._side is Side.DEVICE else None
            for intent in (Intent.OVERWRITE, Intent.READ):
                self.arena.access(self._side, 0, self.nbytes, intent, stream)
        self.spend(span.overrun)

    def miss(self, memories: Iterable[SyncedMemory]) -> None:
        """Those of the memories have no bytes, as they are made in arrays of backward alone."""
        for memory in memories:
            memory.shared = True
            memory.set_writer(self.spent)

    def spend(self, memories: Iterable[SyncedMemory]) -> None:
        """Those of the memories that take turns have no bytes any more."""
        for memory in memories:
            if memory.writer is not self.spent and memory in self.memories:
                if memory in self._homes:
                    self._homes[memory].refresh()
                memory.set_writer(self.spent)

    def leave(self, span: Span) -> None:
        """The span, which has begun, is over."""
        self.spend(span.spent)
        self._send_home()

    def _send_home(self) -> None:
        """Let what has no bytes any more be read where it was evicted to."""
        for memory, home in self._homes.items():
            memory.away = memory.writer is self.spent and home.holds

    def end(self, net: Net) -> None:
        """Give the net's arrays memories of their own again, which have no bytes until another plan or pass."""
        self.spend(self.memories)  # others may have views of them
        for memory, lying in halves(net, self.memories, params=True).items():
            if memory in self.memories:
                fresh = SyncedMemory(0, memory.device, memory.name)
                fresh.shared, fresh.writer = True, self.spent
                lying.move(fresh)

    @property
    def evicts(self) -> bool:
        """Whether it has arrays for what is at the host at other times."""
        return self._tight

    @property
    def has_room(self) -> bool:
        """Whether the device may hold it, whatever else it holds by now."""
        return self.arena.device.most_bytes is None or self.nbytes <= self.arena.gpu_capacity

    def resume(self) -> None:
        """Put the net's arrays, which have the shapes they had before the plan ended, where they were; no bytes come
        back."""
        for memory, binds in self._binds:
            for bind in binds:
                bind(memory)
        self._ran.clear()


def _bound(schedules: Iterable[Schedule]) -> Iterator[SyncedMemory]:
    return memories(call for schedule in schedules for call in schedule.calls)


def unseen(lying: Mapping[SyncedMemory, Halves]) -> set[SyncedMemory]:
    """The memories of which nobody but the net's own blobs has views."""
    return {memory for memory, own in lying.items() if memory.view_count == len({*map(id, own.views)})}
