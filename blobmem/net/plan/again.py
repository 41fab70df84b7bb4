"""Calls of forward that run again within backward, on arrays of their own, so that what they make need not be kept.

Which arrays are made anew is given. Each is made once, just before the first call of backward that reads it, with all
that has to be made for it; what is kept, or made anew already, is taken as it is. Or it is given in rounds: then it may
be made as often as it is needed, and has no bytes in between. The calls are those of forward with the same numbers, and
so are the bits.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from blobmem.memory import Intent, SyncedMemory
from blobmem.memory.blob import Blob
from blobmem.net.plan.heirs import IN_PLACE
from blobmem.net.plan.uses import Remade, Uses, lie_alike, traffic
from blobmem.ops.call import Call, Operand, overwrite, placed, redirected

AGAIN = frozenset({
    # element by element
    "absval_forward", "axpy_forward", "bias_forward", "bnll_forward", "clip_forward", "copy", "eltwise_max",
    "eltwise_prod", "eltwise_sum", "elu_forward", "exp_forward", "log_forward", "power_forward", "prelu_forward",
    "relu6_forward", "relu_forward", "scale_forward", "sigmoid_forward", "sum_arrays", "swish_forward", "tanh_forward",
    "threshold_forward",
    # products
    "conv_forward", "deconv_forward", "im2col_forward", "inner_product_forward",
    # windows, sums, normalisations
    "ave_pool_forward", "interp_forward", "l2_normalize_forward", "lrn_forward", "lrn_within_forward",
    "max_pool_forward", "mvn_forward", "nearest_forward", "reduction_forward", "roi_pool_forward", "softmax_forward",
    "spp_ave_forward", "spp_max_forward", "unpool_forward",
    # elements in other places
    "concat_forward", "crop_forward", "gather_forward", "slice_forward", "take_items", "tile_forward", "transpose",
    # statistics, those of a batch and those that run on, which a second run must not move: it moves others
    "batch_norm_forward", "batch_norm_given", "batch_norm_inference",
    # numbers drawn by a counter that is the pass's: they are told again
    "dropout_forward", "spp_stochastic_forward", "stochastic_pool_forward",
})  # fmt: skip
"""Ops that may run again, as what they write is a function of what they read.

Not here are those that carry a state from pass to pass (recurrent ones), take data, or look at values on the host;
losses, whose arrays backward reads first; and all that is run `once`."""

_RUNNING = {"batch_norm_forward": (5, 6, 7)}
"""Of these, which operands are updated, and by a second run something else in their place."""

OPTIONAL = {"batch_norm_forward": 2, "batch_norm_given": 2, "max_pool_forward": 2}
"""Of these, which operand is only written for backward, and may be absent."""

_KEPT = {"batch_norm_given": 2, "batch_norm_scale_given": 2, "batch_norm_scale_sum_relu_given": 3,
         "conv_batch_norm_given": 5}  # fmt: skip
"""Of batch norms by given statistics, and what runs for these and others, where what is kept for backward is."""

NORMS = ("batch_norm_forward", "batch_norm_given")
"""Ops whose top is what they keep for backward, too."""

_TAKES_PLACE = frozenset({"scale_forward", "relu_forward", "eltwise_sum"})
"""Ops that make their output in the array of what is made for them alone."""


class Again:
    """What may be made anew in a backward pass, and by which calls of forward.

    What a memory holds after some of its writes is told by the position of the call that wrote it last, -1 if none did.

    Args:
        uses: of the calls of a whole pass.
        free: memories that nobody reads but these calls.
        ops: those of the device.
        layers: the calls of the pass as layers have them, if these are others.
        pieces: memories of slices of the batch, which calls of smaller slices may fill, or read, part by part.

    Attributes:
        uses, free, ops, pieces: as given.
        before: of a call of forward that fills a part of such, behind the first, the one that fills the part before.
        calls: those of forward as they run again.
        may: positions of the calls of forward that may run again.
        offers: memories that backward reads, and which may be made anew for it.
        held: of what backward does not read, that of which others are made: kept for these, instead of made anew.
    """

    def __init__(
        self, uses: Uses, free: Container[SyncedMemory], ops: Mapping[str, Any], layers: Sequence[Call] = (),
        pieces: Container[SyncedMemory] = (),
    ) -> None:  # fmt: skip
        self.uses, self.free, self.ops, self.pieces = uses, free, ops, pieces
        self._layers = layers or (*uses.forward, *uses.backward)
        self._gives = "batch_norm_given" in ops
        self.calls = [self.call(each) for each in uses.forward]
        self._whole = _whole([*uses.forward, *uses.backward], pieces)
        self.before = self._in_parts()
        self.held: Collection[SyncedMemory] = ()
        self.may: set[int] = set()
        for at, each in enumerate(uses.forward):
            begun = at not in self.before or self.before[at] in self.may
            if (
                self._is_pure(each, ops)
                and begun
                and all(self.maker(memory, at) in self.may or self._stays(memory, at) for memory in _read(each))
            ):
                self.may.add(at)
        self.offers = [memory for memory in uses.read if self._is_offered(memory)]

    @functools.cached_property
    def traffic(self) -> int:
        """Bytes that the calls of the pass read and write, of which `usual` may spend a share."""
        return traffic(self._layers)

    def maker(self, memory: SyncedMemory, at: float = math.inf) -> int:
        """The call before `at` that wrote it last."""
        written = self.uses.written.get(memory, ())
        before = bisect_left(written, at)
        return written[before - 1] if before else -1

    def _is_pure(self, each: Call, ops: Container[str]) -> bool:
        if each.op not in AGAIN or each.op not in ops or each.once:
            return False
        running = _RUNNING.get(str(each.op), ())
        return all(
            operand is None
            or operand.intent is Intent.READ
            or at in running
            or (operand.intent is Intent.OVERWRITE and self._whole[operand.memory] is not None)
            for at, operand in enumerate(each.operands)
        )

    def _in_parts(self) -> dict[int, int]:
        """The `before`; what is filled part by part otherwise than by calls next to each other is not whole."""
        result = dict[int, int]()
        for memory in [memory for memory in self.uses.written if memory in self.pieces]:
            last, following = -1, 0
            for at in self.uses.written[memory]:
                part = next(each for each in self.uses.forward[at].present() if _writes(each, memory)).part
                index, count = part or (0, 1)
                if index != following:
                    self._whole[memory] = None
                elif index:
                    result[at] = last
                last, following = at, (index + 1) % count
        return result

    def _stays(self, memory: SyncedMemory, at: int) -> bool:
        """Whether backward finds, or could find, there what call `at` of forward does."""
        last = self.uses.last_write(memory)
        if self.maker(memory, at) != last or memory in self.uses.changed:
            return False
        return last < 0 or memory in self.free or memory in self.uses.read

    def _is_offered(self, memory: SyncedMemory) -> bool:
        last, readers = self.uses.last_write(memory), self.uses.read[memory]
        if last not in self.may or memory not in self.free or not self.uses.stays(memory):
            return False
        if memory in self.statistics(last):
            return False
        # a layer below the last write's has seen other numbers, which is warned of
        return all(self.uses.backward[at].layer >= self.uses.forward[last].layer for at in readers)

    def call(self, each: Call) -> Call:
        """A call of forward as it runs again: a batch norm, or what runs for that and others, by the statistics that it
        has taken, where the device has ops for that."""
        return _given(each) if self._gives else each

    def statistics(self, at: int) -> list[SyncedMemory]:
        """What call `at` of forward, as it runs again, reads of what it has written itself."""
        each = self.uses.forward[at]
        return [operand.memory for operand in _statistics(each)] if self._gives else []

    def may_take_place(self, at: int) -> bool:
        """Whether call `at` of forward may make its output in an array that it reads."""
        each = self.uses.forward[at]
        return each.op in IN_PLACE and all(operand.part is None for operand in each.present())

    def nbytes(self, operand: Operand) -> int:
        """The bytes of an operand, or of the array that it is a part of."""
        parts = operand.part[1] if operand.part is not None and operand.memory in self.pieces else 1
        return parts * operand.nbytes

    def kept(self, memory: SyncedMemory, at: int, wanted: Container[SyncedMemory]) -> bool:
        """Whether call `at`, as it runs again, reads what forward has left in the memory: not if it is made anew."""
        if memory in wanted or not self._stays(memory, at):
            return False
        made = self.maker(memory, at)
        needed = memory in self.uses.read or memory in self.held
        return needed or made not in self.may or memory not in self.free

    def bridges(self) -> list[SyncedMemory]:
        """What backward does not read, and several calls of forward do, in order: what may be held."""
        forward, users = self.uses.forward, Counter[SyncedMemory]()
        for at, each in enumerate(forward):
            users.update(memory for memory in {*_read(each)} if self.maker(memory, at) == self.uses.last_write(memory))
        found = [memory for memory, number in users.items() if number > 1 and memory not in self.uses.read]
        found = [memory for memory in found if memory in self.free and self.uses.last_write(memory) in self.may]
        return sorted(filter(self.uses.stays, found), key=self.uses.last_write)

    def same(self, memory: SyncedMemory, at: int, wanted: Container[SyncedMemory]) -> Operand | None:
        """What is kept, and has the numbers that call `at` reads in a memory that is not: what a batch norm, whose top
        that is, has normalised."""
        if self.kept(memory, at, wanted):
            return None
        made = self.maker(memory, at)
        each = self.uses.forward[made] if made >= 0 else None
        if each is None or each.op not in NORMS or each.operand(1).memory is not memory:
            return None
        other = each.operands[2]
        if other is None or self.uses.last_write(other.memory) != made or other.memory not in self.uses.read:
            return None
        return other if self.kept(other.memory, made + 1, wanted) else None


class Round(NamedTuple):
    """Some arrays that are made anew at one time.

    Attributes:
        memory, use: which of the calls of backward that read the memory comes next.
        made: what is made that is read after the round.
        gone: what is not there before it.
    """

    memory: SyncedMemory
    use: int
    made: Collection[SyncedMemory]
    gone: Collection[SyncedMemory]


class Less(NamedTuple):
    """By what a pass has less in use.

    Attributes:
        anew: what is made anew, once each.
        held: what is kept for that.
        rounds: in which others are made anew.
        apart: of a layer's calls of an op, how many calls may run as one from them on (`Call.together`).
    """

    anew: Collection[SyncedMemory] = ()
    held: Collection[SyncedMemory] = ()
    rounds: Sequence[Round] = ()
    apart: Mapping[tuple[int, Any], int] = MappingProxyType({})


class Rerun:
    """The calls that make some arrays anew.

    Args:
        wanted: which; of a round, what it makes.
        gone: what is not there; None if that is just this.
        there: of what an earlier round has made, the array.

    Attributes:
        runs: position in forward of each call that runs again -> those of calls that have to have done so before.
    """

    def __init__(
        self,
        again: Again,
        wanted: Collection[SyncedMemory],
        gone: Collection[SyncedMemory] | None = None,
        there: Mapping[SyncedMemory, Blob] | None = None,
    ) -> None:
        self.again, self.wanted, self._there = again, {*wanted}, there or {}
        self._gone = self.wanted if gone is None else {*gone}
        self.runs: dict[int, set[int]] = {}
        waiting = [again.maker(memory) for memory in wanted]
        while waiting:
            at = waiting.pop()
            if at not in self.runs:
                self.runs[at] = {again.maker(memory, at) for memory in self._made(at)}
                if at in again.before:
                    self.runs[at].add(again.before[at])
                waiting += self.runs[at]
        self.runs = dict(sorted(self.runs.items()))
        self._users: dict[SyncedMemory, list[int]] = defaultdict(list)  # of what is made, who reads it as it is made
        since: dict[SyncedMemory, list[int]] = defaultdict(list)  # the last to write each memory, and readers after it
        for at in self.runs:
            for memory in self._made(at):
                self._users[memory].append(at)
        for at, before in self.runs.items():
            for memory in self._made(at):
                since[memory].append(at)
            for memory in self._makes(at):
                before.update(other for other in since[memory] if other != at)
                since[memory] = [at]

    def _call(self, at: int) -> Call:
        return self.again.calls[at]

    def _made(self, at: int) -> Iterator[SyncedMemory]:
        """What of that which a call reads is made anew."""
        statistics = self.again.statistics(at)
        for memory in dict.fromkeys(_read(self._call(at))):
            kept = memory in statistics or self.again.kept(memory, at, self._gone)
            if not kept and self.again.same(memory, at, self._gone) is None:
                yield memory

    def _makes(self, at: int) -> list[SyncedMemory]:
        return [operand.memory for operand in self._written(at) if operand is not None]

    def _written(self, at: int) -> Iterator[Operand | None]:
        """What a call writes, None for what it need not and what it reads."""
        each, bare = self._call(at), self._is_bare(at)
        for place, operand in enumerate(each.operands):
            if operand is None or operand.intent is Intent.READ or (bare and place == 1):
                yield None
            elif OPTIONAL.get(str(each.op)) != place or operand.memory in self.wanted or operand.memory in self._users:
                yield operand
            else:
                yield None

    def _is_bare(self, at: int) -> bool:
        """Whether it is a batch norm, of which nobody needs but what it keeps for backward: its top is that, too."""
        each, maker = self._call(at), self.again.maker
        kept = each.operands[2] if each.op in NORMS else None
        if kept is None or (kept.memory not in self.wanted and kept.memory not in self._users):
            return False
        top = each.operand(1).memory
        read = any(maker(top, user) == at for user in self._users.get(top, ()))
        return not read and not (top in self.wanted and maker(top) == at)

    def batches(self) -> Iterator[tuple[int, list[int]]]:
        """Positions in backward, and of the calls that run again before each of these, in their order."""
        done: set[int] = set()
        firsts: dict[int, list[int]] = defaultdict(list)
        for memory in self.wanted:
            firsts[self.again.uses.read[memory][0]].append(self.again.maker(memory))
        for reader, waiting in sorted(firsts.items()):
            found: set[int] = set()
            while waiting:
                at = waiting.pop()
                if at not in done:
                    done.add(at)
                    found.add(at)
                    waiting += self.runs[at]
            yield reader, sorted(found)

    # ---------------------------------------------------------------- the calls, on arrays

    def arrays(self, array_like: Callable[[Call, Blob], Blob]) -> dict[SyncedMemory, Blob]:
        """In which array each memory is made anew: its own, or that of the only one that is made of it."""
        first: dict[SyncedMemory, int] = {}
        for at in self.runs:
            for memory in self._makes(at):
                first.setdefault(memory, at)
        result: dict[SyncedMemory, Blob] = {}
        for memory, at in sorted(first.items(), key=lambda item: -item[1]):
            if memory not in result:
                blob = self._call(self.again.maker(memory)).operands
                last = next(operand for operand in reversed(blob) if operand is not None and operand.memory is memory)
                result[memory] = array_like(self._call(self._origin(at)), last.blob)
                result[memory].data_view.memory.name = last.blob.name  # which is what a user would keep
            lent = self._lends(at, memory)
            if lent is not None:
                result[lent] = result[memory]
        return result

    def _origin(self, at: int) -> int:
        """The call that what is made from call `at` on comes from: it, or one that need not run again."""
        for memory in _read(self._call(at)):
            if self.again.same(memory, at, self._gone) is not None:
                return self.again.maker(memory, at)
        return at

    def _lends(self, at: int, memory: SyncedMemory) -> SyncedMemory | None:
        """What is made for call `at` alone, the first to make `memory`, and may be made in its array."""
        each = self._call(at)
        if each.op not in _TAKES_PLACE or each.operand(-1).memory is not memory or each.operand(-1).part is not None:
            return None
        for source in sorted(self._made(at), key=lambda each: -self.again.maker(each, at)):  # may run as one with it
            users = [user for user in self._users[source] if source not in self._makes(user)]
            alone = source is not memory and source not in self.wanted and users == [at]
            if alone and [*_read(each)].count(source) == 1:
                return source
        return None

    def call(self, at: int, arrays: Mapping[SyncedMemory, Blob], reader: Call) -> Call:
        """A call as it runs again, for a call that reads what it makes."""
        each, operands = self._call(at), list[Operand | None]()
        made = {*self._made(at)}
        for operand, written in zip(self._call(at).operands, self._written(at), strict=True):
            if written is not None:
                made_in = overwrite(arrays[written.memory], written.op_shape)
                operands.append(dataclasses.replace(made_in, part=written.part))
            elif operand is None or operand.intent is not Intent.READ:
                operands.append(None)
            elif operand.memory in made:
                operands.append(placed(operand, arrays[operand.memory]))
            else:
                kept = self.again.same(operand.memory, at, self._gone) or operand
                blob = self._there.get(kept.memory, kept.blob)
                operands.append(operand if blob is operand.blob else placed(operand, blob))
        if self._is_bare(at):
            operands[1:3] = [operands[2], None]
        return dataclasses.replace(each, operands=tuple(operands), layer=reader.layer, layer_name=reader.layer_name)

    def remade(self, arrays: Mapping[SyncedMemory, Blob]) -> list[Remade]:
        """What has to have run for each array to be right."""
        makers: dict[int, tuple[set[int], int, bool]] = {}
        result: dict[SyncedMemory, Remade] = {}
        written = self.again.uses.written
        for at in self.runs:
            each, made = self._call(at), {*self._made(at)}
            run, start, draws = {at}, self._origin(at), each.attributes.get("draws") is not None
            relied = [self.again.before[at]] if at in self.again.before else []
            for memory in _read(each):
                if memory in made and (memory not in self.wanted or memory in self._makes(at)):
                    relied.append(self.again.maker(memory, at))
                other = None if memory in made else self.again.same(memory, at, self._gone)
                for source in (memory, *([] if other is None else [other.memory])):
                    run.update(written.get(source, ()) if source not in self._makes(at) else ())
            for before in relied:
                others, first, drawn = makers[before]
                run, start, draws = run | others, min(start, first), draws or drawn
            makers[at] = run, start, draws
            for memory in self._makes(at):
                if memory not in self.wanted and memory not in self._users:
                    continue
                array = overwrite(arrays[memory])
                if draws:  # by the counter of one pass
                    result[array.memory] = Remade(array, [*range(len(self.again.uses.forward))], 0, at_once=True)
                else:
                    ran = sorted(run.union(written[memory] if self.again.maker(memory) == at else ()))
                    result[array.memory] = Remade(array, ran, ran.index(start))
        return [*result.values()]


class Anew(NamedTuple):
    """The calls of a pass that makes arrays anew.

    Attributes:
        forward, backward: the calls.
        remade: the arrays that backward fills so.
        absent: memories that forward does not write any more.
    """

    forward: list[Call]
    backward: list[Call]
    remade: list[Remade]
    absent: set[SyncedMemory]


def run_again(
    again: Again,
    wanted: Collection[SyncedMemory],
    array_like: Callable[[Call, Blob], Blob],
    joints: Sequence[int] = (),
    rounds: Sequence[Round] = (),
) -> Anew:
    """The calls of forward and backward, with those put in that make arrays anew.

    Args:
        again: what may run again.
        wanted: which of its offers are made anew, once each.
        array_like: the array for a blob that is made from this call of forward on.
        joints: the positions at which calls may be put into backward (`schedule.joints`); any if empty.
        rounds: in which others are made anew, in their order.
    """
    forward, backward = again.uses.forward, again.uses.backward
    put: dict[int, list[Call]] = defaultdict(list)
    made: dict[int, dict[SyncedMemory, Blob]] = defaultdict(dict)  # what is read from there on
    remade, there = list[Remade](), dict[SyncedMemory, Blob]()

    def joint(reader: int) -> int:
        return joints[bisect_right(joints, reader) - 1] if joints else reader

    def run(rerun: Rerun, batches: Iterable[tuple[int, Iterable[int]]], since: int) -> None:
        arrays = rerun.arrays(array_like)
        for reader, positions in batches:
            at = joint(reader)
            put[at] += [rerun.call(each, arrays, backward[at]) for each in positions]
        there.update((memory, arrays[memory]) for memory in rerun.wanted)
        made[since].update((memory, arrays[memory]) for memory in rerun.wanted)
        remade.extend(rerun.remade(arrays))

    once = Rerun(again, wanted)
    run(once, once.batches(), 0)
    for each in rounds:
        rerun, use = Rerun(again, each.made, each.gone, there), again.uses.read[each.memory][each.use]
        run(rerun, [(use, rerun.runs)], joint(use))
    result, arrays = list[Call](), dict[SyncedMemory, Blob]()
    for at, reader in enumerate(backward):
        arrays.update(made.get(at, ()))
        result += [*put.get(at, ()), redirected(reader, arrays)]
    read = {memory for each in (*forward, *result) for memory in _read(each)}
    absent = {memory for memory in there if memory not in read}
    shorter = [_without(each, absent) for each in forward]
    absent -= {operand.memory for each in shorter for operand in each.present()}
    # what a round made by the way may have been given up before anything read it
    unread = {each.array.memory for each in remade if each.array.memory not in read}
    result = [_without(each, unread) for each in result]
    unread -= {operand.memory for each in result for operand in each.present()}
    return Anew(shorter, result, [each for each in remade if each.array.memory not in unread], absent)


def by_one(each: Call) -> Call:
    """The call of a batch norm by given statistics, or what runs for it, without what it keeps beside its result."""
    place = _KEPT.get(str(each.op))
    return each if place is None else each.over((*each.operands[:place], None, *each.operands[place + 1 :]))


def _without(each: Call, absent: Container[SyncedMemory]) -> Call:
    """The call, not writing what it need not and is absent."""
    place = OPTIONAL.get(str(each.op))
    operand = None if place is None else each.operands[place]
    if operand is None or operand.memory not in absent:
        return each
    operands = (None if at == place else operand for at, operand in enumerate(each.operands))
    return dataclasses.replace(each, operands=tuple(operands))


def _statistics(each: Call) -> list[Operand]:
    """The mean and the inverse deviation that a batch norm, or what runs for that and others, writes."""
    if not (str(each.op).startswith("batch_norm") and str(each.op).endswith("_forward")):
        return []
    present = list(each.present())
    updated = next(at for at, operand in enumerate(present) if operand.intent is Intent.WRITE)
    return present[updated - 2 : updated]


def _given(each: Call) -> Call:
    """The call by given statistics."""
    given = _statistics(each)
    if not given:
        return each
    operands = (
        dataclasses.replace(operand, intent=Intent.READ) if operand in given else operand
        for operand in each.operands
        if operand is None or operand.intent is not Intent.WRITE
    )
    attributes = {name: value for name, value in each.attributes.items() if name not in ("eps", "fraction")}
    op = str(each.op).replace("_forward", "_given")
    return dataclasses.replace(each, op=op, operands=tuple(operands), attributes=attributes)


def _read(each: Call) -> Iterator[SyncedMemory]:
    """What a call reads that is not only updated."""
    return (operand.memory for operand in each.present() if operand.intent is Intent.READ)


def _writes(operand: Operand, memory: SyncedMemory) -> bool:
    return operand.memory is memory and operand.intent is not Intent.READ


def _whole(calls: Sequence[Call], pieces: Container[SyncedMemory]) -> dict[SyncedMemory, Operand | None]:
    """Of each memory an operand that is all of it; None where there are others, but for parts of `pieces`."""
    found: dict[SyncedMemory, Operand | None] = {}
    for operand in (operand for each in calls for operand in each.present()):
        if operand.part is not None and operand.memory in pieces:
            operand = dataclasses.replace(operand, part=None, shape=None)
        before = found.setdefault(operand.memory, operand)
        if operand.diff or operand.part is not None or not lie_alike(before, operand):
            found[operand.memory] = None
    return found
