"""The schedule: a net compiled to a flat list of calls, and what runs it."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from blobmem.devices import Device
from blobmem.memory import Intent, Side, SyncedMemory, View
from blobmem.memory.blob import moves
from blobmem.memory.slot import Slot
from blobmem.memory.workspace import workspace, workspaces
from blobmem.net.captured import Captured, pieces, why_eager
from blobmem.net.fusion import Group, groups, ops_of
from blobmem.net.lanes import Lanes
from blobmem.net.layouts import channels_last
from blobmem.net.needs import Constant, Need
from blobmem.net.steps import Bound, BoundLast, Done, Step, kind_of, run_by, scratch_of
from blobmem.ops.call import Call

if TYPE_CHECKING:
    from blobmem.net.clock import Clock


class Unit(NamedTuple):
    """What runs at one time: calls from `start` to `stop`, which may run as one.

    Attributes:
        calls: these calls as they run, and the one that may run in their place.
        scratch: bytes of workspace that any of these takes on the schedule's side.
        travels: some of it runs on the other side, so that its arrays are copied to and fro.
        lane: the number of the stream that it is queued on.
    """

    start: int
    stop: int
    calls: list[Call]
    scratch: int
    travels: bool
    lane: int = 0

    @property
    def running(self) -> list[Call]:
        """Those of the calls that may run: of a layer's, which no run parts, the one in their place alone."""
        return self.calls[-1:] if len({each.layer for each in self.calls[:-1]}) == 1 else self.calls


class Schedule:
    """Calls in the order in which they run, bound to a device.

    Steps follow their blobs: after a reshape, growth or another sharing the next run uses the new places.

    `done` is what `once` calls remember; schedules of one net that follow each other hand it on, so that none of them
    does again, over what a script may have written since, what an earlier one has done. `images_last` keeps images
    channels last (`layouts`). `passing` are memories that nobody reads but these calls (`fusion.groups`). `before` are
    calls that run before these and fill arrays for them. `streams` is how many of them calls may be queued on.

    Attributes:
        whole: an iteration that ends with these calls, as one graph (`net.settled`).
    """

    def __init__(
        self,
        calls: Sequence[Call],
        device: Device,
        on_host: bool = False,
        done: dict[Any, Done] | None = None,
        images_last: bool = False,
        passing: Container[SyncedMemory] = (),
        before: Sequence[Call] = (),
        streams: int = 1,
    ) -> None:
        self.calls = list(calls)
        self.whole: Any = None
        self.streams = min(streams, device.streams)
        self._shapes = _shapes(calls)
        self.device = device
        self.images_last = images_last
        self.side = Side.HOST if on_host or device.is_host else Side.DEVICE
        self._done = {} if done is None else done
        self._before = before
        self._known: dict[Any, int] = {}  # of calls, their workspace (`scratch_of`)
        self._calls, self._groups = _fusions(self.calls, device, self.side, images_last, passing)
        self._run_of = {position: at for at, group in self._groups.items() for position in range(at, group.stop)}
        self._skipped = {at: group.skipped for at, group in self._groups.items() if group.skipped}
        self._programs: dict[tuple[int, int | None], list[Step]] = {}
        self._varying: dict[range, list[Step]] = {}  # whose attributes are set, by calls
        self._captured: dict[tuple[int, int | None], list[Step | Captured | Lanes]] = {}
        self._needs = Constant([])
        self._views: list[View] | None = None
        self._moves = -1  # when these were found
        self._arena: list[Need] = []  # of all that lies in slots
        self.clock: Clock | None = None  # what times the steps as they run, if they are to be timed

    @property
    def _steps(self) -> list[Step]:
        """The calls, bound."""
        return self._bound[0]

    @property
    def _fused(self) -> dict[int, tuple[int, Step]]:
        """Where runs of calls begin that may run as one: where they end, and the step that does."""
        return self._bound[1]

    def bind(self) -> None:
        """Bind the calls to arrays of the shapes that they have now; else that is done when they run first."""
        _ = self._bound

    @functools.cached_property
    def _bound(self) -> tuple[list[Step], dict[int, tuple[int, Step]]]:
        """`_steps` and `_fused`; most of the schedules with which plans are tried have none."""
        count, steps, known = Counter[Any](), list[Step](), self._known
        for call in self._calls:
            place = (call.layer, call.layer_name, call.op)
            mark = self._done.setdefault((*place, count[place]), Done()) if call.once else Done()
            count[place] += call.once
            steps.append(kind_of(call)(call, self.device, self.side is Side.HOST, mark, self.streams, known))
        fused = {
            at: (group.stop, Step(group.call, self.device, False, Done(), self.streams, known))
            for at, group in self._groups.items()
        }
        given, written = set[SyncedMemory](), set[SyncedMemory]()
        for call in (*self._before, *self._calls) if self.images_last else ():
            given.update(memory for memory in call.read_memories() if memory not in written)
            written.update(call.written_memories())
        for bound in (bound for step in (*steps, *(step for _, step in fused.values())) for bound in step.order):
            if isinstance(bound, BoundLast):
                bound.is_given = bound.operand.memory in given
        return steps, fused

    def _units(self) -> Iterator[tuple[int, int, list[Step]]]:
        """Where what runs at one time begins and ends, and the steps that may run for it."""
        at = 0
        while at < len(self._calls):
            stop, *fused = self._fused.get(at, (at + 1,))
            yield at, stop, [*self._steps[at:stop], *fused]
            at = stop

    def _bounds(self) -> Iterator[Bound]:
        return (bound for _, _, steps in self._units() for step in steps for bound in step.order)

    def units(self) -> list[Unit]:
        """What runs, in order."""
        units, at = list[Unit](), 0
        while at < len(self._calls):
            group = self._groups.get(at)
            stop = at + 1 if group is None else group.stop
            calls = self._calls[at:stop] + ([] if group is None else [group.call])
            ran = [run_by(call, self.device, self.side is Side.HOST) for call in calls]
            here = [(op, call) for (op, side), call in zip(ran, calls, strict=True) if op and side is self.side]
            scratch = max((scratch_of(op, call, self.device, self._known) for op, call in here), default=0)
            travels = any(side is not self.side for _, side in ran)
            lane = 0 if self.streams == 1 or ran[-1][1] is Side.HOST else calls[-1].stream
            units.append(Unit(at, stop, calls, scratch, travels, lane))
            at = stop
        return units

    def joints(self) -> list[int]:
        """The positions, from 0 to the end, at which other calls can be put in without parting what may run as one."""
        return _between(len(self.calls), self._groups)

    def lie_in(self, arena: SyncedMemory, nbytes: int, scratch: Mapping[int, SyncedMemory]) -> None:
        """Take so many bytes of an arena for all that lies in its slots; `scratch` has those of units, by start."""
        self._arena = [Need(arena, self.side, nbytes)] if nbytes else []
        for start, _, steps in self._units():
            for step in steps:
                step.room = scratch.get(start) if step.side is self.side else None

    def put_aside(self) -> None:
        """Another schedule runs instead, for a while: keep no bytes from `trim`."""
        for bound in self._bounds():
            bound.put_aside()
        self._views, self._moves = None, -1

    def is_of(self, calls: Sequence[Call], images_last: bool | None) -> bool:
        """Whether it is the schedule that these calls would become, on arrays of their present shapes."""
        if images_last != self.images_last or len(calls) != len(self.calls) or _shapes(calls) != self._shapes:
            return False
        try:
            return calls == self.calls
        except ValueError:  # arrays among the attributes
            return False

    def is_at_home(self) -> bool:
        """Whether what it used last is still what its operands lie in."""
        used = (bound for bound in self._bounds() if bound.keeper)
        return all(bound.operand.memory is bound.view.memory and bound.is_kept() for bound in used)

    def span(self, layers: range) -> tuple[int, int]:
        """Positions [start, stop) of the calls of these layers, which stand together."""
        wanted = [i for i, call in enumerate(self.calls) if call.layer in layers]
        return (wanted[0], wanted[-1] + 1) if wanted else (0, 0)

    def _program(self, start: int = 0, stop: int | None = None) -> list[Step]:
        """What runs for these calls: fused steps, where all their calls are among them, and the others' own."""
        program = self._programs.get((start, stop))
        if program is None:
            program = self._programs[start, stop] = []
            end = len(self._steps) if stop is None else stop
            at = start
            while at < end:
                after, step = self._fused.get(at, (end + 1, self._steps[at]))
                if after > end:
                    after, step = at + 1, self._steps[at]
                program.append(step)
                at = after
        return program

    def skipped(self, start: int, stop: int) -> set[SyncedMemory]:
        """The memories that these calls would write, were some of them not fused."""
        whole = (operands for at, operands in self._skipped.items() if start <= at and self._fused[at][0] <= stop)
        return {operand.memory for operands in whole for operand in operands}

    def pieces(self, start: int, stop: int | None) -> list[Step | Captured | Lanes]:
        """What runs for these calls: graphs, and what is queued by itself."""
        found = self._captured.get((start, stop))
        if found is None:
            found = self._captured[start, stop] = pieces(self._program(start, stop), self.device)
        return found

    def repeats(self, start: int, stop: int | None) -> bool:
        """Whether these calls may run again as they ran last."""
        return all(piece.repeats for piece in self.pieces(start, stop))

    def used(self, start: int, stop: int | None) -> set[SyncedMemory]:
        """The memories that these calls use as they ran last, workspaces not among them."""
        steps = self._program(start, stop)
        bounds = [bound for step in steps for bound in step.order]
        homes = {step.home for step in steps if step.home is not None}
        return homes | {bound.operand.memory for bound in bounds} | {bound.keeper for bound in bounds if bound.keeper}

    def why_eager(self, start: int = 0, stop: int | None = None) -> dict[str, str]:
        """Of each layer with calls among these, why not all of them are captured when they run so; "" if they are."""
        reasons = why_eager(self.pieces(start, stop), self.device)
        layers: dict[str, str] = {}
        for position in range(len(self.calls))[start:stop]:
            step = self._fused[self._run_of[position]][1] if position in self._run_of else None
            name = self.calls[position].layer_name
            layers[name] = layers.get(name) or reasons[step if step in reasons else self._steps[position]]
        return layers

    def write_graphs(self, stem: str) -> list[str]:
        """Write each graph that there is now as a DOT file, STEM-NUMBER.dot; the files' names."""
        found = [piece for run in self._captured.values() for piece in run if isinstance(piece, Captured)]
        names = []
        for number, graph in enumerate(graph for piece in found for graph in piece.graphs):
            names.append(f"{stem}-{number}.dot")
            graph.write_dot(names[-1])
        return names

    def scratch_bytes(self, start: int = 0, stop: int | None = None) -> list[int]:
        """Bytes of each stream's workspace on the side where the device computes."""
        most = [0] * self.streams
        for step in self._program(start, stop):
            if step.side is self.side and step.room is None:
                most[step.lane] = max(most[step.lane], step.scratch)
        return most

    def needs(self, start: int = 0, stop: int | None = None) -> list[Need]:
        """All the capacity that a run of these calls will use, workspace included."""
        return self.blob_needs(start, stop) + self.scratch_need(self.scratch_bytes(start, stop))

    def scratch_need(self, sizes: Iterable[int]) -> list[Need]:
        """So many bytes of each workspace. They are other memories in each thread, so nobody should keep this."""
        return [Need(workspace(self.device, lane), self.side, nbytes) for lane, nbytes in enumerate(sizes) if nbytes]

    def blob_needs(self, start: int = 0, stop: int | None = None) -> list[Need]:
        """The capacity that a run of these calls will use of the memories that blobs are in."""
        most: dict[tuple[SyncedMemory, Side], int] = {}
        for step in self._program(start, stop):
            for memory, side, nbytes in step.needs():
                if nbytes > most.get((memory, side), 0) and not isinstance(memory, Slot):
                    most[memory, side] = nbytes
        return self._arena + [Need(memory, side, nbytes) for (memory, side), nbytes in most.items()]

    def all_needs(self) -> list[Need]:
        """`needs` of the whole schedule, worked out anew only after a blob has moved to another memory."""
        return self._present_needs().needs + self.scratch_need(self.scratch_bytes())

    def all_missing(self) -> list[Need]:
        """Those of `all_needs` that may not be met."""
        return self._present_needs().missing() + self.scratch_need(self.scratch_bytes())

    def _present_needs(self) -> Constant:
        now = moves()
        if now != self._moves:
            views = [operand.view for call in self.calls for operand in call.present()]
            if views != self._views:
                self._needs, self._views = Constant(self.blob_needs()), views
            self._moves = now
        return self._needs

    def set_attributes(self, calls: range, attributes: dict[str, Any], first: dict[str, Any] | None = None) -> None:
        """The attributes that these calls run with from now on; what runs first for them, those of `first`, too.

        Their workspace must not depend on them. ValueError for a part of calls that were fused since they have the
        same ones.
        """
        for step in self._varying.get(calls) or self._let_vary(calls):
            step.attributes.update(attributes)
        if first:
            self._steps[calls.start].attributes.update(first)
            if calls.start in self._run_of:
                self._fused[self._run_of[calls.start]][1].attributes.update(first)

    def _let_vary(self, calls: range) -> list[Step]:
        """What runs for these calls, whose attributes are set."""
        steps = [self._steps[index] for index in calls]
        for at in {self._run_of[index] for index in calls if index in self._run_of}:
            stop, step = self._fused[at]
            if at < calls.start or stop > calls.stop:
                raise ValueError(f"calls {at} to {stop} run as one, so none of them has attributes of its own")
            steps.append(step)
        for step in steps:
            step.varies = True
        self._varying[calls] = steps
        return steps

    def run(self, start: int = 0, stop: int | None = None, again: bool = False) -> None:
        """Run the calls; what they need should have been secured.

        `again`: as they ran last (`net.settled`), while somebody holds `device.running()`.
        """
        try:
            if again:
                for piece in self.pieces(start, stop):
                    piece.run_again()
                return
            with self.device.running():
                stream, scratch = self.device.compute_stream(), workspaces(self.device, self.streams)
                if self.clock is not None:
                    self.clock.run(self._program(start, stop), stream, scratch)
                    return
                for piece in self.pieces(start, stop):
                    piece.run(stream, scratch)
        finally:
            if self.device.faults is not None:
                self.device.faults.layer = ""


def _shapes(calls: Iterable[Call]) -> list[list[tuple[int, ...]]]:
    return [[operand.op_shape for operand in each.present()] for each in calls]


def _fusions(
    calls: list[Call], device: Device, side: Side, images_last: bool, passing: Container[SyncedMemory]
) -> tuple[list[Call], Mapping[int, Group]]:
    """The calls as they are bound, and where runs of them begin that may run as one."""
    if side is Side.DEVICE and images_last:
        calls = channels_last(calls)
    fuses = side is Side.DEVICE and device.family != "host"
    return calls, groups(calls, ops_of(device), passing, device) if fuses else {}


def joints(
    calls: Sequence[Call], device: Device, images_last: bool, passing: Container[SyncedMemory] = ()
) -> list[int]:
    """The positions, from 0 to the end, at which others can be put in without parting what would run as one."""
    side = Side.HOST if device.is_host else Side.DEVICE
    _, found = _fusions(list(calls), device, side, images_last, passing)
    return _between(len(calls), found)


def _between(count: int, found: Mapping[int, Group]) -> list[int]:
    """The positions of so many calls that are not amid a group."""
    inner = {position for at, group in found.items() for position in range(at + 1, group.stop)}
    return [at for at in range(count + 1) if at not in inner]


def first_uses(calls: Iterable[Call]) -> dict[SyncedMemory, bool]:
    """For each memory the calls use: whether its first use replaces all that the calls ever use of it.

    A `once` call may not run, so it counts as a read of what it leaves alone.
    """
    extent: dict[SyncedMemory, int] = {}
    replaced: dict[SyncedMemory, bool] = {}
    for call in calls:
        operands = sorted(call.present(), key=lambda operand: operand.intent is Intent.OVERWRITE)
        for operand in operands:
            memory, stop = operand.memory, operand.offset + operand.nbytes
            whole = operand.intent is Intent.OVERWRITE and not call.once
            if memory not in replaced:
                replaced[memory] = whole
                extent[memory] = stop
            elif stop > extent[memory]:
                extent[memory] = stop
                replaced[memory] = replaced[memory] and whole
    return replaced


class Span:
    """A run of calls, with what it needs, what it relies on and what it writes.

    Attributes:
        first_uses: of each memory, whether its first use replaces all that is used of it.
        written: the memories that it writes.
        left: those of them that have their bytes at its end.
        spent: those whose bytes others have at its end.
        overrun: memories that it does not write, whose bytes it gives to others.
        made: of memories that backward makes anew, which of the calls that make the same forward it has: from, to.
    """

    __slots__ = (
        "_blob_needs", "_scratch", "first_uses", "left", "made", "overrun", "schedule", "spent", "start", "stop",
        "written",
    )  # fmt: skip

    def __init__(self, schedule: Schedule, start: int, stop: int) -> None:
        self.schedule = schedule
        self.start, self.stop = start, stop
        calls = schedule.calls[start:stop]
        self._blob_needs = Constant(schedule.blob_needs(start, stop))
        self._scratch = schedule.scratch_bytes(start, stop)
        self.first_uses = first_uses(calls)
        self.written = {view.memory: None for item in calls for view in item.writes}
        self.left = self.written
        self.spent: list[SyncedMemory] = []
        self.overrun: list[SyncedMemory] = []
        self.made: list[tuple[SyncedMemory, int, int]] = []

    @property
    def needs(self) -> list[Need]:
        return self._blob_needs.needs + self.schedule.scratch_need(self._scratch)

    def missing(self) -> list[Need]:
        """Those of the needs that may not be met."""
        return self._blob_needs.missing() + self.schedule.scratch_need(self._scratch)
