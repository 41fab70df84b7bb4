"""A pass over the calls of forward and backward, where a device has room for few whole arrays: a run of layers takes
the batch in slices that go abreast.

All slices are through with a stretch of the calls before any begins the next. Stretches end where something of all
slices is wanted: at batch norms, whose sums are taken slice by slice, and which then normalise, or have the gradients
of, each slice by these. A slice of an array is an array like any other, which plans may keep, evict, or make anew.
From where on a run's arrays are all smaller they are in fewer slices, and so are its calls: a GPU is faster by larger
ones. What takes from the one to the other runs for the smaller slices, and fills, or reads, parts of the larger.
Where the input of a batch norm is too large for that, what makes it runs twice: for the sums, and again for each slice
as it is normalised, just before somebody reads that.

Gradients of parameters are added up slice by slice, and statistics joined: results are the same to rounding, not to the
bit; the same slices give the same bits each time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Iterator, Sequence, Set
from itertools import chain, groupby
from typing import Any, NamedTuple

import numpy as np

from blobmem.memory import Intent, SyncedMemory
from blobmem.memory.blob import Blob
from blobmem.memory.views import ALIGNMENT
from blobmem.net.fusion import normalize_backward
from blobmem.net.layouts import channels_last
from blobmem.net.plan.again import AGAIN
from blobmem.net.plan.parts import Divider, Paused, in_both_orders, turned_of
from blobmem.net.plan.rooms import in_rooms
from blobmem.net.plan.slices import LOSSES, Division, Sliced, adding, by_item, divided, is_regular, may_divide
from blobmem.net.plan.uses import Remade, moved, reading
from blobmem.net.schedule import first_uses
from blobmem.ops.call import Call, Operand, call, like, memories, read, write

_NORM = "batch_norm_forward"
_GRADIENTS = ("batch_norm_scale_backward", "batch_norm_backward")
MOMENTS, SETTLES = "conv_batch_norm_moments", "conv_batch_norm_gradients"
"""What has moments, and what has gradients of parameters and what those of data take, from sums of all slices
(`plan.sources`)."""

_ENDS = (MOMENTS, "batch_norm_settle")
"""What ends a stretch of forward, as it has something of all slices."""

_BEGIN_GRADIENT = ("relu_backward", "scale_backward_beta", "scale_backward_gamma")


PARTS, EACH = 68_000, 64
"""So many parts of all channels have sums of their own, of so many numbers or more each."""


class Abreast(NamedTuple):
    """Which layers take the batch in slices abreast, and how.

    Attributes:
        first, last: of the run, by position.
        number: of slices.
        twice: bytes from which on the input of a batch norm is made twice.
        room: bytes of workspace that convolutions may take; 0 if nobody says.
        largest: bytes that a slice may have, where arrays are in fewer slices from where on these have no more; 0 if
            all are in the same number.
    """

    first: int
    last: int
    number: int
    twice: int
    room: int = 0
    largest: int = 0


def run_about(forward: Sequence[Call], backward: Sequence[Call], layer: int, ops: Container[Any]) -> range:
    """The layers next to a layer, and itself, that may take slices abreast; none if it may not."""
    whole = {each.layer for each in forward if each.op not in (_NORM, *_ENDS) and not _may_join(each, ops)}
    at = 0
    while at < len(backward):
        gradient = gradient_at(backward, at)
        if gradient is None and backward[at].op != SETTLES and not _may_join(backward[at], ops):
            whole.add(backward[at].layer)
        at = at + 1 if gradient is None else gradient.stop
    if layer in whole:
        return range(0)
    first = max((at + 1 for at in whole if at < layer), default=0)
    end = max(each.layer for each in chain(forward, backward)) + 1
    return range(first, min((at for at in whole if at > layer), default=end))


def abreast(
    forward: Sequence[Call],
    backward: Sequence[Call],
    remade: Sequence[Remade],
    which: Abreast,
    free: Set[SyncedMemory],
    images_last: bool,
) -> Sliced | None:
    """The calls of a pass with a run of layers in slices abreast; None where arrays do not allow it.

    Args:
        forward, backward: the calls.
        remade: what of backward other calls fill.
        which: the layers, of those that `run_about` gives, and how they do.
        free: memories that nobody reads but these calls.
        images_last: they will run with images channels last.
    """
    ahead, back = _within(forward, which), _within(backward, which)
    if not ahead:
        return None
    up, down = _Up(which), _Down(which)
    for each in forward[ahead.start : ahead.stop]:
        up.add(each)
    up.end()
    down.add(backward[back.start : back.stop])
    stretches = [*up.stretches, *down.stretches]
    inside = [each for stretch in stretches for each in stretch.inside]
    own = {blob.data_view.memory for blob in (*up.arrays, *down.arrays)}
    items = by_item(inside[0])[0].blob.shape[0]
    if items % which.number or not is_regular(inside, items, own):
        return None
    outside = [*forward[: ahead.start], *forward[ahead.stop :], *backward[: back.start], *backward[back.stop :]]
    outside += [each for stretch in stretches for each in stretch.after]
    absent = _absent(up.stretches, down.stretches, (free | own) - {*memories(outside)})
    written = {operand.memory: operand for each in inside for operand in by_item(each) if _writes(operand)}
    whole = {memory: operand.nbytes for memory, operand in written.items() if memory not in absent}
    last = [*channels_last(forward), *channels_last(backward)] if images_last else []
    both = in_both_orders(last)
    if any(nbytes % (ALIGNMENT * which.number) for nbytes in whole.values()) or both & {*whole}:
        return None
    numbers = _Numbers(which, up.stretches, absent, both)
    numbers.add(down.stretches)
    divider = _Divider(numbers, absent, {*whole}, turned_of(last))
    made, place = _Slices(divider, {*whole}), {id(each): at for at, each in enumerate(forward)}
    calls = [
        made.calls(stretches, {memory for each in before for memory in each.written_memories()})
        for stretches, before in ((up.stretches, forward[: ahead.start]), (down.stretches, backward[: back.start]))
    ]
    for at, each in enumerate(chain(calls[0], forward[ahead.stop :]), ahead.start):
        origin = made.origin.get(id(each), id(each))
        place[up.stands_for.get(origin, origin)] = at
    rooms = {(each.layer, each.op): which.room for each in inside if which.room}
    calls = [in_rooms(each, rooms) for each in calls]
    pieces = [*divider.pieces, *up.sums, *down.sums]
    never = [memory for memory in written if memory in absent and memory not in own]
    return Sliced(
        [*forward[: ahead.start], *calls[0], *forward[ahead.stop :]],
        [*backward[: back.start], *calls[1], *backward[back.stop :]],
        moved((each for each in remade if each.array.memory not in absent), [place[id(each)] for each in forward]),
        (Division(which.first, which.last, which.number),), 0, pieces, never,
    )  # fmt: skip


def _within(calls: Sequence[Call], which: Abreast) -> range:
    """The positions of the calls of the layers, which stand together."""
    found = [at for at, each in enumerate(calls) if which.first <= each.layer <= which.last]
    return range(found[0], found[-1] + 1) if found else range(len(calls), len(calls))


def _may_join(each: Call, ops: Container[Any]) -> bool:
    return each.op not in LOSSES and may_divide(each, ops)


def _writes(operand: Operand) -> bool:
    return operand.intent is not Intent.READ


def _absent(up: Sequence[_Stretch], down: Sequence[_Stretch], free: Set[SyncedMemory]) -> set[SyncedMemory]:
    """What need never be whole: what slices fill before they read it, and nobody else uses."""
    result = set[SyncedMemory]()
    for stretches in (up, down):
        inside = [each for stretch in stretches for each in stretch.inside]
        filled = first_uses(inside)
        written = {operand.memory for each in inside for operand in by_item(each) if _writes(operand)}
        result |= {memory for memory in written - result if filled[memory] and memory in free}
    return result


# -------------------------------------------------------------------- stretches


class _Stretch(NamedTuple):
    """Calls that each slice runs one after the other, and those that run when all have done so, once."""

    inside: list[Call]
    after: list[Call]


class _Stretches:
    """What a pass becomes.

    Attributes:
        stretches: so far.
        sums: of batch norms, which slices add to one after the other.
    """

    def __init__(self, which: Abreast) -> None:
        self._which = which
        self.stretches, self.sums = [_Stretch([], [])], list[Blob]()

    @property
    def arrays(self) -> list[Blob]:
        """The arrays that the run has beside those of its calls."""
        return self.sums

    def _sums_of(self, norm: Call, what: str) -> Blob:
        """An array for two sums, in double precision, of each channel; and on a GPU for those of parts of channels,
        which it joins with the last slice."""
        x = norm.operand(0)
        outer, channels, inner = x.op_shape
        parts = min(PARTS, outer * channels * inner // (self._which.number * EACH)) if self._which.room else 0
        shape = (2 * channels + 3 * parts,)
        blob = Blob(shape, dtype=np.float64, device=x.blob.device, name=f"{norm.layer_name}/{what}")
        self.sums.append(blob)
        return blob

    def _turn(self, *after: Call) -> list[Call]:
        """End a stretch with these calls, and begin another: what is in that."""
        self.stretches[-1].after.extend(after)
        self.stretches.append(_Stretch([], []))
        return self.stretches[-1].inside


class _Up(_Stretches):
    """The stretches of forward."""

    def __init__(self, which: Abreast) -> None:
        super().__init__(which)
        self._waiting: dict[SyncedMemory, list[Call]] = {}  # what makes it, once somebody reads it
        self._other: list[Blob] = []  # in place of what is made twice, the first time
        self.stands_for: dict[int, int] = {}  # id of what normalises -> id of the batch norm

    @property
    def arrays(self) -> list[Blob]:
        return [*self.sums, *self._other]

    def add(self, each: Call) -> None:
        """The next call."""
        self._make_for(each)
        inside = self.stretches[-1].inside
        if each.op in _ENDS:
            self._turn(each)
            return
        if each.op != _NORM:
            memory = next((memory for memory in self._waiting if memory in {*memories([each])}), None)
            (inside if memory is None else self._waiting[memory]).append(each)
            if each.op == "batch_norm_given" and self._maker(inside[:-1], each.operand(0)) is not None:
                self._waiting[each.operand(1).memory] = [inside.pop(-2), inside.pop()]
            return
        moments = self._sums_of(each, "moments")
        settled, given = by_moments(each, moments)
        self.stands_for[id(given)] = id(each)
        maker, x = self._made_twice(inside, each.operand(0))
        inside.append(like(each, call("batch_norm_moments", x, write(moments), before=settled.attributes["count"])))
        following = self._turn(settled)
        if maker is None:
            following.append(given)
        else:
            self._waiting[given.operand(1).memory] = [maker, given]

    def end(self) -> None:
        """There is no other call."""
        for waiting in self._waiting.values():
            self.stretches[-1].inside.extend(waiting)
        self._waiting = {}

    def _make_for(self, each: Call) -> None:
        """Make what waits where the call reads any of it, or changes what it is made of, but for what the call goes on
        with in place."""
        used, changed = {*memories([each])}, {*each.written_memories()}
        large = {operand.memory for operand in by_item(each)} if each.op != _NORM else used
        for memory, waiting in [*self._waiting.items()]:
            made = {result for maker in waiting for result in maker.written_memories()}
            goes_on = large == {memory} and each.op != _NORM
            read_here = used & (made - {memory} if goes_on else made)
            if read_here or not changed.isdisjoint({*memories(waiting)} - {memory}):
                self.stretches[-1].inside.extend(self._waiting.pop(memory))

    def _maker(self, inside: Sequence[Call], x: Operand) -> Call | None:
        """The last of the calls, if the input of a batch norm is large, and it makes that and nothing else."""
        if x.nbytes < self._which.twice or not inside:
            return None
        maker = inside[-1]
        alone = maker.written_memories() == [x.memory] and x.memory not in maker.read_memories()
        return maker if alone and maker.op in AGAIN else None

    def _made_twice(self, inside: list[Call], x: Operand) -> tuple[Call | None, Operand]:
        """The call that makes the input of a batch norm anew, and what it makes the first time; None and the input if
        it is made once."""
        maker = self._maker(inside, x)
        if maker is None:
            return None, x
        other = Blob(x.blob.shape, dtype=x.blob.dtype, device=x.blob.device, name=f"{x.memory.name} (for its sums)")
        self._other.append(other)
        operands = (
            dataclasses.replace(operand, blob=other) if operand is not None and _writes(operand) else operand
            for operand in maker.operands
        )
        inside[-1] = maker.over(tuple(operands))
        return maker, dataclasses.replace(x, blob=other)


def by_moments(norm: Call, moments: Blob) -> tuple[Call, Call]:
    """The calls that have a batch norm's statistics from its moments, and that normalise by these."""
    x, y, kept, mean, inv_std, *running = norm.operands
    assert x is not None and mean is not None and inv_std is not None
    outer, _, inner = x.op_shape
    of_norm = read(moments), mean, inv_std, *running
    settled = call("batch_norm_settle", *of_norm, **norm.attributes, count=outer * inner)
    given = call("batch_norm_given", x, y, kept, reading(mean), reading(inv_std))
    return like(norm, settled), like(norm, given)


class _Down(_Stretches):
    """The stretches of backward."""

    def __init__(self, which: Abreast) -> None:
        super().__init__(which)
        self._waiting: dict[SyncedMemory, Call] = {}  # what makes it, once somebody reads it

    def add(self, calls: Sequence[Call]) -> None:
        """The calls."""
        at = 0
        while at < len(calls):
            gradient = gradient_at(calls, at)
            stop = at + 1 if gradient is None else gradient.stop
            self._make_for(calls[at:stop])
            if gradient is not None:
                self._add(gradient)
            elif calls[at].op == SETTLES:
                self._turn(calls[at])
            elif _grows(calls[at]):
                self._waiting[calls[at].operand(-1).memory] = calls[at]
            else:
                self.stretches[-1].inside.append(calls[at])
            at = stop
        self.stretches[-1].inside.extend(self._waiting.values())

    def _make_for(self, calls: Sequence[Call]) -> None:
        """Make what waits and calls use, or is made of what they change."""
        used, changed = {*memories(calls)}, {memory for each in calls for memory in each.written_memories()}
        for memory, maker in [*self._waiting.items()]:
            if memory in used or not changed.isdisjoint(maker.read_memories()):
                self.stretches[-1].inside.append(self._waiting.pop(memory))

    def _add(self, gradient: Gradient) -> None:
        each, norm = gradient.call, gradient.norm
        if each.op == "batch_norm_backward":
            xhat, inv_std, dy, dx = each.operands
            gamma = beta = dgamma = dbeta = None
        else:
            xhat, inv_std, gamma, beta, dy, dx, dgamma, dbeta = each.operands
        assert xhat is not None
        outer, _, inner = xhat.op_shape
        relu, sums = each.attributes.get("relu", False), self._sums_of(norm, "sums")
        into = call("batch_norm_sums", xhat, gamma, beta, dy, write(sums), relu=relu, first=False)
        self.stretches[-1].inside.append(like(norm, into))
        wanted = dgamma is not None or dbeta is not None
        total = [like(norm, call("batch_norm_gradients", read(sums), dgamma, dbeta))] if wanted else []
        given = call(
            "batch_norm_backward_given", xhat, inv_std, gamma, beta, dy, dx, read(sums), relu=relu, count=outer * inner
        )
        self._turn(*total).append(like(norm, given))


def _grows(each: Call) -> bool:
    """Whether a gradient of data has more bytes than what it is made of: it may wait for who reads it."""
    return each.op == "conv_backward_data" and each.operand(-1).nbytes > each.operand(0).nbytes


class Gradient(NamedTuple):
    """The gradient of a batch norm, with the scale and the ReLU behind it that go with it.

    Attributes:
        stop: the position behind its calls.
        call: the one that could run in their place.
        norm: the batch norm's own.
    """

    stop: int
    call: Call
    norm: Call


def gradient_at(calls: Sequence[Call], at: int) -> Gradient | None:
    """The gradient of a batch norm that begins there, if one does."""
    each = calls[at]
    if each.op in _GRADIENTS and not each.once:
        return Gradient(at + 1, each, each)
    group = normalize_backward(calls, at) if each.op in _BEGIN_GRADIENT else None
    if group is None:
        return None
    later = {*memories(calls[group.stop :])}
    if any(operand.memory in later for operand in group.skipped):
        return None
    return Gradient(group.stop, group.call, calls[group.stop - 1])


# -------------------------------------------------------------------- the calls of slices


class _Numbers:
    """In how many slices arrays, and calls, are.

    Arrays are in no more than `Abreast.largest` wants of what their layer, or any behind it, makes, nor in fewer than
    it wants of themselves; calls in as many as what they use is in the most.

    Args:
        which: the run.
        forward: its stretches.
        absent: memories that are never whole.
        both: those that have two orders, which are in as many slices as can be.

    Attributes:
        most: slices that there are.
        of: of what is never whole, in how many it is.
    """

    def __init__(
        self, which: Abreast, forward: Sequence[_Stretch], absent: Set[SyncedMemory], both: Container[SyncedMemory]
    ) -> None:
        self.most, self._absent, self._both = which.number, absent, both
        self._largest = which.largest
        self._may = [number for number in range(2, which.number + 1) if which.number % number == 0]
        self.of: dict[SyncedMemory, int] = {}
        self._behind = dict.fromkeys(range(which.first, which.last + 1), self._may[0])
        for each in (each for stretch in forward for each in stretch.inside):
            wanted = [self._wanted(operand.nbytes) for operand in by_item(each) if _writes(operand)]
            self._behind[each.layer] = max([self._behind[each.layer], *wanted])
        for layer in reversed(range(which.first, which.last)):
            self._behind[layer] = max(self._behind[layer], self._behind[layer + 1])
        self.add(forward)

    def _wanted(self, nbytes: int) -> int:
        """Of an array of so many bytes."""
        if not self._largest:
            return self.most
        return next((number for number in self._may if nbytes <= self._largest * number), self.most)

    def add(self, stretches: Sequence[_Stretch]) -> None:
        """Say it of the arrays that these fill, after those before."""
        for each in (each for stretch in stretches for each in stretch.inside):
            for operand in by_item(each):
                memory = operand.memory
                if memory in self.of or memory not in self._absent or not _writes(operand):
                    continue
                number = max(self._wanted(operand.nbytes), self._behind[each.layer])
                if memory in self._both or operand.nbytes % (ALIGNMENT * self.most):
                    number = self.most
                self.of[memory] = number

    def of_call(self, each: Call) -> int:
        """Of a call."""
        numbers = [self.of[operand.memory] for operand in by_item(each) if operand.memory in self.of]
        return max(numbers, default=self._behind[each.layer])


class _Divider(Divider):
    """Makes the calls of slices, of which arrays and calls have different numbers."""

    def __init__(
        self, numbers: _Numbers, absent: Set[SyncedMemory], whole: Set[SyncedMemory], turned: Container[SyncedMemory]
    ) -> None:
        super().__init__(numbers.most, absent, whole, turned, divided, "slice")
        self.numbers = numbers
        self._slices: dict[tuple[int, int], Paused] = {}

    def take(self, index: int, count: int) -> None:
        """Of this slice of so many from now on."""
        self.count = count
        if (index, count) in self._slices:
            self.resume(self._slices[index, count])
            return
        self.begin(index, own_copies=True)
        self._made = {*self.absent}  # each is filled before it is read, if by calls of other slices
        self._slices[index, count] = self.pause()

    def on_piece(self, operand: Operand) -> Operand:
        index, count = self._index, self.count
        number = self.numbers.of.get(operand.memory, count)
        if number == count:
            return super().on_piece(operand)
        parts = count // number
        self.take(index // parts, number)
        piece = super().on_piece(operand)
        self.take(index, count)
        return dataclasses.replace(piece, shape=self._shape(operand.shape), part=(index % parts, parts))


class _Slices:
    """Makes the calls of slices.

    Args:
        divider: what divides them.
        whole: memories that they write, and which are whole.

    Attributes:
        origin: id of a call of a slice -> id of the call that it is of.
    """

    def __init__(self, divider: _Divider, whole: Set[SyncedMemory]) -> None:
        self._divider, self._whole, self.origin = divider, whole, dict[int, int]()
        self._filled = set[tuple[SyncedMemory, tuple[int, int]]]()  # parts of slices

    def calls(self, stretches: Iterable[_Stretch], written: Set[SyncedMemory]) -> list[Call]:
        """The calls of all slices, stretch by stretch, after others that have written these."""
        result: list[Call] = []
        for stretch in stretches:
            there = self._whole & written
            written = written | {memory for each in stretch.inside for memory in each.written_memories()}
            numbered = [(each, self._divider.numbers.of_call(each)) for each in stretch.inside]
            for each, index, count in _in_turn(numbered, 0, 1):
                self._divider.take(index, count)
                made = self._divider.calls(each)
                made[-1] = _amid(_summing(made[-1], index, count), there | self._amid_parts(made[-1]))
                self.origin[id(made[-1])] = id(each)
                result += made
            result += stretch.after
        return result

    def _amid_parts(self, each: Call) -> set[SyncedMemory]:
        """The memories of which the call fills a part that had something in it."""
        parts = {
            (operand.memory, operand.part)
            for operand in each.present()
            if operand.part is not None and operand.intent is Intent.OVERWRITE and operand.memory not in self._whole
        }
        again = {memory for memory, part in parts & self._filled}
        self._filled |= parts
        return again


def _in_turn(calls: Sequence[tuple[Call, int]], index: int, count: int) -> Iterator[tuple[Call, int, int]]:
    """The calls, with the numbers of slices that they are in, for one of so many slices: each with a slice of its own
    number. Those next to each other that are in more take one such slice after the other."""
    for here, group in groupby(calls, lambda each: each[1] == count):
        some = [*group]
        if here:
            yield from ((each, index, count) for each, _ in some)
            continue
        finer = min(number for _, number in some)
        for at in range(index * finer // count, (index + 1) * finer // count):
            yield from _in_turn(some, at, finer)


def _amid(each: Call, there: Set[SyncedMemory]) -> Call:
    """The call, of whose slice something is there as of the others in these memories: it ends nothing there."""
    if there.isdisjoint(each.written_memories()):
        return each
    operands = (
        dataclasses.replace(operand, intent=Intent.WRITE)
        if operand is not None and operand.intent is Intent.OVERWRITE and operand.memory in there
        else operand
        for operand in each.operands
    )
    return each.over(tuple(operands))


def _summing(each: Call, index: int, count: int) -> Call:
    """The call of a slice, one that sums going on from the slices before it; the first begins."""
    if each.op == "batch_norm_moments":
        attributes = {"before": each.attributes["before"] // count * index, "last": index == count - 1}
    elif each.op == "batch_norm_sums":
        attributes = {**each.attributes, "first": index == 0, "last": index == count - 1}
    else:
        return adding(each) if index else each
    sums = each.operand(-1)
    if index == 0:
        sums = dataclasses.replace(sums, intent=Intent.OVERWRITE)
    return each.over((*each.operands[:-1], sums), attributes)
