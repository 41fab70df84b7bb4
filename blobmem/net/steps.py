"""Steps: calls bound to a device, each with the arrays that it was last resolved to."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from blobmem import memory as memory_package
from blobmem.devices import Device, Stream
from blobmem.dtypes import exact, is_half
from blobmem.errors import DeviceError, NetError
from blobmem.memory import Intent, Side, SyncedMemory, View
from blobmem.memory.blob import moves
from blobmem.memory.parked import Parked, copy_stream
from blobmem.memory.reordered import extent
from blobmem.net.lanes import IN, OUT, Place
from blobmem.net.layouts import reordered_of
from blobmem.net.needs import Need
from blobmem.ops.call import Call, Operand, begins_sum
from blobmem.ops.registry import ArraySpec, Op, table

_HOST, _DEVICE = Side.HOST, Side.DEVICE  # found faster so, by what every pass does hundreds of times


class _Place(NamedTuple):
    """Where a view lies; unlike the view, it keeps no bytes from `trim`."""

    memory: SyncedMemory
    offset: int
    nbytes: int


class Bound:
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

    def put_aside(self) -> None:
        """Keep no bytes from `trim`."""
        self.view = self.view and _Place(self.view.memory, self.view.offset, self.view.nbytes)

    def is_kept(self) -> bool:
        """Whether its bytes are still in what kept them at the last access."""
        return self.view.memory is self.keeper

    def needs(self, side: Side) -> Iterator[Need]:
        """What it takes of memories."""
        view = self.operand.view
        yield Need(view.memory, side, view.offset + view.nbytes)


class BoundLast(Bound):
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
        op, self.side = run_by(call, device, on_host)
        on_host = self.side is _HOST
        self.lane = 0 if on_host or streams == 1 else call.stream
        self.faults = None if on_host else device.faults
        self.bound = [
            None if operand is None else (Bound if operand.form is None else BoundLast)(operand)
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
            self.scratch = scratch_of(op, call, device, known)
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
            view = reordered.view_of(view)
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


def kind_of(call: Call) -> type[Step]:
    if call.op not in _Copy.OPS:
        return Step
    return Transfer if isinstance(call.attributes["home"], Parked) else Carry


def run_by(call: Call, device: Device, on_host: bool) -> tuple[Op | None, Side]:
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


def scratch_of(op: Op, call: Call, device: Device, known: dict[Any, int] | None = None) -> int:
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
