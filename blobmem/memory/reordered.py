"""Bytes of a memory that a schedule keeps in another order, in an array of its own, until somebody wants them.

The memory knows (`SyncedMemory.reordered`) and turns them back before anybody else reads them.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import weakref
from collections.abc import Callable, Container, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from blobmem.devices.base import Stream
from blobmem.memory.travels import travelled
from blobmem.memory.views import Intent, Side, View

if TYPE_CHECKING:
    from blobmem.memory.parked import Parked
    from blobmem.memory.synced import SyncedMemory

Form = tuple[int, int, int, Any]
"""Images, channels, positions and dtype of an array that is kept channels last."""

Turn = Callable[[Any, int, int, Form, bool], None]
"""turn(device, source, target, form, back) queues, on the thread's compute stream, the copy of an array from one
address to another, its channels made last or, `back`, second again."""

_of_thread = threading.local()
_NOTHING: Any = ((), None, None)


@contextlib.contextmanager
def turned_later(
    memories: Container[SyncedMemory], at_once: list[tuple[Any, ...]] | None = None
) -> Iterator[list[tuple[Any, ...]]]:
    """Meanwhile this thread's accesses do not turn bytes of these memories: whoever asks for it does, in this order.

    Gives a list of what is to be called, each time a Turn and its arguments. What is turned of others is added to
    `at_once`, and counts as no travel then.
    """
    turns: list[tuple[Any, ...]] = []
    before = getattr(_of_thread, "later", None)
    _of_thread.later = memories, turns, at_once
    try:
        yield turns
    finally:
        _of_thread.later = before


class State(enum.Enum):
    """Which of the two has the truth."""

    STALE = enum.auto()  # the memory
    EQUAL = enum.auto()  # both
    NEWER = enum.auto()  # the array here


class _Bytes(Protocol):
    """A view, or what has its place."""

    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


def extent(view: _Bytes, intent: Intent) -> int:
    """How many bytes of its array a view may take: what is read alone lies at its start."""
    return view.nbytes if intent is Intent.READ else view.offset + view.nbytes


class Reordered:
    """One run of a memory's bytes, channels last on the device.

    It is one view's, or what views of the same kind of image have written one after another, in the order of their
    offsets: images lie one behind the other in both orders, so that each of these has the same offset from the run's
    start in both. The memory's lock is held around all that happens here.

    Attributes:
        array: the memory of the reordered bytes.
        on_host: they are turned there, as the device has no room for both orders.
        home: where these are, in the same order, while others have the array's place and the memory is `away`.
        newer_than_home: the memory was written since they went there.
    """

    def __init__(self, memory: SyncedMemory, turn: Turn, array: SyncedMemory) -> None:
        self._memory = weakref.ref(memory)
        self._turn = turn
        self._state = State.STALE
        self._form: Form | None = None
        self._start = self._stop = 0
        self.array = array
        self.on_host = False
        self.home: Parked | None = None
        self.newer_than_home = False

    @property
    def epoch(self) -> int:
        """Moves whenever repeating an access might matter, as a memory's; it is the array's, which moves with it."""
        return self.array.epoch

    @property
    def newer(self) -> bool:
        """Whether the memory's own bytes are out of date."""
        return self._state is State.NEWER

    def end(self) -> None:
        """The memory has let it go: whoever used it has to look again."""
        self.array.epoch += 2

    def access(self, view: View, form: Form, intent: Intent, stream: Stream | None) -> int:
        """The device address of the view's bytes, reordered, for the intent; as `SyncedMemory.access`."""
        memory = view.memory
        with memory.lock:
            start, stop = view.offset, view.offset + view.nbytes
            of_kind = self._state is not State.STALE and self._is_of(form)
            # some of the images that are here are used where they lie. But what is written from the first on, in a
            # memory that nets share, ends what was there: it is another net's, which nobody may read any more
            anew = memory.shared and intent is Intent.OVERWRITE and start == self._start and stop < self._stop
            known = of_kind and self._start <= start and stop <= self._stop and not anew
            newer = self._state is State.NEWER
            follows = of_kind and newer and intent is Intent.OVERWRITE and start == self._stop
            replaces = intent is Intent.OVERWRITE and start == self._start and stop >= self._stop
            if newer and not (known or anew or follows or replaces):
                self._settle(memory, stream)
            if not known and intent is not Intent.OVERWRITE:
                if self.on_host:
                    self._become(State.STALE, form, start, stop)
                    self._copy_on_host(memory, self.array, back=False)
                else:
                    source = memory.access(Side.DEVICE, start, view.nbytes, Intent.READ, stream)
                    target = self.array.access(Side.DEVICE, 0, view.nbytes, Intent.OVERWRITE, stream)
                    self._copy(source, target, form, back=False)
                self._become(State.EQUAL, form, start, stop)
                memory.epoch += 2  # who writes the memory itself has to say so again
            if intent is not Intent.READ and not (known and newer):
                if follows:
                    assert self._form is not None
                    self._become(State.NEWER, (self._form[0] + form[0], *form[1:]), self._start, stop)
                elif known:
                    assert self._form is not None
                    self._become(State.NEWER, self._form, self._start, self._stop)
                else:
                    self._become(State.NEWER, form, start, stop)
                memory.epoch += 2
            return int(self.array.access(Side.DEVICE, start - self._start, view.nbytes, intent, stream))

    def view_of(self, view: View) -> View:
        """Where in the array a view's bytes are, after an access to them."""
        return self.array.view(view.offset - self._start, view.nbytes)

    def _is_of(self, form: Form) -> bool:
        """Whether images of this form are laid out as those that are here."""
        return self._form is not None and self._form[1:] == form[1:]

    def before_access(self, start: int, stop: int, intent: Intent, stream: Stream | None) -> None:
        """Before somebody uses bytes [start, stop) of the memory itself, on either side."""
        if self._form is None or start >= self._stop or self._start >= stop:
            return
        if self._state is State.NEWER:
            replaced = intent is Intent.OVERWRITE and start <= self._start and stop >= self._stop
            if not replaced:
                memory = self._memory()
                assert memory is not None
                self._settle(memory, stream)
        if intent is not Intent.READ:
            self.newer_than_home = self.home is not None and self.home.outdate()
            if self._state is not State.STALE:
                self._become(State.STALE, self._form, self._start, self._stop)

    def _settle(self, memory: SyncedMemory, stream: Stream | None) -> None:
        """Bring the newer bytes to the memory."""
        assert self._form is not None
        if stream is None:
            stream = memory.device.compute_stream()
        state, self._state = self._state, State.EQUAL  # the accesses here are not to come back to this
        try:
            if memory.away or self.on_host:
                place = self.home if memory.away and self.home is not None else self.array
                memory.reordered = None
                self._copy_on_host(memory, place, back=True)
            else:
                nbytes = self._stop - self._start
                memory.reserve(Side.DEVICE, self._stop)
                source = self.array.access(Side.DEVICE, 0, nbytes, Intent.READ, stream)
                memory.reordered = None
                target = memory.access(Side.DEVICE, self._start, nbytes, Intent.OVERWRITE, stream)
                self._copy(source, target, self._form, back=True)
        except BaseException:
            self._state = state
            raise
        finally:
            memory.reordered = self
        self.array.epoch += 2
        memory.epoch += 2

    def bring_home(self) -> None:
        """What is at home is about to be used: bring there what somebody has written in the usual order."""
        memory = self._memory()
        assert memory is not None
        with memory.lock:
            if self.newer_than_home and self.home is not None:
                self.newer_than_home = False
                self._copy_on_host(memory, self.home, back=False)
                memory.epoch += 2  # who writes it has to say so again

    def _copy_on_host(self, memory: SyncedMemory, place: SyncedMemory, back: bool) -> None:
        """Copy the bytes, turned, from the memory to that place or, `back`, from there."""
        assert self._form is not None
        (images, channels, positions, dtype), nbytes = self._form, self._stop - self._start
        memory.access(Side.HOST, self._start, nbytes, Intent.OVERWRITE if back else Intent.READ)
        place.access(Side.HOST, 0, nbytes, Intent.READ if back else Intent.OVERWRITE)
        usual = memory.host_array(self._start, (images, channels, positions), dtype, lend=False)
        last = place.host_array(0, (images, positions, channels), dtype, lend=False).transpose(0, 2, 1)
        source, target = (last, usual) if back else (usual, last)
        target[...] = source

    def _copy(self, source: int, target: int, form: Form, back: bool) -> None:
        device = self.array.device
        if not device.compute:
            return
        made = self._turn, device, source, target, form, back
        memories, turns, at_once = getattr(_of_thread, "later", None) or _NOTHING
        if self._memory() in memories:
            turns.append(made)
            return
        if at_once is None:
            travelled()
        else:
            at_once.append(made)
        self._turn(device, source, target, form, back)

    def _become(self, state: State, form: Form, start: int, stop: int) -> None:
        self._state, self._form, self._start, self._stop = state, form, start, stop
        self.array.epoch += 2
