"""The schedule: a net compiled to a flat list of calls, and what runs it."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blobmem import memory as memory_package
from blobmem.devices import HOST, Device, Stream
from blobmem.dtypes import exact, is_half
from blobmem.errors import DeviceError, NetError, OutOfDeviceMemory
from blobmem.memory import Intent, Side, SyncedMemory, View
from blobmem.memory.blob import moves
from blobmem.memory.parked import Parked, copy_stream
from blobmem.memory.reordered import extent
from blobmem.memory.slot import Slot
from blobmem.memory.synced import shrinks
from blobmem.memory.workspace import workspace, workspaces
from blobmem.net.captured import Captured, pieces, why_eager
from blobmem.net.fusion import Group, groups
from blobmem.net.lanes import IN, OUT, Lanes, Place
from blobmem.net.layouts import channels_last, reordered_of
from blobmem.ops.call import Call, Operand, begins_sum
from blobmem.ops.registry import ArraySpec, Op, table

if TYPE_CHECKING:
    from blobmem.net.clock import Clock


class Need(NamedTuple):
    """Capacity that a run will use: bytes from the start of one side of a memory."""

    memory: SyncedMemory
    side: Side
    nbytes: int

    @property
    def capacity(self) -> int:
        """What there is of it."""
        return self.memory.gpu_capacity if self.side is _DEVICE else self.memory.cpu_capacity


_HOST, _DEVICE = Side.HOST, Side.DEVICE  # found faster so, by what every pass does hundreds of times
_LITTLE = 1 << 30  # bytes on the host that are had without asking


def secure(needs: Iterable[Need]) -> None:
    """Allocate all of it or nothing.

    Raises OutOfDeviceMemory (or MemoryError, where the host lacks address space) with every capacity as it was before.
    """
    grown: list[Need] = []
    on_host: list[tuple[str, int]] = []
    try:
        for memory, side, nbytes in needs:
            before = memory.gpu_capacity if side is _DEVICE else memory.cpu_capacity
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


class _Place(NamedTuple):
    """Where a view lies; unlike the view, it keeps no bytes from `trim`."""

    memory: SyncedMemory
    offset: int
    nbytes: int


class _Bound:
    """An operand and the array it was last resolved to.

    That stays good while the operand's view, the stream, and the epoch of what keeps the bytes (`keeper`) are the same.
    """

    __slots__ = ("address", "array", "dtype", "epoch", "keeper", "operand", "shape", "view")

    def __init__(self, operand: Operand) -> None:
        self.operand = operand
        self.shape = operand.op_shape
        self.dtype = operand.blob.dtype
        self.view: Any = None  # the operand's, which `Step` keeps up to date
        self.keeper: Any = None
        self.array: Any = None
        self.address = 0  # on the device
        self.epoch = -1

    def resolve(self, side: Side, device: Device, intent: Intent, stream: Stream | None) -> None:
        view = self.view
        memory = view.memory
        address = memory.access(side, view.offset, view.nbytes, intent, stream)
        if side is _HOST:
            self.array = memory.host_array(view.offset, self.shape, self.dtype, lend=False)
        else:
            self._be_at(device, address)
        self.keeper, self.epoch = memory, memory.epoch

    def _be_at(self, device: Device, address: int) -> None:
        self.address = address
        # what is no more than an address stays right while that is the same
        if device.compute and getattr(self.array, "address", None) != address:
            self.array = device.as_array(address, self.shape, self.dtype)

    def is_kept(self) -> bool:
        """Whether its bytes are still in what kept them at the last access."""
        return self.view.memory is self.keeper

    def needs(self, side: Side) -> Iterator[Need]:
        """What it takes of memories."""
        view = self.operand.view
        yield Need(view.memory, side, view.offset + view.nbytes)


class _BoundLast(_Bound):
    """An operand that is kept channels last.

    Attributes:
        is_given: it is read before it is written, so that it comes in the usual order, which is then on the device.
    """

    __slots__ = ("is_given",)

    def __init__(self, operand: Operand) -> None:
        super().__init__(operand)
        self.is_given = False

    def resolve(self, side: Side, device: Device, intent: Intent, stream: Stream | None) -> None:
        view = self.view
        reordered = reordered_of(view.memory)
        assert self.operand.form is not None
        self._be_at(device, reordered.access(view, self.operand.form, intent, stream))
        self.keeper, self.epoch = reordered.array, reordered.epoch

    def is_kept(self) -> bool:
        reordered = self.view.memory.reordered
        return reordered is not None and reordered.array is self.keeper

    def needs(self, side: Side) -> Iterator[Need]:
        view = self.operand.view
        yield Need(reordered_of(view.memory).array, side, extent(view, self.operand.intent))
        if self.is_given:
            yield from super().needs(side)


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


def _in_float32(fn: Callable[..., None], intents: Sequence[Intent | None]) -> Callable[..., None]:
    """An op of the host on halves, for which none is written: on copies of float32, which round what it writes."""

    def run(*arrays: Any, **attributes: Any) -> None:
        copies = [array if array is None else array.astype(exact(array.dtype), copy=False) for array in arrays]
        fn(*copies, **attributes)
        for array, values, intent in zip(arrays, copies, intents, strict=True):
            if values is not array and intent is not Intent.READ:
                array[...] = values

    return run


class Step:
    """A call bound to a device: its op, the side it runs on, its operands and its scratch.

    Attributes:
        lane: the number of the stream that it is queued on, of `streams`.
        accessed: how often it had to look where what it uses is.
        home: what of the host it copies from or to, if it does nothing else.
        copies: the number of its copy stream then (`lanes`), else 0.
    """

    home: SyncedMemory | None = None
    copies = 0

    __slots__ = (
        "accessed",
        "accumulators",
        "arguments",
        "attributes",
        "before",
        "begins",
        "bound",
        "call",
        "computes",
        "device",
        "done",
        "eager",
        "faults",
        "fn",
        "lane",
        "moves",
        "once",
        "order",
        "room",
        "scratch",
        "scratch_at",
        "scratch_epoch",
        "scratch_of",
        "side",
        "stream",
        "takes_scratch",
        "varies",
    )

    def __init__(
        self,
        call: Call,
        device: Device,
        on_host: bool,
        done: Done,
        streams: int = 1,
        known: dict[Any, int] | None = None,
    ) -> None:
        self.call = call
        self.once = call.once
        self.done = done
        self.device = device
        self.computes = device.compute
        self.varies = False  # whether its attributes are set from outside
        op, self.side = _run_by(call, device, on_host)
        on_host = self.side is _HOST
        self.lane = 0 if on_host or streams == 1 else call.stream
        self.faults = None if on_host else device.faults
        self.bound = [
            None if operand is None else (_Bound if operand.form is None else _BoundLast)(operand)
            for operand in call.operands
        ]
        # reads first: an overwrite marks bytes as current here, and a read after it would not fetch them
        self.order = sorted(filter(None, self.bound), key=lambda bound: bound.operand.intent is Intent.OVERWRITE)
        self.accumulators = [bound for bound in self.order if bound.operand.accumulate]
        self.begins = any(begins_sum(bound.operand) for bound in self.accumulators)  # and then all of them are begun
        self.attributes = dict(call.attributes)
        self.arguments: list[Any] = [None] * len(self.bound)
        self.stream: Stream | None = None  # of the last run
        self.moves = -1  # at the last run
        self.scratch_of: weakref.ref[SyncedMemory] | None = None  # and the workspace that it used
        self.scratch_epoch = -1
        self.scratch = self.scratch_at = self.accessed = 0
        self.room: SyncedMemory | None = None  # where it has its scratch, if not in the thread's workspace
        self.takes_scratch = op is not None and op.workspace is not None and op.family != "host"
        self.eager = self._why_eager(op)
        self.before = None if op is None or on_host else op.before
        self.fn: Callable[..., Any]
        if op is not None:
            self.fn = op.fn
            if op.family == "host" and any(is_half(each.operand.blob.dtype) for each in self.order):
                self.fn = _in_float32(op.fn, [None if each is None else each.intent for each in call.operands])
            self.scratch = _scratch_of(op, call, device, known)
        else:
            assert callable(call.op)
            self.fn = call.op
        self.takes_scratch = self.computes and (self.takes_scratch or self.scratch > 0)

    def _why_eager(self, op: Op | None) -> str:
        """Why the call cannot be part of a graph; "" if it can."""
        if op is None:
            return "a function of the host"
        if self.side is _HOST:
            return f"op {op.name} runs on the host"
        if not self.computes:
            return "the device computes nothing"
        return "" if op.captures else f"what op {op.name} queues is not the same in every run"

    def needs(self) -> Iterable[Need]:
        for bound in self.order:
            yield from bound.needs(self.side)

    def run(self, stream: Stream | None, scratch: Sequence[SyncedMemory]) -> None:
        """Run the call, given this thread's stream and workspaces."""
        if self.once and self.is_done():
            return
        self.prepare(stream, scratch)
        if self.computes:
            self.launch()
        if self.once:
            self.done.views, self.done.attributes = self._views(), dict(self.attributes)

    @property
    def repeats(self) -> bool:
        """Whether `run_again` may stand for a run."""
        return self.computes and self.side is _DEVICE

    def run_again(self) -> None:
        """Queue the call as it ran last, where every access would find all as that run left it."""
        if not self.once:
            self.launch()

    @property
    def ran(self) -> Any:
        """What the last run was: as long as this is the same, `queue` queues the same."""
        return None if self.once else self.places()  # what was done once may never have run in this schedule

    def queue(self, one: Callable[[Step], None]) -> None:
        """Have it queued by `one` as it ran last."""
        if not self.once:
            one(self)

    def prepare(self, stream: Stream | None, scratch: Sequence[SyncedMemory]) -> None:
        """Access all that the call uses."""
        if self.side is _HOST:
            stream = None
        # all that follows is asked for every call of every pass: where nothing has changed it has to be quick
        known = moves() == self.moves and stream is self.stream and not memory_package.debug
        fresh = False
        if self.accumulators:
            fresh = self.begins or (known and self.refill()) or self._is_zero()
            self.attributes["accumulate"] = not fresh
        if known:
            for bound in self.order:
                if bound.keeper.epoch != bound.epoch:
                    self._resolve(known, fresh, stream)
                    break
        else:
            self._resolve(known, fresh, stream)
        if self.takes_scratch:
            room = self.room or scratch[self.lane]
            used = self.scratch_of
            if not known or used is None or used() is not room or room.epoch != self.scratch_epoch:
                self.attributes["ws"] = self.access_scratch(room, stream)
                self.scratch_of, self.scratch_epoch = weakref.ref(room), room.epoch

    def launch(self, arguments: Sequence[Any] | None = None, fn: Any = None, **more: Any) -> Any:
        """Queue the call, which was prepared; with arguments and `fn` in place of its own, and more attributes."""
        if self.faults is not None:
            self.faults.layer = self.call.layer_name
        if self.device.prefetches and self.side is not _HOST:
            self.device.prefetch([*self.arguments, self.attributes.get("ws")])
        try:
            return (fn or self.fn)(*(self.arguments if arguments is None else arguments), **self.attributes, **more)
        except ValueError as error:
            place = f"layer '{self.call.layer_name}'"
            # functions of the host (a user's, say) speak for themselves
            if self.call.on_host or not self.call.layer_name or place in str(error):
                raise
            raise NetError(f"{place}: {error}") from error

    def launch_in(self, graph: Any) -> None:
        """Queue the call, which was prepared, while that graph is captured."""
        self.launch()

    def _views(self) -> list[View]:
        return [bound.operand.view for bound in self.order]

    def is_done(self) -> bool:
        """Whether a `once` call has nothing new to do; if it has, it counts as not done until it ends."""
        if self.done.covers(self._views(), self.attributes):
            return True
        self.done.views = []
        return False

    def refill(self) -> bool:
        """Whether nothing has happened since the last run but that all that is added to was cleared.

        It is then overwritten on the device, which an access would find the long way.
        """
        if not self._is_cleared():
            return False
        for bound in self.accumulators:
            bound.keeper.refill(bound.epoch, bound.view.offset, bound.view.nbytes)
        return True

    def _is_cleared(self) -> bool:
        for bound in self.accumulators:
            view = bound.view
            if view is None or not bound.keeper.is_cleared_since(bound.epoch, view.offset, view.nbytes):
                return False
        return True

    def is_fresh(self) -> bool:
        """Whether all that is added to, where it was at the last run, is known to be zero."""
        return self._is_cleared() or self._is_zero()

    def _is_zero(self) -> bool:
        """Whether all that is added to is known to be zero."""
        for bound in self.accumulators:
            view = bound.operand.view
            if not view.memory.is_zero(view.offset, view.nbytes):
                return False
        return True

    def _resolve(self, known: bool, fresh: bool, stream: Stream | None) -> None:
        """Access what the call uses, except (if all was `known`) where that would change nothing."""
        now = moves()
        self.moves = -1  # should this fail, the next run begins anew
        if not known:
            for bound in self.order:
                bound.view = bound.operand.view
        for bound in self.order:
            if not known or bound.keeper.epoch != bound.epoch:
                operand = bound.operand
                intent = Intent.OVERWRITE if fresh and operand.accumulate else operand.intent
                bound.resolve(self.side, self.device, intent, stream)
        self.renew()
        self.moves, self.stream = now, stream

    def renew(self) -> None:
        """Use the arrays that its operands were last resolved to."""
        self.arguments = [None if bound is None else bound.array for bound in self.bound]
        self.accessed += 1

    def places(self) -> list[Place]:
        """What it uses of the device, where it was when it was prepared last."""
        found = [
            (bound.address, bound.address + bound.view.nbytes, bound.operand.intent is not Intent.READ)
            for bound in self.order
        ]
        return [*found, (self.scratch_at, self.scratch_at + self.scratch, True)] if self.takes_scratch else found

    def beside(self, scratch: Sequence[SyncedMemory]) -> list[SyncedMemory]:
        """What it uses besides its operands, given this thread's workspaces."""
        if self.home is not None:
            return [self.home]
        return [self.room or scratch[self.lane]] if self.takes_scratch else []

    def access_beside(self, scratch: Sequence[SyncedMemory] | None, stream: Stream | None) -> None:
        """Access that; workspaces are None where it takes none of them."""
        room = self.room
        if room is None:
            assert scratch is not None
            room = scratch[self.lane]
        self.access_scratch(room, stream)

    def access_scratch(self, memory: SyncedMemory, stream: Stream | None) -> Any:
        if not self.scratch:
            return self.device.as_array(0, (0,), np.uint8)
        address = memory.access(self.side, 0, self.scratch, Intent.OVERWRITE, stream)
        if self.side is _HOST:
            return memory.host_array(0, (self.scratch,), np.uint8, lend=False)
        self.scratch_at = address
        self.accessed += 1
        return self.device.as_array(address, (self.scratch,), np.uint8)


class _Copy(Step):
    """A call that copies an array of the device to the host (`evict`) or back (`fetch`), beside the others.

    Its keyword `home` has the bytes there. Run by itself it is queued on a copy stream, and nobody waits here: what
    uses the bytes next does. Prepared, it is a call like any other.
    """

    __slots__ = ("copies", "home")

    OPS = frozenset({"evict", "fetch"})

    def __init__(self, call: Call, *given: Any) -> None:
        super().__init__(call, *given)
        self.home: SyncedMemory = self.attributes["home"]
        self.copies = OUT if call.op == "evict" else IN

    def span(self) -> tuple[int, int]:
        """Where of `home`, and how many bytes."""
        return self.attributes.get("start", 0), self.call.operand(0).view.nbytes

    @property
    def repeats(self) -> bool:
        return False  # whoever uses the bytes next has to wait anew

    def prepare(self, stream: Stream | None, scratch: Sequence[SyncedMemory]) -> None:
        super().prepare(stream, scratch)
        self.access_beside(scratch, stream)

    def access_beside(self, scratch: Sequence[SyncedMemory] | None, stream: Stream | None) -> None:
        self.home.lend(stream, self.copies == OUT, *self.span())

    def launch(self, arguments: Sequence[Any] | None = None, fn: Any = None, **more: Any) -> None:
        (bound,), stream, array = self.order, self.device.compute_stream(), self.home.bytes(*self.span())
        if self.copies == OUT:
            self.device.memcpy_dtoh(array, bound.address, stream)
        else:
            self.device.memcpy_htod(bound.address, array, stream)

    def launch_in(self, graph: Any) -> None:
        if not self.home.is_locked:
            raise DeviceError("the system does not page-lock the memory of the host that arrays are evicted to")
        (bound,) = self.order
        (graph.copy_out if self.copies == OUT else graph.copy_in)(self.home.bytes(*self.span()), bound.address)

    def places(self) -> list[Place]:
        array = self.home.bytes(*self.span())
        start = array.ctypes.data
        return [*super().places(), (start, start + array.nbytes, self.copies == OUT)]


class Transfer(_Copy):
    """The same of an array that a `memory.parked.Parked` has meanwhile."""

    __slots__ = ()

    home: Parked

    def span(self) -> tuple[int, int]:
        return 0, self.home.size

    def needs(self) -> Iterable[Need]:
        yield from super().needs()
        yield Need(self.home.block, Side.HOST, self.home.block.size)

    def run(self, stream: Stream | None, scratch: Sequence[SyncedMemory]) -> None:
        (bound,) = self.order
        operand, out = bound.operand, self.copies == OUT
        view = operand.view
        if operand.form is not None:
            reordered = reordered_of(view.memory)
            reordered.access(view, operand.form, operand.intent, stream)
            view = reordered.array.view(0, view.nbytes)
        (self.home.take if out else self.home.give)(view, copy_stream(self.device, out))

    def launch(self, arguments: Sequence[Any] | None = None, fn: Any = None, **more: Any) -> None:
        super().launch()
        if self.copies == OUT:
            self.home.holds = True


class Carry(_Copy):
    """The same of what is evicted of a net's state, whose `home` is the memory itself: its host side has the bytes."""

    __slots__ = ()

    def needs(self) -> Iterable[Need]:
        yield from super().needs()
        yield Need(self.home, Side.HOST, sum(self.span()))

    def run(self, stream: Stream | None, scratch: Sequence[SyncedMemory]) -> None:
        home, view, out = self.home, self.call.operand(0).view, self.copies == OUT
        (home.take if out else home.give)(view, copy_stream(self.device, out), self.span()[0])


def _kind_of(call: Call) -> type[Step]:
    if call.op not in _Copy.OPS:
        return Step
    return Transfer if isinstance(call.attributes["home"], Parked) else Carry


def _run_by(call: Call, device: Device, on_host: bool) -> tuple[Op | None, Side]:
    """The op that runs a call, None for a function of the host, and the side that it runs on."""
    family = "host" if on_host else device.family
    if call.on_host:
        return None, _HOST
    if call.op in _Copy.OPS:
        # a sum that is zero is not copied
        op = Op(str(call.op), _nothing, family=family, captures=not call.attributes.get("sums", False))
    else:
        op = _find_op(str(call.op), family)
    return op, _HOST if on_host or op.family != device.family else _DEVICE


def _nothing() -> None:
    pass


def _scratch_of(op: Op, call: Call, device: Device, known: dict[Any, int] | None = None) -> int:
    """Bytes of workspace that a call takes; `known` has those of calls that are alike."""
    if op.workspace is None:
        return 0
    half = op.family == "host" and any(is_half(each.blob.dtype) for each in call.present())
    specs = [
        None if each is None else ArraySpec(tuple(each.op_shape), exact(each.blob.dtype) if half else each.blob.dtype)
        for each in call.operands
    ]
    accumulates = any(each.accumulate for each in call.present())
    try:
        key = op.name, op.family, accumulates, *specs, *call.attributes.items()
        if known is not None and key in known:
            return known[key]
    except TypeError:  # arrays among the attributes
        known = None
    cases = [{"accumulate": False}, {"accumulate": True}] if accumulates else [{}]
    where = {} if op.family == "host" else {"device": device}
    scratch = max(op.workspace_bytes(*specs, **call.attributes, **case, **where) for case in cases)
    if known is not None:
        known[key] = scratch
    return scratch


class _Constant:
    """Needs that are the same in every run."""

    __slots__ = ("_met", "needs")

    def __init__(self, needs: list[Need]) -> None:
        self.needs = needs
        self._met = -1  # `shrinks` when all of them were

    def missing(self) -> list[Need]:
        """Those that are not met. Once all are, nothing is looked at until some memory shrinks."""
        now = shrinks()
        if self._met == now:
            return []
        missing = [need for need in self.needs if need.nbytes > need.capacity]
        if not missing:
            self._met = now
        return missing


_told: set[str] = set()


def _find_op(name: str, family: str) -> Op:
    """The op of the device's family, or the host's where it has none, which is said once."""
    op = table(family).get(name)
    if op is None:
        op = table("host")[name]
        if name not in _told:
            _told.add(name)
            warnings.warn(
                f"op {name} runs on the host, as it has no {family} version: its arrays travel in every pass",
                stacklevel=2,
            )
    return op


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
        self._known: dict[Any, int] = {}  # of calls, their workspace (`_scratch_of`)
        self._calls, self._groups = _fusions(self.calls, device, self.side, images_last, passing)
        self._run_of = {position: at for at, group in self._groups.items() for position in range(at, group.stop)}
        self._skipped = {at: group.skipped for at, group in self._groups.items() if group.skipped}
        self._programs: dict[tuple[int, int | None], list[Step]] = {}
        self._varying: dict[range, list[Step]] = {}  # whose attributes are set, by calls
        self._captured: dict[tuple[int, int | None], list[Step | Captured | Lanes]] = {}
        self._needs = _Constant([])
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
            steps.append(_kind_of(call)(call, self.device, self.side is Side.HOST, mark, self.streams, known))
        fused = {
            at: (group.stop, Step(group.call, self.device, False, Done(), self.streams, known))
            for at, group in self._groups.items()
        }
        given, written = set[SyncedMemory](), set[SyncedMemory]()
        for call in (*self._before, *self._calls) if self.images_last else ():
            given.update(view.memory for view in call.reads if view.memory not in written)
            written.update(view.memory for view in call.writes)
        for bound in (bound for step in (*steps, *(step for _, step in fused.values())) for bound in step.order):
            if isinstance(bound, _BoundLast):
                bound.is_given = bound.operand.memory in given
        return steps, fused

    def _units(self) -> Iterator[tuple[int, int, list[Step]]]:
        """Where what runs at one time begins and ends, and the steps that may run for it."""
        at = 0
        while at < len(self._calls):
            stop, *fused = self._fused.get(at, (at + 1,))
            yield at, stop, [*self._steps[at:stop], *fused]
            at = stop

    def _bounds(self) -> Iterator[_Bound]:
        return (bound for _, _, steps in self._units() for step in steps for bound in step.order)

    def units(self) -> list[Unit]:
        """What runs, in order."""
        units, at = list[Unit](), 0
        while at < len(self._calls):
            group = self._groups.get(at)
            stop = at + 1 if group is None else group.stop
            calls = self._calls[at:stop] + ([] if group is None else [group.call])
            ran = [_run_by(call, self.device, self.side is Side.HOST) for call in calls]
            here = [(op, call) for (op, side), call in zip(ran, calls, strict=True) if op and side is self.side]
            scratch = max((_scratch_of(op, call, self.device, self._known) for op, call in here), default=0)
            travels = any(side is not self.side for _, side in ran)
            lane = 0 if self.streams == 1 or ran[-1][1] is _HOST else calls[-1].stream
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
            bound.view = bound.view and _Place(bound.view.memory, bound.view.offset, bound.view.nbytes)
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
        return {operand.view.memory for operands in whole for operand in operands}

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

    def _present_needs(self) -> _Constant:
        now = moves()
        if now != self._moves:
            views = [operand.view for call in self.calls for operand in call.present()]
            if views != self._views:
                self._needs, self._views = _Constant(self.blob_needs()), views
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
    return calls, groups(calls, table(device.family), passing) if fuses else {}


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
        self._blob_needs = _Constant(schedule.blob_needs(start, stop))
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
