"""A pass over the calls of a net that only runs forward: its first layers take the batch in parts.

A leading stretch of the calls, as long as they treat each item by itself, runs once for each part, so that what lives
only within it has the bytes of one part. Where the stretch ends arrays are whole, and the rest takes the whole batch.
An op may choose another algorithm for fewer items, so that results are the same to rounding, not to the bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence, Set
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

import numpy as np

from blobmem.memory import Intent, SyncedMemory
from blobmem.memory.blob import Blob
from blobmem.memory.views import ALIGNMENT
from blobmem.net.layouts import channels_last
from blobmem.net.plan.liveness import lifetimes
from blobmem.net.plan.rooms import loads
from blobmem.ops.call import Call, Operand, call, like, memories, overwrite

MOST_PARTS, FEWEST_ITEMS = 16, 8
"""Of more parts, or of fewer items in each, a GPU's kernels get too small to fill it."""
_WORTH, _LITTLE = 0.1, 64 << 20  # of what the net holds, and in bytes: to save less than either is not worth the time
_LEAST, _MUCH = 16 << 20, 0.25  # unless it is as much as this in bytes, and of what the net holds
_ENOUGH = 0.3  # of what arrays take otherwise: there are no more parts for less, as they cost time
_ENOUGH_OF_LITTLE = 1 / 3  # the same where less than _LITTLE can be saved: small arrays' parts cost more
_NEAR = 1 / 12  # of what arrays take otherwise, more than the least, that fewer parts may take where none is enough
_NEARLY = 1 / 50  # of what the net holds, that an earlier end may take more
# (and on the host, where parts cost next to nothing, that fewer parts may take more than the least)
_STEP = 1 / 60  # of what the net holds, that each end must save that is later
_CALL = 4608  # bytes, about, that the host holds for a call

_EACH = frozenset({
    "relu_forward", "sigmoid_forward", "tanh_forward", "elu_forward", "power_forward", "exp_forward", "log_forward",
    "absval_forward", "bnll_forward", "clip_forward", "relu6_forward", "swish_forward", "threshold_forward", "copy",
    "eltwise_sum", "eltwise_prod", "eltwise_max",
})  # fmt: skip
"""Element by element, whatever the operands."""

_ROWS: dict[str, tuple[int, ...]] = {
    "conv_forward": (0, 3), "deconv_forward": (0, 3), "inner_product_forward": (0, 3),  # each image or row by itself
    "max_pool_forward": (0, 1, 2), "ave_pool_forward": (0, 1),  # each plane
    "lrn_forward": (0, 1), "lrn_within_forward": (0, 1), "softmax_forward": (0, 1),  # each image's channels
    "batch_norm_inference": (0, 1), "scale_forward": (0, 3), "bias_forward": (0, 2), "prelu_forward": (0, 2),
}  # fmt: skip
"""Ops to which each entry of the first axis of these operands is something by itself; the others they read whole.

Not here is what mixes items (statistics of a batch, losses), draws at random, since draws go by position, has state or
its first axis for time.
"""

_JOINED = frozenset({"concat_forward", "slice_forward"})
"""The same of all operands, along any axis but the first."""


class Parts(NamedTuple):
    """A net's calls, the first of them in parts.

    Attributes:
        calls: in the order in which they run, part after part.
        layers: first and last of the layers that do so, by position.
        pieces: arrays of a part, in place of those that are never whole.
        absent: the memories of the latter.
    """

    calls: list[Call]
    layers: tuple[int, int]
    pieces: list[Blob]
    absent: list[SyncedMemory]

    def divides(self, first: int, last: int) -> bool:
        """Whether a run of layers first to last would be of some of these, but not all."""
        return divides(self.layers, first, last)


def divides(layers: tuple[int, int], first: int, last: int) -> bool:
    """Whether a run of layers first to last would be of some of these, from one to another, but not all."""
    begin, end = layers
    return first <= end and begin <= last and not (first <= begin and end <= last)


def in_parts(
    calls: Sequence[Call],
    ops: Container[Any],
    free: Set[SyncedMemory],
    whole: bool = False,
    images_last: bool = False,
    on_host: bool = False,
    most: int | None = None,
) -> Parts | None:
    """The calls of a pass forward with a leading stretch in parts, if that makes what the net holds much smaller, or
    as much smaller as has to be.

    How many parts, from 2 to 16 equal ones, and where the stretch ends, is a function of sizes alone: what an arena
    would take, without scratch.

    Args:
        calls: of the pass.
        ops: those of the device; calls of others run on the host, and are not divided.
        free: memories that nobody reads but these calls.
        whole: all arrays stay whole nevertheless, and parts are slices of them.
        images_last: they will run with images channels last.
        on_host: the device is the host, where small parts take no longer.
        most: bytes that the arena may take, where the fewest parts that do with these are wanted, down to single items;
            else those that need least.
    """
    stretch = _stretch(calls, ops)
    if stretch is None:
        return None
    rewritten = channels_last(calls) if images_last else calls
    turned = turned_of(rewritten)
    choice = _choose(calls, stretch, free, whole, turned, in_both_orders(rewritten), on_host, most)
    if choice is None:
        return None
    count, end = choice
    return _divided(calls, range(stretch.begin, end), count, frozenset() if whole else free, turned)


def turned_of(rewritten: Sequence[Call]) -> dict[SyncedMemory, int]:
    """The bytes of what nobody here writes, and calls read channels last: a copy, which is made for them.

    Of such an array each part takes a copy of its own: the schedule's would have one part's at a time, and be made when
    a call is prepared, which for calls of a graph is before any of them runs.
    """
    written = {memory for each in rewritten for memory in each.written_memories()}
    last = (operand for each in rewritten for operand in each.present() if operand.form is not None)
    return {operand.memory: operand.nbytes for operand in last if operand.memory not in written}


def in_both_orders(rewritten: Sequence[Call]) -> set[SyncedMemory]:
    """What some calls use channels last and others as it is: it has the bytes of two arrays."""
    operands = [operand for each in rewritten for operand in each.present()]
    last = {operand.memory for operand in operands if operand.form is not None}
    return last & {operand.memory for operand in operands if operand.form is None}


class _Stretch(NamedTuple):
    """Calls from `begin` to before `end` that may be divided, and the items of their batch."""

    begin: int
    end: int
    items: int


def _stretch(calls: Sequence[Call], ops: Container[Any]) -> _Stretch | None:
    begin = next((at for at, each in enumerate(calls) if _may_divide(each, ops)), len(calls))
    if begin == len(calls):
        return None
    shape = by_item(calls[begin])[0].blob.shape
    items = shape[0] if shape else 1
    written, read_whole = set[SyncedMemory](), set[SyncedMemory]()
    places: dict[SyncedMemory, tuple[int, int]] = {}
    end = begin
    while end < len(calls) and _may_divide(calls[end], ops):
        mine = by_item(calls[end])
        for each in mine:
            place = (each.view.offset, each.view.nbytes)
            if not is_of(each, items) or places.setdefault(each.view.memory, place) != place:
                return _Stretch(begin, end, items)
        written |= {*calls[end].written_memories()}
        read_whole |= {each.view.memory for each in calls[end].present() if each not in mine}
        if written & read_whole:
            break
        end += 1
    return _Stretch(begin, end, items)


def _may_divide(each: Call, ops: Container[Any]) -> bool:
    return not each.once and each.op in ops and bool(by_item(each))


def positions(each: Call) -> Sequence[int]:
    """Which of a call's operands are divided."""
    op = str(each.op)
    if op in _EACH or (op in _JOINED and each.attributes["axis"] > 0):
        return range(len(each.operands))
    return _ROWS.get(op, ())


def by_item(each: Call) -> list[Operand]:
    return [operand for at in positions(each) if (operand := each.operands[at]) is not None]


def is_of(operand: Operand, items: int) -> bool:
    """Whether it has so many items, or as many times more."""
    return all(shape and shape[0] % items == 0 for shape in (operand.op_shape, operand.blob.shape))


# -------------------------------------------------------------------- how many parts, and how far


def _choose(
    calls: Sequence[Call],
    stretch: _Stretch,
    free: Set[SyncedMemory],
    whole: bool,
    turned: Mapping[SyncedMemory, int],
    both: Container[Hashable],
    on_host: bool,
    most: int | None,
) -> tuple[int, int] | None:
    """The number of parts, and the first call after them; None if it is not worth it.

    What is held is within a few MiB of what a plan holds without scratch.
    """
    begin, limit, items = stretch
    used = {*memories(calls)}
    found = lifetimes([[each] for each in calls], keep=used - free)
    outside = sum(found.pinned.values())
    arena = [(each.first, each.last, each.nbytes * (1 + (each.key in both))) for each in found.arena]
    first, last, size = np.array(arena or np.empty((0, 3)), np.int64).T
    load = loads(first, last, size, len(calls))
    if most is None:
        counts = [n for n in range(2, MOST_PARTS + 1) if items % n == 0 and items // n >= FEWEST_ITEMS]
    else:
        counts = [n for n in range(2, items + 1) if items % n == 0]
    extra = {count: _copies_and_misfits(calls, stretch, count, free, whole, turned) for count in counts}
    held: list[tuple[float, int, int]] = []
    for end in _ends(calls, begin, limit):
        over = (first < end) & (last >= end) | (first < begin) & (last >= begin)
        within = load[begin:end].copy()
        for start, stop, nbytes in zip(first[over], last[over], size[over], strict=True):
            within[max(0, start - begin) : stop + 1 - begin] -= nbytes
        crossing, rest = int(size[over].sum()), int(max(load[:begin].max(initial=0), load[end:].max(initial=0)))
        for count in counts:
            copies, misfit = extra[count]
            if not misfit[end]:
                part = within.copy()
                for start, stop, nbytes in copies:
                    part[start - begin : stop + 1 - begin] += nbytes
                more = (count - 1) * (end - begin) * _CALL if on_host else 0  # it holds arrays, too
                held.append((outside + more + max(int(part.max()) / count + crossing, rest), count, end))
    if most is not None:
        if int(load.max(initial=0)) + sum(turned.values()) <= most:
            return None
        goal = max(most, min((nbytes - outside for nbytes, _, _ in held), default=0))
        return min(((count, end) for nbytes, count, end in held if nbytes - outside <= goal), default=None)
    before = outside + sum(turned.values()) + int(load.max(initial=0))
    return _best(held, outside, before, _NEARLY * before if on_host else None)


def _best(
    held: Sequence[tuple[float, int, int]], outside: int, before: int, more: float | None
) -> tuple[int, int] | None:
    """Of what would be held, with the number of parts and their end, the best of these; None if none is worth it.

    `before` is what is held otherwise, `outside` in both cases. `more` than the least is as good, if it is given.
    """
    saved, share = max(_LITTLE, _WORTH * before, 1), _ENOUGH
    if all(before - nbytes < saved for nbytes, _, _ in held):
        saved, share = max(_LEAST, _MUCH * before), _ENOUGH_OF_LITTLE
    worth = [each for each in held if before - each[0] >= saved]
    if not worth:
        return None
    least, enough = min(worth)[0], outside + share * (before - outside)
    if more is None:
        more = enough - least if least <= enough else _NEAR * (before - outside)
    goal = least + more
    count = min(count for nbytes, count, _ in worth if nbytes <= goal)
    ends = [(nbytes, end) for nbytes, parts, end in worth if parts == count]
    while ends[0][0] > goal + _NEARLY * before:
        del ends[0]
    later = takewhile(lambda pair: pair[0][0] - pair[1][0] >= _STEP * before, pairwise(ends))
    return count, max((end for _, (_, end) in later), default=ends[0][1])


def _ends(calls: Sequence[Call], begin: int, limit: int) -> Iterator[int]:
    """Where parts can end: between layers, and not before one that goes on in place, which might run as one."""
    written = set[SyncedMemory]()
    for end in range(begin + 1, limit + 1):
        written |= {*calls[end - 1].written_memories()}
        following = calls[end] if end < len(calls) else None
        if following is None or (
            following.layer != calls[end - 1].layer and written.isdisjoint(following.written_memories())
        ):
            yield end


def _copies_and_misfits(
    calls: Sequence[Call],
    stretch: _Stretch,
    count: int,
    free: Set[SyncedMemory],
    whole: bool,
    turned: Container[SyncedMemory],
) -> tuple[list[tuple[int, int, int]], np.ndarray]:
    """What is read that parts have copies of, as those they would be views of have no places or another order: its
    first and last use in the stretch, and its bytes. And for each end whether something is written that has no places,
    so that this cannot be an end.
    """
    begin, limit, _ = stretch
    misfit = np.zeros(limit + 1, bool)
    last = {memory: at for at, each in enumerate(calls) for memory in memories([each])}
    written = set[SyncedMemory]()
    copied: dict[SyncedMemory, tuple[int, int, int]] = {}
    for at in range(begin, limit):
        for operand in by_item(calls[at]):
            memory, nbytes = operand.memory, operand.nbytes
            if nbytes % (ALIGNMENT * count) == 0 and memory not in turned:
                continue
            if operand.intent is not Intent.READ and memory not in written:
                written.add(memory)
                stays = whole or memory not in free or memory in copied
                misfit[at + 1 : None if stays else last[memory] + 1] = True
            elif memory not in written:
                copied.setdefault(memory, (at, min(last[memory], limit - 1), nbytes))
    return [*copied.values()], misfit


# -------------------------------------------------------------------- the calls of the parts


def _divided(
    calls: Sequence[Call], stretch: range, count: int, free: Container[SyncedMemory], turned: Container[SyncedMemory]
) -> Parts:
    """The calls with those of the stretch `count` times."""
    inside = calls[stretch.start : stretch.stop]
    around = [*calls[: stretch.start], *calls[stretch.stop :]]
    outer = {*memories(around)}
    written = {view.memory: None for each in inside for view in each.writes}
    absent = [memory for memory in written if memory in free and memory not in outer]
    divider = Divider(count, {*absent}, {*written}, turned)
    made = list(calls[: stretch.start])
    for index in range(count):
        divider.begin(index, own_copies=bool(absent))
        for each in inside:
            made += divider.calls(each)
    made += calls[stretch.stop :]
    return Parts(made, (inside[0].layer, inside[-1].layer), divider.pieces, absent)


class Paused(NamedTuple):
    """A part whose arrays are kept, as a `Divider` has it."""

    number: int
    of: dict[tuple[SyncedMemory, tuple[int, ...]], Blob]
    first: dict[SyncedMemory, Blob]
    copied: set[SyncedMemory]
    made: set[SyncedMemory]


class Divider:
    """Makes the calls of one part after another.

    Args:
        count: of parts.
        absent: memories that are never whole.
        written: those and others that the parts write.
        turned: what they read, in another order than it has.
        divided: which of a call's operands are.
        word: for a part, in names.

    Attributes:
        pieces: arrays of a part, in place of those that are never whole.
        absent: as given, or others from now on; of one that was whole before, what parts write is in pieces from there.
    """

    def __init__(
        self,
        count: int,
        absent: Set[SyncedMemory],
        written: Set[SyncedMemory],
        turned: Container[SyncedMemory],
        divided: Callable[[Call], Sequence[int]] = positions,
        word: str = "part",
    ) -> None:
        self.count, self.absent, self._written, self._turned = count, absent, written, turned
        self._divided, self._word = divided, word
        self.pieces: list[Blob] = []
        self._of: dict[tuple[SyncedMemory, tuple[int, ...]], Blob] = {}  # in place of a memory, by shape
        self._first: dict[SyncedMemory, Blob] = {}  # of these

    def begin(self, index: int, own_copies: bool) -> None:
        """Of this part from now on. Copies are in arrays of each part's own, or of all parts."""
        self._index = index
        self._copied = set[SyncedMemory]()
        self._made = set[SyncedMemory]()  # whose pieces have something in them
        if own_copies:
            self._of, self._first = {}, {}

    def pause(self) -> Paused:
        """What `resume` wants, to go on with this part."""
        return Paused(self._index, self._of, self._first, self._copied, self._made)

    def resume(self, paused: Paused) -> None:
        """Of that part again from now on, whose own arrays have what they had."""
        self._index, self._of, self._first, self._copied, self._made = paused

    def has(self, memory: SyncedMemory) -> bool:
        """Whether there is something in this part's piece of what is never whole."""
        return memory in self._made

    def fill(self, operand: Operand) -> Operand:
        """The operand, of what is never whole, of this part's piece, for a call that fills it."""
        self._made.add(operand.memory)
        return self.on_piece(dataclasses.replace(operand, intent=Intent.OVERWRITE, shape=None))

    def calls(self, each: Call) -> list[Call]:
        """What does a part of a call."""
        operands, copies, made = list(each.operands), list[Call](), set[SyncedMemory]()
        for at in self._divided(each):
            operand = operands[at]
            if operand is None:
                continue
            memory = operand.memory
            if memory in self.absent and (memory in self._made or operand.intent is not Intent.READ):
                operands[at] = self.on_piece(operand)
                made.add(memory)
            elif memory not in self._turned and (
                memory in self._written or operand.nbytes % (ALIGNMENT * self.count) == 0
            ):
                operands[at] = Operand(
                    operand.blob, operand.diff, operand.intent, self._shape(operand.shape), operand.accumulate,
                    operand.form, (self._index, self.count),
                )  # fmt: skip
            else:
                operands[at] = piece = self.on_piece(operand)
                if memory not in self._copied:
                    self._copied.add(memory)
                    copies.append(self._copy(each, operand, piece.blob))
        self._made |= made
        return [*copies, each.over(tuple(operands))]

    def _copy(self, reader: Call, whole: Operand, piece: Blob) -> Call:
        source = dataclasses.replace(whole, intent=Intent.READ, shape=None)
        return like(reader, call("take_items", source, overwrite(piece), first=self._index * piece.shape[0]))

    def on_piece(self, operand: Operand) -> Operand:
        """The operand, of an array of this part alone."""
        whole, memory = operand.blob, operand.memory
        shape = self._shape(whole.shape)
        assert shape is not None
        piece = self._of.get((memory, shape))
        if piece is None:
            name = f"{memory.name} ({self._word} {self._index + 1} of {self.count})"
            piece = self._of[memory, shape] = Blob(shape, dtype=whole.dtype, device=whole.device, name=name)
            piece.share_data(self._first.setdefault(memory, piece))
            self.pieces.append(piece)
        return Operand(
            piece, False, operand.intent, self._shape(operand.shape), operand.accumulate, operand.form, operand.part
        )

    def _shape(self, shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return None if shape is None else (shape[0] // self.count, *shape[1:])
