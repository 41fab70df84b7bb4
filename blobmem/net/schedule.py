"""The schedule: a net compiled to a flat list of calls, and what runs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from blobmem import memory as memory_package
from blobmem.devices import HOST, Device
from blobmem.errors import NetError, OutOfDeviceMemory
from blobmem.memory import Intent, Side, SyncedMemory, View
from blobmem.memory.workspace import workspace
from blobmem.ops.call import Call, Operand
from blobmem.ops.registry import ArraySpec, Op, table


class Need(NamedTuple):
    """Capacity that a run will use: bytes from the start of one side of a memory."""

    memory: SyncedMemory
    side: Side
    nbytes: int


_LITTLE = 1 << 30  # bytes on the host that are had without asking


def secure(needs: Iterable[Need]) -> None:
    """Allocate all of it or nothing.

    Raises OutOfDeviceMemory (or MemoryError, where the host lacks address space) with every capacity as it was before.
    """
    grown: list[Need] = []
    on_host: list[tuple[str, int]] = []
    try:
        for memory, side, nbytes in needs:
            before = memory.gpu_capacity if side is Side.DEVICE else memory.cpu_capacity
            if nbytes > before:
                if side is Side.HOST and memory.device.compute:
                    on_host.append((memory.name, nbytes - before))
                memory.reserve(side, nbytes)
                grown.append(Need(memory, side, before))
        _check_host(on_host)
    except MemoryError:
        for memory, side, before in reversed(grown):
            memory.unreserve(side, before)
        raise


def _check_host(wanted: list[tuple[str, int]]) -> None:
    """Raise OutOfDeviceMemory if the machine has not got what these memories will take.

    Its pages are only had when they are touched, and the system then ends some process.
    """
    nbytes = sum(more for _, more in wanted)
    if nbytes < _LITTLE:
        return
    free, total = HOST.memory_info()
    if nbytes > free > 0:
        name, most = max(wanted, key=lambda item: item[1])
        raise OutOfDeviceMemory(
            f"asked for {nbytes / 2**20:.0f} MB more of the host's memory, most of it ({most / 2**20:.0f} MB) for "
            f"'{name}'; {free / 2**20:.0f} MB of {total / 2**20:.0f} MB are free: take a smaller batch or net",
            nbytes, free, total,
        )  # fmt: skip


class _Bound:
    """An operand and the array it was last resolved to, which stays good while its memory's epoch does."""

    __slots__ = ("array", "dtype", "epoch", "operand", "shape", "view")

    def __init__(self, operand: Operand) -> None:
        self.operand = operand
        self.shape = operand.op_shape
        self.dtype = operand.blob.dtype
        self.view: View | None = None
        self.array: Any = None
        self.epoch = -1

    def resolve(self, side: Side, device: Device, intent: Intent, view: View) -> None:
        memory = view.memory
        if view is self.view and memory.epoch == self.epoch and not memory_package.debug:
            return
        address = memory.access(side, view.offset, view.nbytes, intent)
        if side is Side.HOST:
            self.array = memory.host_array(view.offset, self.shape, self.dtype, lend=False)
        elif device.compute:
            self.array = device.as_array(address, self.shape, self.dtype)
        self.view, self.epoch = view, memory.epoch


class Done:
    """Where a `once` call was run last, and with what; it runs again only where either differs."""

    __slots__ = ("attributes", "views")

    def __init__(self) -> None:
        self.views: list[View] = []
        self.attributes: dict[str, Any] = {}

    def covers(self, views: list[View], attributes: dict[str, Any]) -> bool:
        """Whether there is nothing new to do."""
        if len(views) != len(self.views) or any(a is not b for a, b in zip(views, self.views, strict=True)):
            return False
        try:
            return bool(attributes == self.attributes)
        except ValueError:  # arrays among them
            return False


class _Step:
    """A call bound to a device: its op, the side it runs on, its operands and its scratch."""

    __slots__ = ("accumulators", "attributes", "bound", "call", "device", "done", "fn", "order", "scratch", "side")

    def __init__(self, call: Call, device: Device, ops: dict[str, Op], on_host: bool, done: Done) -> None:
        self.call = call
        self.done = done
        self.device = device
        self.side = Side.HOST if on_host or call.on_host else Side.DEVICE
        self.bound = [None if operand is None else _Bound(operand) for operand in call.operands]
        # reads first: an overwrite marks bytes as current here, and a read after it would not fetch them
        self.order = sorted(filter(None, self.bound), key=lambda bound: bound.operand.intent is Intent.OVERWRITE)
        self.accumulators = [bound for bound in self.order if bound.operand.accumulate]
        self.attributes = dict(call.attributes)
        self.scratch = 0
        self.fn: Callable[..., Any]
        if isinstance(call.op, str):
            op = ops[call.op]
            specs = [None if b is None else ArraySpec(tuple(b.shape), b.dtype) for b in self.bound]
            cases = [{"accumulate": False}, {"accumulate": True}] if self.accumulators else [{}]
            self.scratch = max(op.workspace_bytes(*specs, **self.attributes, **case) for case in cases)
            self.fn = op.fn
        else:
            self.fn = call.op

    def needs(self) -> Iterable[Need]:
        for bound in self.order:
            view = bound.operand.view
            yield Need(view.memory, self.side, view.offset + view.nbytes)

    def run(self) -> None:
        if self.call.once:
            views = [bound.operand.view for bound in self.order]
            if self.done.covers(views, self.attributes):
                return
            self.done.views = []
        attributes = self.attributes
        fresh = False
        if self.accumulators:
            fresh = all(
                view.memory.is_zero(view.offset, view.nbytes)
                for view in (bound.operand.view for bound in self.accumulators)
            )
            attributes["accumulate"] = not fresh
        for bound in self.order:
            operand = bound.operand
            intent = Intent.OVERWRITE if fresh and operand.accumulate else operand.intent
            bound.resolve(self.side, self.device, intent, operand.view)
        if self.device.compute:
            if self.scratch:
                attributes["ws"] = self._scratch()
            try:
                self.fn(*[None if bound is None else bound.array for bound in self.bound], **attributes)
            except ValueError as error:
                place = f"layer '{self.call.layer_name}'"
                # functions of the host (a user's, say) speak for themselves
                if self.call.on_host or not self.call.layer_name or place in str(error):
                    raise
                raise NetError(f"{place}: {error}") from error
        if self.call.once:
            self.done.views, self.done.attributes = views, dict(self.attributes)

    def _scratch(self) -> Any:
        memory = workspace(self.device)
        address = memory.access(self.side, 0, self.scratch, Intent.OVERWRITE)
        if self.side is Side.HOST:
            return memory.host_array(0, (self.scratch,), np.uint8, lend=False)
        return self.device.as_array(address, (self.scratch,), np.uint8)


class Schedule:
    """Calls in the order in which they run, bound to a device.

    Steps follow their blobs: after a reshape, growth or another sharing the next run uses the new places.

    `done` is what `once` calls remember; schedules of one net that follow each other hand it on, so that none of them
    does again, over what a script may have written since, what an earlier one has done.
    """

    def __init__(
        self, calls: Sequence[Call], device: Device, on_host: bool = False, done: dict[Any, Done] | None = None
    ) -> None:
        self.calls = list(calls)
        self.device = device
        self.side = Side.HOST if on_host or device.is_host else Side.DEVICE
        ops = table("host")
        done, count = {} if done is None else done, Counter[Any]()
        self._steps: list[_Step] = []
        for call in self.calls:
            place = (call.layer, call.layer_name, call.op)
            mark = done.setdefault((*place, count[place]), Done()) if call.once else Done()
            count[place] += call.once
            self._steps.append(_Step(call, device, ops, self.side is Side.HOST, mark))
        self._needs: list[Need] = []
        self._views: list[View] | None = None

    def span(self, layers: range) -> tuple[int, int]:
        """Positions [start, stop) of the calls of these layers, which stand together."""
        wanted = [i for i, call in enumerate(self.calls) if call.layer in layers]
        return (wanted[0], wanted[-1] + 1) if wanted else (0, 0)

    def scratch_bytes(self, start: int = 0, stop: int | None = None) -> int:
        """Bytes of workspace on the device's computing side (host calls need none)."""
        return max((step.scratch for step in self._steps[start:stop]), default=0)

    def needs(self, start: int = 0, stop: int | None = None) -> list[Need]:
        """All the capacity that a run of these calls will use, workspace included."""
        return self.blob_needs(start, stop) + self.scratch_need(self.scratch_bytes(start, stop))

    def scratch_need(self, nbytes: int) -> list[Need]:
        """So many bytes of the workspace. It is another memory in each thread, so nobody should keep this."""
        return [Need(workspace(self.device), self.side, nbytes)] if nbytes else []

    def blob_needs(self, start: int = 0, stop: int | None = None) -> list[Need]:
        """The capacity that a run of these calls will use of the memories that blobs are in."""
        most: dict[tuple[SyncedMemory, Side], int] = {}
        for step in self._steps[start:stop]:
            for memory, side, nbytes in step.needs():
                if nbytes > most.get((memory, side), 0):
                    most[memory, side] = nbytes
        return [Need(memory, side, nbytes) for (memory, side), nbytes in most.items()]

    def all_needs(self) -> list[Need]:
        """`needs` of the whole schedule, worked out anew only after a blob has moved to another memory."""
        views = [operand.view for call in self.calls for operand in call.present()]
        if views != self._views:
            self._needs, self._views = self.blob_needs(), views
        return self._needs + self.scratch_need(self.scratch_bytes())

    def set_attributes(self, index: int, **attributes: Any) -> None:
        """The attributes that call `index` runs with from now on. Its workspace must not depend on them."""
        self._steps[index].attributes.update(attributes)

    def run(self, start: int = 0, stop: int | None = None) -> None:
        """Run the calls; what they need should have been secured."""
        for step in self._steps[start:stop]:
            step.run()


def first_uses(calls: Iterable[Call]) -> dict[SyncedMemory, bool]:
    """For each memory the calls use: whether its first use replaces all that the calls ever use of it.

    A `once` call may not run, so it counts as a read of what it leaves alone.
    """
    extent: dict[SyncedMemory, int] = {}
    replaced: dict[SyncedMemory, bool] = {}
    for call in calls:
        operands = sorted(call.present(), key=lambda operand: operand.intent is Intent.OVERWRITE)
        for operand in operands:
            view = operand.view
            stop = view.offset + view.nbytes
            whole = operand.intent is Intent.OVERWRITE and not call.once
            if view.memory not in replaced:
                replaced[view.memory] = whole
                extent[view.memory] = stop
            elif stop > extent[view.memory]:
                extent[view.memory] = stop
                replaced[view.memory] = replaced[view.memory] and whole
    return replaced


class Span:
    """A run of calls, with what it needs, what it relies on and what it writes."""

    __slots__ = ("_blob_needs", "_scratch", "first_uses", "schedule", "start", "stop", "written")

    def __init__(self, schedule: Schedule, start: int, stop: int) -> None:
        self.schedule = schedule
        self.start, self.stop = start, stop
        calls = schedule.calls[start:stop]
        self._blob_needs = schedule.blob_needs(start, stop)
        self._scratch = schedule.scratch_bytes(start, stop)
        self.first_uses = first_uses(calls)
        self.written = {view.memory: None for item in calls for view in item.writes}

    @property
    def needs(self) -> list[Need]:
        return self._blob_needs + self.schedule.scratch_need(self._scratch)
