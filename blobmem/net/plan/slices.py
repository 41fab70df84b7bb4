"""A pass over the calls of forward and backward, where a device has no room for all that one call uses: runs of layers
take the batch in slices.

Forward, a run's calls run once for each slice, and what lives only within them has the bytes of one. Backward, for
each slice what they made is made anew, from what the run was given, and then come its gradients; but of the last slices
as much is kept as there is room for, and these come first. What one run makes for another is whole. The gradients of
parameters are added up, slice by slice, and so are losses. That takes layers that treat each item by itself, gradients
of parameters apart. An op may choose another algorithm for fewer items, and sums have another order: results are
the same to rounding, not to the bit; the same slices give the same bits each time.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Container, Sequence, Set
from itertools import chain
from typing import NamedTuple

from blobmem.memory import Intent, SyncedMemory
from blobmem.memory.blob import Blob
from blobmem.memory.views import ALIGNMENT
from blobmem.net.fusion import UPDATES
from blobmem.net.layouts import IMAGES, channels_last
from blobmem.net.plan import parts
from blobmem.net.plan.parts import Divider, Paused, divides, is_of, turned_of
from blobmem.net.plan.times import COPIES, Times
from blobmem.net.plan.uses import Remade, moved
from blobmem.net.schedule import first_uses
from blobmem.ops.call import Call, Operand, begins_sum, call, like, memories, overwrite, read

_SMALL = 1 / 8
"""Of the largest array within a run, what another may have that backward reads, to be kept whole instead of made anew,
if that saves calls: the mask of a pool may save making all that is before it."""

_EACH = frozenset({
    "relu_backward", "sigmoid_backward", "tanh_backward", "elu_backward", "power_backward", "exp_backward",
    "log_backward", "absval_backward", "bnll_backward", "clip_backward", "relu6_backward", "swish_backward",
    "dropout_backward", "eltwise_sum_backward", "eltwise_prod_backward", "eltwise_prod_backward_unstable",
    "eltwise_max_backward", "sum_arrays",
})  # fmt: skip
"""Element by element, whatever the operands."""

_ROWS: dict[str, tuple[int, ...]] = {
    "conv_backward_bias": (0,), "conv_backward_weights": (0, 1), "conv_backward_data": (0, 2),
    "conv_sum_forward": (0, 3, 4),
    "deconv_backward_weights": (0, 1), "deconv_backward_data": (0, 2),
    "inner_product_backward_weights": (0, 1), "inner_product_backward_bias": (0,),
    "inner_product_backward_data": (0, 2), "max_pool_backward": (0, 1, 2), "ave_pool_backward": (0, 1),
    "lrn_backward": (0, 1, 2), "lrn_within_backward": (0, 1, 2, 3), "softmax_backward": (0, 1, 2),
    "batch_norm_moments": (0,), "batch_norm_given": (0, 1, 2), "batch_norm_sums": (0, 3),
    "batch_norm_backward_given": (0, 4, 5), "batch_norm_backward_global": (0, 1), "scale_backward_data": (0, 2),
    "scale_backward_gamma": (0, 1), "scale_backward_beta": (0,), "prelu_backward_data": (0, 2, 3),
    "prelu_backward_slope": (0, 1),
}  # fmt: skip
"""Ops to which each entry of the first axis of these operands is something by itself; the others are read whole, or are
gradients of parameters that are added to."""

_JOINED = frozenset({"concat_backward", "slice_backward"})
"""The same of all operands, along any axis but the first."""

LOSSES: dict[str, tuple[tuple[int, ...], int]] = {
    "softmax_loss_forward": ((0, 1, 2), 3), "softmax_loss_backward": ((0, 1, 2, 4), 3),
    "euclidean_loss_forward": ((0, 1, 2), 3), "euclidean_loss_backward": ((0, 2), 1),
    "sigmoid_cross_entropy_forward": ((0, 1), 2), "sigmoid_cross_entropy_backward": ((0, 1, 3), 2),
}  # fmt: skip
"""The same, and which operand is the loss, or its gradient: a mean over the batch."""


_ABREAST = frozenset({
    "batch_norm_forward", "batch_norm_backward", "batch_norm_scale_backward", "conv_batch_norm_gradients",
    "conv_batch_norm_moments",
})  # fmt: skip
"""Ops that take no slices one after the other, but such as go abreast (`plan.abreast`)."""


class Division(NamedTuple):
    """How a run of layers takes the batch in slices.

    Attributes:
        first, last: of the run, by position.
        number: of slices.
        kept: of how many, the last ones, backward finds what it reads.
        at_once: whether gradients come with the loss, with which the run ends.
    """

    first: int
    last: int
    number: int
    kept: int = 0
    at_once: bool = False


Runs = tuple[Division, ...]


def times_as_many(runs: Runs, part: float) -> Runs:
    """The runs in so many times as many slices each; those that come to one are whole."""
    return tuple(
        Division(run.first, run.last, round(part * run.number)) for run in runs if round(part * run.number) > 1
    )


class Sliced(NamedTuple):
    """The calls of a pass, those of some runs of layers in slices.

    Attributes:
        forward, backward: the calls.
        remade: what backward fills by other calls than its layers'.
        runs: which layers these are, and how they do.
        nbytes: of what backward reads of a slice of the first run.
        pieces: arrays of a slice, in place of those that are never whole.
        absent: the memories of the latter.
        given: the layers behind which copies are made of what a run is given, each with the first of that run.
    """

    forward: list[Call]
    backward: list[Call]
    remade: list[Remade]
    runs: Runs
    nbytes: int
    pieces: list[Blob]
    absent: list[SyncedMemory]
    given: Sequence[tuple[int, int]] = ()

    @property
    def layers(self) -> list[tuple[int, int]]:
        """The first and the last layer of each run."""
        return [(run.first, run.last) for run in self.runs]

    def divides(self, first: int, last: int, backward: bool) -> bool:
        """Whether layers first to last would be some of those of a run, but not all; or run forward on copies of what
        was there before."""
        late = not backward and any(maker < first <= run <= last for maker, run in self.given)
        return late or any(divides(layers, first, last) for layers in self.layers)

    def told(self, names: Sequence[str]) -> str:
        """Which of the layers with these names are in how many slices."""
        found = [f"layers '{names[run.first]}' to '{names[run.last]}' in {run.number} slices" for run in self.runs]
        return " and ".join(found)


def in_the_way(forward: Sequence[Call], backward: Sequence[Call], layer: int, ops: Container[str]) -> Call | None:
    """The call of a layer that takes the batch as a whole whatever there is room for; if it has none, that of the
    nearest layer behind or before it that has gradients. None if none does."""
    trained = {each.layer for each in backward}
    calls = [each for each in chain(forward, backward) if each.layer in trained]
    whole = (each for each in calls if takes_all(each, ops) and each.op not in _ABREAST)
    return min(whole, key=lambda each: (abs(each.layer - layer), -each.layer), default=None)


def takes_all(each: Call, ops: Container[str]) -> bool:
    return not (may_divide(each, ops) or stands_aside(each) or each.op in COPIES)


def may_divide(each: Call, ops: Container[str]) -> bool:
    return not each.once and each.op in ops and bool(divided(each))


def divided(each: Call) -> Sequence[int]:
    """Which of a call's operands are divided."""
    op = str(each.op)
    if op in LOSSES:
        return () if counts(each) and not op.startswith("softmax") else LOSSES[op][0]
    if op in _EACH or (op in _JOINED and each.attributes["axis"] > 0):
        return range(len(each.operands))
    return _ROWS.get(op) or parts.positions(each)


def counts(loss: Call) -> bool:
    """Whether it is a mean over the labels that are not to be ignored."""
    return loss.attributes.get("ignore_label") is not None and loss.attributes["normalization"] == "VALID"


def by_item(each: Call) -> list[Operand]:
    return [operand for at in divided(each) if (operand := each.operands[at]) is not None]


def stands_aside(each: Call) -> bool:
    """Whether it may run before or after all slices: it fills a gradient, updates a parameter, or has the sums of what
    slices have summed."""
    return each.op in ("fill", "fill_scaled", "batch_norm_settle", "batch_norm_gradients", *UPDATES)


@dataclasses.dataclass(frozen=True, eq=False)
class Undivided:
    """A pass of which layers take slices.

    Attributes:
        forward, backward: the calls.
        remade: what of backward other calls fill.
        free: memories that nobody reads but these calls.
        ops: those of the device.
        times: of calls.
        images_last: they will run with images channels last.
    """

    forward: Sequence[Call]
    backward: Sequence[Call]
    remade: Sequence[Remade]
    free: Set[SyncedMemory]
    ops: Container[str]
    times: Times
    images_last: bool

    @functools.cached_property
    def turned(self) -> dict[SyncedMemory, int]:
        """The bytes of what they read so, and nobody writes."""
        return turned_of([*channels_last(self.forward), *channels_last(self.backward)] if self.images_last else [])


class Stretch(NamedTuple):
    """The calls of a run from `start` to before `stop`: those that are divided, and what runs before and after them."""

    start: int
    stop: int
    before: list[Call]
    inside: list[Call]
    after: list[Call]

    @property
    def beside(self) -> list[Call]:
        return [*self.before, *self.after]

    def written(self) -> dict[SyncedMemory, int]:
        """The bytes of what is written item by item."""
        operands = (operand for each in self.inside for operand in by_item(each))
        return {each.memory: each.nbytes for each in operands if each.intent is not Intent.READ}

    def images(self) -> set[SyncedMemory]:
        """Those of what is written so that may lie channels last."""
        operands = (operand for each in self.inside for operand in by_item(each))
        return {each.memory for each in operands if each.intent is not Intent.READ and len(each.blob.shape) in IMAGES}

    def read(self) -> set[SyncedMemory]:
        """The memories that are read item by item."""
        operands = (operand for each in self.inside for operand in by_item(each))
        return {each.memory for each in operands if each.intent is not Intent.OVERWRITE}


def is_regular(calls: Sequence[Call], items: int, joined: Container[SyncedMemory] = ()) -> bool:
    """Whether operands are of so many items each, and those that are not divided are not among these; `joined` are what
    slices write one after the other."""
    places: dict[SyncedMemory, tuple[int, int]] = {}
    for each in calls:
        for operand in by_item(each):
            place = (operand.offset, operand.nbytes)
            if not is_of(operand, items) or places.setdefault(operand.memory, place) != place:
                return False
    for each in calls:
        own, loss = {*divided(each)}, LOSSES.get(str(each.op), ((), None))[1]
        for at, other in enumerate(each.operands):
            if other is None or at in own or other.memory in joined:
                continue
            if other.memory in places or not (other.intent is Intent.READ or other.accumulate or at == loss):
                return False
    return True


class Run:
    """What becomes of the calls of a run, and of its arrays."""

    def __init__(self, of: Undivided, ahead: Stretch, back: Stretch, run: Division) -> None:
        self._of, self._ahead, self._back, self._run = of, ahead, back, run
        self._count, self._kept = run.number, run.kept
        self._before = {*memories(of.forward[: ahead.start])}
        self._later = {*memories(of.backward[back.stop :]), *memories(back.after)}
        self._earlier = {
            *self._before, *memories(of.forward[ahead.stop :]), *memories(ahead.beside),
            *memories(of.backward[: back.start]), *memories(back.before),
        }  # fmt: skip
        self._losses: list[Blob] = []  # of the slices
        self._paused: list[Paused] = []  # the slices that are kept
        self._first: Operand | None = None  # what is made anew first

    def made(self) -> Sliced | None:
        of, ahead, back = self._of, self._ahead, self._back
        outer = self._earlier | self._later
        written, back_written = ahead.written(), back.written()
        filled, back_filled = first_uses(ahead.inside), first_uses(back.inside)
        if any(memory in self._before or memory in back_written or not filled[memory] for memory in written):
            return None
        inner = {memory for memory in written if memory in of.free and memory not in outer}
        absent = inner - self._whole(written, inner)
        wanted = absent & back.read()
        again = self._again(wanted, absent)
        # what comes from a later layer may be changed in place, if nobody wants it afterwards
        changed = {memory for memory in back_written if memory in self._earlier}
        if again is None or any(memory in self._later or memory not in of.free for memory in changed):
            return None
        back_absent = {memory for memory in back_written if memory in of.free and memory not in outer} | changed
        if any(not back_filled[memory] and memory not in changed for memory in back_written):
            return None
        whole = {memory for memory in written if memory not in absent}
        whole |= {memory for memory in back_written if memory not in back_absent}
        sizes = written | back_written
        if any(sizes[memory] % (ALIGNMENT * self._count) for memory in whole):
            return None
        if self._kept and of.images_last and not whole.isdisjoint(back.images()):
            return None  # what lies channels last is written from the first part on
        divider = Divider(self._count, absent, whole, of.turned, divided, "slice")
        forward, place = self._forward(divider)
        gradients = self._gradients(divider, again, wanted, back_absent)
        backward = [*of.backward[: back.start], *back.before, *gradients, *back.after, *of.backward[back.stop :]]
        never = [memory for memory in (*written, *back_written) if memory in absent | back_absent - changed]
        remade = self._remade(again, place, {*never})
        nbytes = sum(written[memory] for memory in wanted) // self._count
        pieces = [*divider.pieces, *self._losses]
        return Sliced(forward, backward, remade, (self._run,), nbytes, pieces, never)

    def _whole(self, written: dict[SyncedMemory, int], inner: Set[SyncedMemory]) -> set[SyncedMemory]:
        """Of what lives only in the run, what is small enough to be kept for backward as a whole, and takes longer to
        be made anew, beside what is anyway, than to be copied."""
        times, read_back = self._of.times, self._back.read()
        limit = _SMALL * max((written[memory] for memory in inner), default=0)
        small = {memory for memory in inner & read_back if written[memory] <= limit}
        whole = {memory for memory in small if written[memory] % (ALIGNMENT * self._count) == 0}

        def again_ms(whole: Set[SyncedMemory]) -> float:
            again = self._again(read_back & inner - whole, inner - whole)
            return math.inf if again is None else sum(map(times.ms, again))

        ms = again_ms(whole)
        for each in self._ahead.inside:
            made = whole & {*each.written_memories()}
            more = again_ms(whole - made) if made else math.inf
            if more - ms < times.copy_ms(sum(written[memory] for memory in made)):
                whole, ms = whole - made, more
        return whole

    def _again(self, wanted: Set[SyncedMemory], absent: Set[SyncedMemory]) -> list[Call] | None:
        """The calls that make what is wanted anew; None if they would find other numbers in what they read."""
        of, start = self._of, self._ahead.start
        needed, result = {*wanted}, list[Call]()
        moved = {id(each) for each in self._back.after}
        until = (each for each in of.backward[: self._back.stop] if id(each) not in moved)
        changed = {
            memory for each in chain(until, of.forward[self._ahead.stop :]) for memory in each.written_memories()
        }
        for each in reversed(of.forward[start : self._ahead.stop]):
            outs = {*each.written_memories()}
            if not needed.isdisjoint(outs) and may_divide(each, of.ops):
                result.insert(0, each)
                sources = {*each.read_memories()}
                needed |= sources & absent
                if not (sources - absent).isdisjoint(changed):
                    return None
            changed |= outs
        return result

    # ---------------------------------------------------------------- the calls

    def _forward(self, divider: Divider) -> tuple[list[Call], dict[int, int]]:
        """The calls of forward, and where those are now that were there before, by id: of slices, the last."""
        of, ahead, place = self._of, self._ahead, dict[int, int]()
        result = [*self._until(), *ahead.before]
        place.update((id(each), at) for at, each in enumerate(result))
        result += self._in_front()
        losses: dict[int, list[Blob]] = {}
        for index in range(self._count):
            divider.begin(index, own_copies=True)
            for each in ahead.inside:
                result += self._brought(divider, index, each)
                result += divider.calls(each)
                if str(each.op) in LOSSES:
                    losses.setdefault(id(each), []).append(self._own_loss(result, index))
                place[id(each)] = len(result) - 1
            result += self._behind(divider, index)
            if index >= self._count - self._kept:
                self._paused.append(divider.pause())
        for each in ahead.inside:
            if id(each) in losses:
                result += self._sum(each, losses[id(each)])
        rest = [*ahead.after, *of.forward[ahead.stop :]]
        place.update((id(each), at) for at, each in enumerate(rest, len(result)))
        return [*result, *rest], place

    def _until(self) -> Sequence[Call]:
        """The calls of forward before the run."""
        return self._of.forward[: self._ahead.start]

    def _in_front(self) -> list[Call]:
        """What forward runs before the slices."""
        return []

    def _brought(self, divider: Divider, index: int, each: Call) -> list[Call]:
        """What forward runs before a call's slice of that number, which the divider has."""
        return []

    def _behind(self, divider: Divider, index: int) -> list[Call]:
        """What forward runs behind a slice, which the divider has."""
        return []

    def _own_loss(self, calls: list[Call], index: int) -> Blob:
        """Give the last of the calls an array of its own for its slice's loss; which."""
        each = calls[-1]
        _, at = LOSSES[str(each.op)]
        loss = self._scalar(each.operand(at), f"slice {index + 1} of {self._count}")
        calls[-1] = of_slice(each, at, overwrite(loss, each.operand(at).shape))
        return loss

    def _scalar(self, like: Operand, what: str) -> Blob:
        blob = like.blob
        found = Blob(blob.shape, dtype=blob.dtype, device=blob.device, name=f"{like.memory.name} ({what})")
        self._losses.append(found)
        return found

    def _share(self, loss: Call) -> float:
        """Of a slice's loss in that of the batch: means of equal slices are averaged."""
        return 1.0 if counts(loss) or loss.attributes.get("normalization") == "NONE" else 1 / self._count

    def _sum(self, each: Call, found: Sequence[Blob]) -> list[Call]:
        """The calls that make the loss of what slices have."""
        loss = each.operand(LOSSES[str(each.op)][1])
        total = overwrite(self._scalar(loss, "sum")) if counts(each) else loss
        made = like(each, call("eltwise_sum", *map(read, found), total, coeffs=(self._share(each),) * self._count))
        return [made, over_labels(each, read(total.blob), loss)] if counts(each) else [made]

    def _scaled(self, each: Call) -> tuple[Call, Blob]:
        """What makes the gradient that a loss has in a slice, and where."""
        gradient = each.operand(LOSSES[str(each.op)][1])
        scaled = self._scalar(gradient, "slices")
        if counts(each):
            return over_labels(each, gradient, overwrite(scaled)), scaled
        made = call("eltwise_sum_backward", gradient, overwrite(scaled), coeff=self._share(each))
        return like(each, made), scaled

    def _gradients(
        self, divider: Divider, again: Sequence[Call], wanted: Set[SyncedMemory], absent: Set[SyncedMemory]
    ) -> list[Call]:
        """The calls of backward, slice by slice, those that are kept first: what is made anew, then its gradients."""
        result: list[Call] = []
        scaled: dict[int, Blob] = {}  # of losses, the gradients that slices have
        for each in self._back.inside:
            if str(each.op) in LOSSES:
                made, scaled[id(each)] = self._scaled(each)
                result.append(made)
        for number, slice_ in enumerate([*reversed(self._paused), *range(self._count - self._kept)]):
            if isinstance(slice_, Paused):
                divider.resume(slice_)
            else:
                result += self._made_anew(divider, again, slice_)
            divider.absent = wanted | absent
            for each in self._back.inside:
                result += divider.calls(each)
                if str(each.op) in LOSSES:
                    _, at = LOSSES[str(each.op)]
                    result[-1] = of_slice(result[-1], at, read(scaled[id(each)], each.operand(at).shape))
                if number:
                    result[-1] = adding(result[-1])
        return result

    def _made_anew(self, divider: Divider, again: Sequence[Call], index: int) -> list[Call]:
        """The calls that make what is wanted of a slice anew."""
        result: list[Call] = []
        divider.begin(index, own_copies=True)
        divider.absent = {memory for each in again for memory in each.written_memories()}
        for each in again:
            result += divider.calls(each)
            if str(each.op) in LOSSES:
                self._own_loss(result, index)
            self._first = self._first or next(out for out in result[-1].present() if out.intent is not Intent.READ)
        return result

    def _remade(self, again: Sequence[Call], place: dict[int, int], never: Container[SyncedMemory]) -> list[Remade]:
        """What backward fills, with the places that its makers have now; what is made anew relies on the whole run."""
        of = self._of
        now = [place[id(each)] for each in of.forward]
        remade = moved((each for each in of.remade if each.array.view.memory not in never), now)
        if not again:
            return remade
        sources = {operand.memory for each in again for operand in each.present()}
        makers = [
            at
            for at, each in enumerate(of.forward[: self._ahead.stop])
            if at >= self._ahead.start or not sources.isdisjoint(each.written_memories())
        ]
        start = sum(at < self._ahead.start for at in makers)
        assert self._first is not None
        self._first.memory.name = self._first.memory.name.partition(" (slice ")[0]  # which is what a user would keep
        return [*remade, Remade(self._first, sorted(now[at] for at in makers), start)]


def of_slice(loss: Call, at: int, operand: Operand) -> Call:
    """The call of a loss, or of its gradient, with another operand in place of this."""
    operands = (*loss.operands[:at], operand, *loss.operands[at + 1 :])
    attributes = loss.attributes | ({"normalization": "NONE"} if counts(loss) else {})
    return dataclasses.replace(loss, operands=operands, attributes=attributes)


def over_labels(loss: Call, number: Operand, result: Operand) -> Call:
    """What divides a number by how many labels count."""
    attributes = {name: loss.attributes[name] for name in ("ignore_label", "layer")}
    classes = loss.operand(0).op_shape[1]
    return like(loss, call("divide_by_labels", number, loss.operand(1), result, classes=classes, **attributes))


def adding(each: Call) -> Call:
    """The call, adding to the gradients of parameters that it would begin."""
    operands = (
        dataclasses.replace(operand, intent=Intent.WRITE) if operand is not None and begins_sum(operand) else operand
        for operand in each.operands
    )
    return dataclasses.replace(each, operands=tuple(operands))
