"""How a net becomes schedules: the calls of its layers, the passes over them, and a plan for their arrays."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blobmem import devices
from blobmem.errors import BlobmemError
from blobmem.memory import SyncedMemory
from blobmem.memory.blob import Blob, moves, note_move
from blobmem.memory.workspace import workspace
from blobmem.net.build import LearnableParam, Node, reshape, uncollected
from blobmem.net.captured import LEAST
from blobmem.net.clock import Clock
from blobmem.net.emitted import Emitted, calls_of
from blobmem.net.fold import Folded, Follower, fold
from blobmem.net.fusion import ops_of
from blobmem.net.layouts import is_faster, remembering
from blobmem.net.needs import Need
from blobmem.net.plan import (
    Anew,
    Arena,
    Parts,
    Plan,
    Remade,
    beside,
    in_parts,
    levels,
    run_again,
    unseen,
    update_early,
    usual,
    with_rooms,
)
from blobmem.net.plan.abreast import Abreast
from blobmem.net.plan.again import Less
from blobmem.net.plan.bringing import bring_state
from blobmem.net.plan.places import draft
from blobmem.net.plan.slices import Sliced
from blobmem.net.plan.times import COPIES, Reckoned, Times, looked_up_once, reckon
from blobmem.net.plan.ways import Made, Recipe
from blobmem.net.schedule import Schedule, Span, first_uses, joints
from blobmem.net.sharing import FoldedAway, InSlices, NeverWhole, SharingGroup, halves
from blobmem.net.steps import Done
from blobmem.ops.call import Call, memories
from blobmem.ops.registry import table

_RECENT = 4  # shapes, besides the present ones, whose schedules are kept

_OF_SHAPES = (
    "_schedules", "_plan", "_parts", "_sliced", "_anew", "_own", "_folded", "_follower", "_loss_at", "streams",
    "open_streams", "untimed",
)  # fmt: skip


class _Planned(NamedTuple):
    """What a net was compiled to for other shapes, where arrays take turns.

    Attributes:
        shapes: of its blobs.
        internals: the arrays that layers have beside them, with their shapes.
        state: attributes of `Compilation`, `_OF_SHAPES`.
    """

    shapes: list[tuple[int, ...]]
    internals: list[tuple[Blob, tuple[int, ...]]]
    state: dict[str, Any]


class Compilation:
    """The schedules of a `Net`, and what they are made of.

    Attributes:
        streams: how many backward runs on, for the present shapes.
        brings: what it uses of parameters, gradients, solver state and inputs that is evicted, for its own plan or
            another net's; its passes bring these to arrays of the arena.
        open_streams: what that would be measured for, if it is neither given nor known (`ops.cuda.streams.Key`).
        untimed: whether it was planned for less memory than it needs, and its device could say how long some of its
            calls take, but has not yet.
    """

    nodes: list[Node]
    blobs: dict[str, Blob]
    internals: dict[str, Blob]
    params: dict[str, list[Blob]]
    learnable: list[LearnableParam]
    inputs: list[str]
    outputs: list[str]
    kept: frozenset[str]
    passes: frozenset[str]
    memory: str
    backward_streams: int | str
    forward_only: bool
    device: devices.Device
    identity: Any
    group: SharingGroup
    _dynamic: list[int]

    if TYPE_CHECKING:  # what Net has

        @property
        def dtype(self) -> np.dtype: ...
        def losses(self) -> list[Blob]: ...
        def _follow(self) -> None: ...
        def _name_blobs(self) -> None: ...
        def _whole(self, backward: bool) -> list[Span]: ...

    def __init__(self) -> None:
        self._shapes = self._present_shapes()  # those that the layers know
        self._shapes_seen = -1  # `moves` when they were found to be the present ones
        self._stale: set[int] = set()  # positions of the layers that do not, and are in no schedule
        self._emitted: dict[Any, Emitted] | None = None  # while plans are tried
        self._schedules: tuple[Schedule, Schedule] | None = None  # forward, backward
        self._images_last: bool | None = None  # how they keep images; decided when the first are made
        self._recent: list[tuple[Schedule, Schedule]] = []  # those for other shapes, the last ones at the end
        self._planned: list[_Planned] = []  # in their place where arrays take turns; the present one, too
        self._done: tuple[dict[Any, Done], dict[Any, Done]] = ({}, {})  # what their `once` calls remember
        self._spans: dict[tuple[bool, int, int], Span] = {}
        self._updates: Sequence[Call] | None = None  # a solver's, which its backward passes carry out
        self._loss_at = 0  # before which call of backward the loss is waited for
        self._folded: Folded | None = None  # what of the forward schedule has batch norm in its weights
        self._follower: Follower | None = None  # makes these weights
        self._parts: Parts | None = None  # how the forward schedule takes the batch
        self._part_room: int | None = None  # bytes for which it has to, where there is room for no more
        self._sliced: Sliced | None = None  # how a run of layers does, for want of memory
        self._abreast: Abreast | None = None  # the layers that are to take slices abreast
        self._arena: Arena | None = None
        self._plan: Plan | None = None
        self._fetched: list[Blob] = []  # arrays in which evicted ones come back
        self._anew: list[Blob] = []  # those made anew for want of room
        self._own: Sequence[Blob] = ()  # that calls have beside those of layers
        self._short = False  # there is no room for the usual calls
        self._evicted: list[SyncedMemory] = []  # state and inputs, for this net's plan
        self.brings: set[SyncedMemory] = set()
        self._spread = 0.0
        self._loss_scale: Blob | None = None
        self.streams, self.open_streams, self.untimed = 1, None, False
        self._timed: list[tuple[int, ...]] = []  # the shapes for which calls were timed last
        self._tried: tuple[Any, int] = None, 1  # how many are to be tried for what
        self.beside: Callable[[], Callable[[], Sequence[Need]] | None] = _nobody  # whose needs are met beside a plan's
        self.updater: Callable[[], Callable[[], Sequence[Sequence[Call]]] | None] = _nobody  # runs calls after backward

    # ---------------------------------------------------------------- schedules

    def scale_losses(self, scale: Blob | None) -> None:
        """Multiply the gradients of losses, and so all, by what a blob has in a pass; None: leave them as they are."""
        if scale is not self._loss_scale:
            self._end_plan()
            self._loss_scale, self._schedules, self._spans = scale, None, {}

    def reshape(self) -> None:
        """Let every layer give its tops their shapes anew, from the input blobs on."""
        self._outdate(0)
        self._fit(0, len(self.nodes) - 1)
        self._compile()

    def _outdate(self, first: int) -> None:
        """The layers from `first` on are to be given their shapes anew before they run."""
        self._stale.update(range(first, len(self.nodes)))

    def _fit(self, first: int, last: int) -> bool:
        """Let layers first to last, those that are stale, give their tops their shapes; whether there were any."""
        fitted = False
        for index in range(first, last + 1) if self._stale else ():
            if index in self._stale:
                before = shapes_of(self.nodes[index])
                reshape(self.nodes[index])
                self._stale.discard(index)
                if shapes_of(self.nodes[index]) != before:
                    self._outdate(index + 1)
                fitted = True
        return fitted

    @uncollected()
    def _compile(self) -> tuple[Schedule, Schedule]:
        this: Any = self
        self._put_aside()
        self._leave_plan()
        self._shapes = self._present_shapes()
        planned = self._planned_before()
        if planned is not None:
            return planned
        self._emitted = {}
        try:
            with remembering(), looked_up_once():
                made = usual = self._made()
                if self._arena is not None:
                    made = levels.fit(this, made)
        finally:
            self._emitted = None
        self._have(made)
        self.untimed = made is not usual and self._shapes != self._timed and self._lacks_times(made)
        schedules = made.schedules
        for schedule in schedules:
            schedule.bind()
        self._spans = {}
        if self._arena is not None:
            self._plan = Plan(
                this, schedules, made.kept, self._arena.memory(self.device), made.remade, made.drawn, made.homes
            )
            self._plan.miss(made.absent)
            self._miss_absent()
        self._note_updates(schedules[1])
        self._schedules = schedules  # last: if anything is raised before, the next pass begins here anew
        self._note_plan()
        return schedules

    def _made(
        self,
        less: Less | None = None,
        streams: int = 0,
        bring: bool = True,
    ) -> Made:
        """The schedules, before anything but state is evicted.

        `less` says what is made anew, the usual arrays if None; `streams`, of backward, if not 0. What is evicted of
        state is not brought if not `bring`.
        """
        this: Any = self
        self._fetched, self._sliced, self._anew = [], None, []  # those of calls that were made before, and did not do
        emitted = self._emitted_with(less.apart if less is not None else {})
        forward, backward, again = emitted.forward, emitted.backward, emitted.again
        self.streams, self.open_streams = emitted.streams
        self._sliced, self._own = emitted.sliced, emitted.arrays
        remade, absent = list[Remade](), set[SyncedMemory]()
        if self._arena is not None:
            forward, backward, remade, absent = self._recompute(emitted, less)
            self._share_buffers(self._arena, first_uses([*forward, *backward]))
        if self._images_last is None:
            self._images_last = is_faster([*forward, *backward], self.device)
        forward = self._fold(forward)
        self._name_blobs()  # layers make some of their arrays when they know the device
        passing = self._passing([*forward, *backward])
        kept = self.read_after()
        if self._updates is not None:
            places = joints(backward, self.device, self._images_last, passing)
            backward = update_early(backward, self._updates, places, {*self._evicted})
            for blob in (blob for blobs in self.params.values() for blob in blobs):
                blob.owner = self.identity  # so that a gradient without bytes says so
                if blob.diff_is_held():
                    kept.append(blob.diff_view.memory)
        self._parts = self._in_parts(forward)
        if self._parts is not None:
            forward = self._parts.calls
        streams = streams or self.streams
        if streams > 1:
            beside(backward)
        else:
            for each in backward:
                each.stream = 0
        self.brings = self._evicted_now()
        made = Made(
            forward, backward, remade, kept, passing, again=again, absent=absent, anew=self._anew,
            sliced=emitted.sliced, own=emitted.arrays, recipe=Recipe(less, self._abreast),
        )  # fmt: skip
        if bring:
            made = bring_state(this, made)
            self._fetched = made.fetched
        calls = made.forward, made.backward
        made.bound = self._had_before(*calls) or self._scheduled(*calls, passing, streams)
        return made

    def _have(self, made: Made) -> None:
        """Have the arrays that these calls have beside those of layers (`pieces`), and no others."""
        self._fetched, self._sliced, self._anew, self._own = made.fetched, made.sliced, made.anew, made.own

    @property
    def spread(self) -> float:
        """If updates of what is evicted are spread over backward (`plan.updates.spread`), the part of the room that
        arrays may take beside what comes and goes; else 0."""
        return self._spread if self._updates is not None else 0.0

    def _joints(
        self, forward: Sequence[Call], backward: Sequence[Call], passing: set[SyncedMemory]
    ) -> tuple[Sequence[int], Sequence[int]]:
        """The positions of each of the two at which calls may be put in; `passing` as `_scheduled` has it."""
        read_again, last = {memory for each in backward for memory in each.read_memories()}, bool(self._images_last)
        return (
            joints(forward, self.device, last, passing - read_again),
            joints(backward, self.device, last, passing),
        )

    def _evicted_now(self) -> set[SyncedMemory]:
        """Those of its memories that a plan has evicted for good, if it is to bring them: not a net that keeps all."""
        if self._arena is None:
            return set()
        params = {blob.data_view.memory for blobs in self.params.values() for blob in blobs}
        return {memory for memory in (*params, *self._evicted) if memory.evicted}

    def updates_after(self) -> Sequence[Sequence[Call]]:
        """The calls that a solver runs after backward, each of the sequences by itself."""
        updates = self.updater()
        return () if updates is None else updates()

    def evict_state(self, state: Mapping[SyncedMemory, int], spread: float = 0.0) -> None:
        """Let these parameters, their gradients, what a solver keeps and inputs, and no others, be evicted for as long
        as the plan holds that is being made, each but for so many first bytes; not those that somebody uses on the
        device. `spread` is as the attribute."""
        self._spread = spread
        for memory in self._evicted:
            memory.evicted, memory.staying = False, 0
        self._evicted, self._planned = [memory for memory in state if memory.leave_device()], []
        for memory in self._evicted:
            memory.evicted, memory.staying = True, state[memory]
        note_move()  # nets that share any are to be planned anew

    def _scheduled(
        self, forward: list[Call], backward: list[Call], passing: set[SyncedMemory], streams: int = 1
    ) -> tuple[Schedule, Schedule]:
        """The schedules of these calls; `passing` are memories that nobody reads but they."""
        read_again = {memory for each in backward for memory in each.read_memories()}
        last = bool(self._images_last)
        return (
            Schedule(forward, self.device, False, self._done[0], last, passing - read_again),
            Schedule(backward, self.device, False, self._done[1], last, passing, forward, streams),
        )

    def _lacks_times(self, made: Made) -> bool:
        """Whether the device can time calls, and has not timed all of these."""
        if not (self.device.graphs and hasattr(self.device, "marks")):
            return False
        times = Times(self.device)
        return not all(times.is_known(unit.calls[-1]) for units in made.places.units for unit in units)

    @contextlib.contextmanager
    def timed(self) -> Iterator[Clock]:
        """Have the calls of the passes of the net as it is compiled timed; the clock has stopped afterwards."""
        clock, schedules = Clock(self.device), self.compiled()
        for schedule in schedules:
            schedule.clock = clock
        try:
            yield clock
        finally:
            for schedule in schedules:
                schedule.clock = None
        clock.stop()

    def plan_anew(self) -> None:
        """Plan the net anew before its next pass, by the times that are known now."""
        self._end_plan()
        self._timed, self._schedules, self._spans, self.untimed = self._shapes, None, {}, False
        self.trim_arena(0)  # algorithms that are not known yet are searched for in that room

    def reckoned(self) -> Reckoned:
        """When what runs in a pass forward and backward begins and ends, for the blobs' present shapes."""
        this: Any = self
        schedules, plan = self.compiled(), self._plan
        drawn = draft(this, schedules, self.read_after()) if plan is None else plan.drawn(schedules)
        return reckon(drawn, Times(self.device))

    def _note_updates(self, backward: Schedule) -> None:
        """Where the loss is waited for: before the first of a solver's updates, and before what is copied beside calls,
        as all copies of what runs before that, by itself, have ended when the rest begins; or at once, if those before
        the copy would be too few for a graph."""
        updates = {id(each.attributes) for each in self._updates or ()}  # their operands may be others by now
        calls = backward.calls
        found = (at for at, each in enumerate(calls) if each.op in COPIES or id(each.attributes) in updates)
        at = next(found, len(calls))
        copies = at < len(calls) and calls[at].op in COPIES
        self._loss_at = 0 if copies and sum(unit.start < at for unit in backward.units()) < LEAST else at

    def _find_streams(self, backward: Sequence[Call]) -> tuple[int, Any]:
        """`streams` and `open_streams` of a pass of these calls."""
        if isinstance(self.backward_streams, int):
            return self.backward_streams, None
        device: Any = self.device
        if device.streams == 1 or self._dynamic or not (device.graphs or device.predicts):
            return 1, None
        from blobmem.ops.cuda import streams

        key = streams.key_of(backward, self.memory, self.dtype, device)
        choice = key and streams.find(key, device)
        if choice:
            return choice.number, None
        return (1, None) if device.predicts else (self._tried[1] if self._tried[0] == key else 1, key)

    def run_backward_on(self, streams: int) -> None:
        """Let backward run on so many streams from the next pass on, as long as `open_streams` stays what it is."""
        if streams == self.streams:
            return
        self._end_plan()
        self._tried, self._schedules, self._spans = (self.open_streams, streams), None, {}
        if streams == 1:  # give back what two took
            arenas = [] if self._arena is None else [self._arena.memory(self.device)]
            for memory in (workspace(self.device, 1), *arenas):
                with contextlib.suppress(BlobmemError):  # somebody holds an array there
                    memory.trim()

    def _put_aside(self) -> None:
        """Keep the present schedules, if there are any, for when their shapes come back (`_note_plan` keeps plans)."""
        if self._schedules is not None:
            for schedule in self._schedules:
                schedule.put_aside()
            if self._arena is None:
                self._recent = [*self._recent, self._schedules][-_RECENT:]
        self._recent = [pair for pair in self._recent if pair[0].device is self.device]
        self._schedules = None

    def _note_plan(self) -> None:
        """Keep what was planned for when its shapes come back, unless it takes bytes of the host."""
        if self._plan is not None and not self._stale and not self._plan.evicts:
            state = {name: getattr(self, name) for name in _OF_SHAPES}
            internals = [(blob, blob.shape) for blob in self.internals.values()]
            others = [each for each in self._planned if each.shapes != self._shapes]
            self._planned = [*others, _Planned(self._shapes, internals, state)][-1 - _RECENT :]

    def _planned_before(self) -> tuple[Schedule, Schedule] | None:
        """What was planned for the present shapes, which holds again; None if there is nothing that does."""
        for each in self._planned if not self._stale else []:
            if each.shapes == self._shapes and each.state["_plan"].has_room:
                self._planned = [*(other for other in self._planned if other is not each), each]
                for blob, shape in each.internals:
                    blob.reshape(shape)
                vars(self).update(each.state, _schedules=None, _spans={})
                each.state["_plan"].resume()
                self._miss_absent()
                self._schedules = each.state["_schedules"]  # last, as in `_compile`
                return self._schedules
        return None

    def take_sources(self) -> bool:
        """Let the calls that are made from now on, for this plan, have gradients of batch norms from what is convolved
        where that may be (`plan.sources`), and join parts of what is joined (`plan.joins`): whether any do."""
        before = [each.operands for each in self._emitted_with({}).forward]
        self._short = True
        emitted = self._emitted_with({})
        self._short = bool(emitted.arrays) or [each.operands for each in emitted.forward] != before
        return self._short

    def take_abreast(self, which: Abreast | None) -> None:
        """Let the calls that are made from now on, for this plan, have those layers in slices abreast, or none."""
        self._abreast = which

    def _had_before(self, forward: list[Call], backward: list[Call]) -> tuple[Schedule, Schedule] | None:
        """The schedules that these calls were before, with what has been captured of them."""
        for pair in self._recent:
            both = zip(pair, (forward, backward), strict=True)
            if all(each.is_of(calls, self._images_last) for each, calls in both):
                self._recent.remove(pair)
                return pair
        return None

    def _takes(self, name: str) -> bool:
        """Whether a pass of that name is applied."""
        deterministic = getattr(self.device, "deterministic", False)
        return name in self.passes and not self._dynamic and not self._stale and not deterministic

    def _fold(self, forward: list[Call]) -> list[Call]:
        """The calls with batch norm folded into weights, if it is to be and computes on a device."""

        def array_like(maker: Call, purpose: str, shape: tuple[int, ...]) -> Blob:
            layer = self.nodes[maker.layer].layer
            return layer.internal_blob(purpose, shape, layer.blobs[0].dtype)

        self._folded = None
        if self._takes("fold") and self.device.family != "host":
            free = set[SyncedMemory]() if self._arena is None else self._free(())
            params = {blob.data_view.memory for node in self.nodes for blob in node.layer.blobs}
            self._folded = fold(forward, params, array_like, free, bool(self._images_last))
        if self._folded is None:
            self._follower = None
            return forward
        before = self._follower
        if before is None or before.device is not self.device or before.calls != self._folded.makers:
            self._follower = Follower(self._folded.makers, self.device)
        return self._folded.calls

    def take_parts(self, room: int) -> bool:
        """Let a net that only runs forward take the batch in as many parts as its arrays want for no more than so many
        bytes, or whole if that is enough, where it may: whether its calls are to be made anew."""
        if not self._takes("slices") or self._part_room == room:
            return False
        self._part_room = room
        return True

    @property
    def lacks_room(self) -> bool:
        """Whether it takes the batch in parts, or looked whether it has to, for want of room."""
        return self._part_room is not None

    def _in_parts(self, forward: list[Call]) -> Parts | None:
        """The calls with the first layers taking the batch in parts, if they are to and it is worth it."""
        this: Any = self
        if not self._takes("parts" if self._part_room is None else "slices"):
            return None
        keeps = self._arena is None
        free = {*halves(this, ())} - {*self.read_after()} if keeps else self._free(())
        ops = table(self.device.family)
        last, on_host = bool(self._images_last), self.device.is_host
        parts = in_parts(forward, ops, free, keeps, last, on_host, self._part_room)
        if parts is None or keeps or not hasattr(self.device, "workspace_limit"):
            return parts
        pieces = {piece.data_view.memory for piece in parts.pieces}
        return parts._replace(calls=with_rooms(parts.calls, forward, free | pieces))

    def _free(self, used: Container[SyncedMemory]) -> set[SyncedMemory]:
        """The memories, gradients' only if they are `used`, that nobody reads but the calls of a pass."""
        this: Any = self
        return unseen(halves(this, used)) - {*self.read_after()}

    def _miss_absent(self) -> None:
        """Say of arrays that are never whole, or never there, why they cannot be read."""
        for memory in self._parts.absent if self._parts is not None else ():
            memory.shared = True
            memory.set_writer(NeverWhole(self.memory))
        for memory in self._sliced.absent if self._sliced is not None else ():
            memory.shared = True
            memory.set_writer(InSlices(self.memory))
        for memory in self._folded.absent if self._folded is not None else ():
            memory.shared = True
            memory.set_writer(FoldedAway(self.memory))

    @property
    def pieces(self) -> list[Blob]:
        """Arrays of parts or slices of the batch, in place of blobs that are never whole, and those that are brought
        back or made anew for want of room."""
        divided = (each.pieces for each in (self._parts, self._sliced) if each is not None)
        return [*self._own, *self._anew, *self._fetched, *chain.from_iterable(divided)]

    def _emitted_with(self, apart: Mapping[tuple[int, Any], int]) -> Emitted:
        """The calls of layers, of which some run apart (`Less`): the same ones for all plans that are tried."""
        if self._emitted is None:
            return self._emit(apart)
        key = frozenset(apart.items()), self._abreast, self._short
        if key not in self._emitted:
            self._emitted[key] = self._emit(apart)
        return self._emitted[key]

    def _emit(self, apart: Mapping[tuple[int, Any], int]) -> Emitted:
        """The calls of layers; where arrays take turns, those by which less need be kept for backward."""
        forward, backward = calls_of(self.nodes, self._stale, self._loss_scale)
        if apart:
            for each in (*forward, *backward):
                each.together = apart.get((each.layer, each.op), 0)
        emitted = Emitted(forward, backward, self._find_streams(backward))
        if self._arena is None:
            return emitted
        free, ops = self._free({*memories([*forward, *backward])}), ops_of(self.device)
        emitted = emitted.keep_less(free, ops, self._short)
        if self._abreast is not None:
            emitted = emitted.abreast(self._abreast, free, ops, bool(self._images_last)) or emitted
        return emitted

    def _recompute(self, emitted: Emitted, less: Less | None) -> Anew:
        """The calls with those put in by which arrays are made anew, the usual ones if it is not said which."""
        again, calls = emitted.again, [*emitted.forward, *emitted.backward]
        assert again is not None
        if less is None:
            again.held = ()
            # slices need an array each
            array_like = self._recomputed if emitted.sliced is None else self._made_anew
            anew = run_again(again, usual(again.uses, again.free, again.traffic), array_like)
        else:
            if emitted.places is None:
                last = bool(self._images_last)
                emitted.places = joints(emitted.backward, self.device, last, self._passing(calls))
            again.held = less.held
            anew = run_again(again, less.anew, self._made_anew, emitted.places, less.rounds)
        return anew._replace(remade=[*emitted.remade, *anew.remade], absent=anew.absent | emitted.absent)

    def _recomputed(self, maker: Call, blob: Blob) -> Blob:
        """The array that is made anew like a blob, from a call of forward on."""
        return self.nodes[maker.layer].layer.internal_blob("recomputed", blob.shape, blob.dtype)

    def _made_anew(self, maker: Call, blob: Blob) -> Blob:
        """The same, where a layer may have several."""
        self._anew.append(Blob(blob.shape, dtype=blob.dtype, device=self.device, name=blob.name))
        return self._anew[-1]

    def _passing(self, calls: Sequence[Call]) -> set[SyncedMemory]:
        """The memories that nobody may read but these calls, a whole pass, which fill them first."""
        if self._arena is None:
            return set()
        ops, uses = table(self.device.family), first_uses(calls)
        on_host = {*memories(each for each in calls if each.op not in ops)}
        free = self._free(uses) - on_host
        return {memory for memory, filled in uses.items() if filled and memory in free}

    def _share_buffers(self, arena: Arena, uses: Mapping[SyncedMemory, bool]) -> None:
        """Let data come through the same memories as to the other nets of an arena, where each pass replaces all that
        is there: not where a buffer has the batches of several passes, nor what is filled once."""
        for blob in self._fed():
            own = blob.data_view.memory
            if uses.get(own, False) and own.views() == [blob.data_view]:
                shared = arena.buffers.setdefault(blob.name, own)
                shared.shared = True
                if shared is not own:
                    blob.bind_data(shared, 0)

    def _fed(self) -> list[Blob]:
        """The arrays through which data comes to the device."""
        layers = [node.layer for node in self.nodes]
        return [layer.internal[name] for layer in layers for name in layer.input_buffers if name in layer.internal]

    @property
    def takes_turns(self) -> bool:
        """Whether arrays take turns at the bytes of an arena."""
        return self._arena is not None

    def arena_memory(self) -> SyncedMemory | None:
        """The bytes of the arena, if there is one."""
        return None if self._arena is None else self._arena.memory(self.device)

    def vacate_arena(self) -> None:
        """What does not belong to the net is about to use its arena: its arrays have no bytes any more."""
        if self._arena is not None:
            self._arena.vacate()

    def trim_arena(self, room: int) -> None:
        """Let the arena, which does not hold a plan of this net now, take no more than so many bytes."""
        arena = self.arena_memory()
        if arena is not None and arena.gpu_capacity > room:
            for other in self.group.members:
                if other._arena is self._arena:
                    other._planned = []  # whose places keep its bytes
            self.vacate_arena()
            with contextlib.suppress(BlobmemError):  # somebody holds an array there
                arena.trim()
                if arena.gpu_capacity > room:  # garbage still has views of it
                    gc.collect()
                    arena.trim()

    @property
    def plan_bytes(self) -> int:
        """What its present plan takes of the arena; 0 if there is none."""
        return 0 if self._plan is None else self._plan.nbytes

    def keep_blobs(self) -> None:
        """Let every blob have bytes of its own from now on, as with memory="keep"."""
        self._end_plan()
        self.memory, self._arena, self._schedules, self._updates = "keep", None, None, None

    def _end_plan(self) -> None:
        """Plan anew, whatever was planned before, for other shapes too."""
        self._planned = []
        self._leave_plan()

    def _watch_state(self) -> None:
        """Somebody is called between layers, who may write what is evicted of the state: from now on it comes right
        before it is used."""
        if self.brings:
            self._end_plan()
            self._schedules, self._spans = None, {}

    def _leave_plan(self) -> None:
        """Give all blobs memories of their own again, in which nothing is."""
        this: Any = self
        if self._plan is not None or self._parts is not None or self._folded is not None:
            self._schedules, self._spans = None, {}
        if self._plan is not None:
            self._plan.end(this)
            self._plan = None
        self._parts = self._folded = self._sliced = self._abreast = None
        self._fetched, self._anew, self._own, self._short = [], [], (), False
        self.brings = set()
        if self._evicted:
            self.evict_state({})

    def update_in_backward(self, updates: Callable[[], Sequence[Call]] | None) -> bool:
        """Let a solver's backward passes, `backward_and_update`, carry out its updates of parameters, each as soon as
        its gradient is complete; None: no longer. Whether they will: a net that keeps its blobs does not.

        `updates` gives their calls (`plan.update_early`), once the net is where it is going to compute. While it gives
        the same object there is nothing to do; else the net is planned anew.
        """
        with self.group.lock:
            self._follow()
            calls = updates() if updates is not None and self._arena is not None else None
            if calls is not self._updates:
                self._end_plan()
                self._updates, self._schedules, self._spans = calls, None, {}
            return calls is not None

    @property
    def updates_in_backward(self) -> bool:
        """Whether a solver's backward passes carry out its updates."""
        return self._updates is not None

    def read_after(self) -> list[SyncedMemory]:
        """The memories that somebody may use beside or after a pass, whatever became of the others."""
        kept = [blob for name, blob in (*self.blobs.items(), *self.internals.items()) if name in self.kept]
        # the next batch is on its way to what is fed while a pass runs
        data = [*(self.blobs[name] for name in self.outputs), *self.losses(), *self._fed(), *kept]
        diffs = [*(self.blobs[name] for name in self.inputs), *kept]
        return [blob.data_view.memory for blob in data] + [blob.diff_view.memory for blob in diffs]

    def _present_shapes(self) -> list[tuple[int, ...]]:
        return [blob.shape for blob in self.blobs.values()]

    def compiled(self, first: int = 0, last: int | None = None) -> tuple[Schedule, Schedule]:
        """The forward and the backward schedule for the blobs' present shapes; of layers first to last at least.

        Other layers keep the shapes they had, as in Caffe: they need not fit an input that only the first ones see.
        """
        now = moves()
        if now != self._shapes_seen:  # some blob, perhaps of this net, has another shape or place
            if self._plan is not None and self._schedules is not None and not self._plan.fits(self._schedules):
                self._schedules, self._planned = None, []
            if self.brings != self._evicted_now():
                self._schedules, self._planned = None, []
            if self._shapes == self._present_shapes():
                self._shapes_seen = now
            else:
                self._outdate(0)
            self._recent = [pair for pair in self._recent if all(each.is_at_home() for each in pair)]
        if self._fit(first, len(self.nodes) - 1 if last is None else last):
            return self._compile()
        return self._schedules or self._compile()

    def planned(self) -> Plan | None:
        """The plan of a whole pass for the blobs' present shapes; None if the net keeps its blobs."""
        self._whole(not self.forward_only)
        return self._plan


def _nobody() -> None:
    return None


def shapes_of(node: Node) -> list[tuple[int, ...]]:
    """The shapes of what a layer fills."""
    return [blob.shape for blob in (*node.top, *node.layer.internal.values())]
