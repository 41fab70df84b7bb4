"""What a training step does that keeps, evicts or makes anew: the problem whose least time is the floor (`floor`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from blobmem.memory import Intent, SyncedMemory
from blobmem.net.fusion import UPDATES
from blobmem.net.plan.again import Less
from blobmem.net.plan.heirs import IN_PLACE
from blobmem.net.plan.places import draft
from blobmem.net.plan.times import Times
from blobmem.net.schedule import Unit
from blobmem.ops.call import Call, Operand

_SCALED = {"scale_forward", "batch_norm_forward"}


@dataclass
class Run:
    """A call, or several that run as one.

    Attributes:
        ms: how long it takes.
        calls: these, by number.
        there: the values that are on the device, whole, when it ends.
        beside: bytes of other gradients, which were made before and are read later.
    """

    ms: float
    calls: range
    there: list[int]
    beside: int = 0


@dataclass
class Single:
    """A call, as it runs by itself once more.

    Attributes:
        ms: how long that takes.
        reads, makes: values.
        state: what of the state it needs.
        updates: what of that it updates.
    """

    ms: float
    reads: list[int] = field(default_factory=list)
    makes: list[int] = field(default_factory=list)
    state: list[int] = field(default_factory=list)
    updates: list[int] = field(default_factory=list)


@dataclass
class Problem:
    """A step.

    Attributes:
        turn: how many runs are of forward.
        runs: what runs, in order.
        calls: of all of these.
        sizes: bytes of each value, which a call makes.
        state: bytes of each array that lasts from step to step.
    """

    turn: int = 0
    runs: list[Run] = field(default_factory=list)
    calls: list[Single] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    state: list[int] = field(default_factory=list)

    @property
    def forward(self) -> float:
        """How many ms its runs take."""
        return sum(run.ms for run in self.runs[: self.turn])

    @property
    def backward(self) -> float:
        """How many ms its runs take."""
        return sum(run.ms for run in self.runs[self.turn :])

    def within(self, ms: float) -> Problem:
        """The same, with calls so much shorter that without a limit they take no longer than that."""
        part = min(1.0, ms / (self.forward + self.backward))
        runs = [replace(each, ms=part * each.ms) for each in self.runs]
        return replace(self, runs=runs, calls=[replace(each, ms=part * each.ms) for each in self.calls])


def problem_of(net: Any) -> Problem:
    """The problem of a net that has not run, whose solver's updates are placed."""
    made = net._made(Less(), 1)
    made.drawn = draft(net, made.schedules, made.kept)
    arena = {life.key for life in made.drawn.lives.arena}
    lasting = {memory for memory, use in made.drawn.lives.uses.items() if use.pinned and memory not in arena}
    ahead, behind = made.drawn.units
    again = (lambda call: call) if made.again is None else made.again.call
    reader = _Reader(Times(net.device), lasting)
    for unit in ahead:
        reader.add(unit, [again(call) for call in unit.calls])
    reader.problem.turn = len(ahead)
    for unit in behind:
        reader.add(unit, unit.calls)
    _tell_gradients(reader.problem)
    return reader.problem


def _tell_gradients(problem: Problem) -> None:
    """Those of parameters may be made, and used up, in pieces; others last until they are read."""
    pieces = {value for call in problem.calls if call.updates for value in call.reads}
    last = {
        value: at for at, run in enumerate(problem.runs) for call in run.calls for value in problem.calls[call].reads
    }
    waiting = set[int]()
    for at, run in enumerate(problem.runs):
        run.there = [value for value in run.there if value not in pieces]
        waiting = {value for value in waiting if last[value] > at}
        run.beside = sum(problem.sizes[value] for value in waiting.difference(run.there))
        if at >= problem.turn:
            made = {value for call in run.calls for value in problem.calls[call].makes}
            waiting |= {value for value in made - pieces if last.get(value, at) > at}


class _Reader:
    """Finds values in the bytes that calls use.

    Args:
        times: of calls.
        lasting: the memories of state.
    """

    def __init__(self, times: Times, lasting: set[SyncedMemory]) -> None:
        self.problem, self._times, self._lasting = Problem(), times, lasting
        self._state: dict[SyncedMemory, int] = {}
        self._there = defaultdict[SyncedMemory, list[tuple[int, int, int]]](list)  # from where to where which value is
        self._maker: list[Call] = []  # of each value
        self._signs: set[int] = set()  # values of which gradients of their own need signs alone

    def add(self, unit: Unit, timed: Sequence[Call]) -> None:
        """What runs next; `timed` are its calls as they take their time if they run again."""
        own, first = unit.calls[: unit.stop - unit.start], len(self.problem.calls)
        apart, together = [self._times.ms(call) for call in timed[: len(own)]], self._times.ms(timed[-1])
        for call, ms in zip(own, apart, strict=True):
            # by itself it takes at least its share of those that run as one; a ReLU in place may run with any before it
            joins = call.op == "relu_forward" and len({operand.memory for operand in call.present()}) == 1
            self._call(call, 0.0 if joins else ms * min(1.0, together / (sum(apart) or 1.0)))
        calls = range(first, len(self.problem.calls))
        self.problem.runs.append(Run(self._times.ms(unit.calls[-1]), calls, self._whole(unit.calls[-1], calls)))

    def _call(self, call: Call, ms: float) -> None:
        made, written = Single(ms), dict[tuple[SyncedMemory, int, int], None]()
        for operand in call.present():
            start, stop = operand.view.offset, operand.view.offset + operand.view.nbytes
            if operand.memory in self._lasting:
                self._uses(made, operand, call.op in UPDATES)
                continue
            if operand.intent is not Intent.OVERWRITE:
                made.reads += [each for each in self._values(operand) if each not in made.reads]
            if operand.intent is not Intent.READ:
                written[operand.memory, start, stop] = None
        if call.op == "relu_backward":
            made.reads = [each for each in made.reads if each not in self._signs]
        signs = call.op == "relu_forward" and any(self._maker[each].op in _SCALED for each in made.reads)
        for memory, start, stop in written:
            value = self._overwrite(memory, start, stop)
            made.makes.append(value)
            self._maker.append(call)
            self._signs.update([value] if signs else [])
        self._same(call, {memory for memory, _, _ in written})
        self.problem.calls.append(made)

    def _uses(self, made: Single, operand: Operand, updates: bool) -> None:
        state = self.problem.state
        number = self._state.setdefault(operand.memory, len(state))
        state += [0] * (number == len(state))
        state[number] = max(state[number], operand.view.offset + operand.view.nbytes)
        made.state += [number] * (number not in made.state)
        if updates and operand.intent is not Intent.READ:
            made.updates.append(number)

    def _values(self, operand: Operand) -> Iterator[int]:
        """What is where an operand is."""
        start, stop = operand.view.offset, operand.view.offset + operand.view.nbytes
        return (value for begin, end, value in self._there[operand.memory] if begin < stop and start < end)

    def _overwrite(self, memory: SyncedMemory, start: int, stop: int) -> int:
        """A new value in these bytes. Of others, the least of what is left of them counts."""
        sizes, left = self.problem.sizes, []
        for begin, end, other in self._there[memory]:
            for low, high in ((begin, min(end, start)), (max(begin, stop), end)):
                if low < high:
                    left.append((low, high, other))
                    sizes[other] = min(sizes[other], high - low)
        self._there[memory] = [*left, (start, stop, len(sizes))]
        sizes.append(stop - start)
        return len(sizes) - 1

    def _same(self, call: Call, written: set[SyncedMemory]) -> None:
        """What a batch norm keeps is its top once more, in another place."""
        kept = call.operands[2] if call.op == "batch_norm_forward" else None
        if kept is None or kept.memory not in written:
            return
        for operand in call.present():
            if operand.memory in written and operand.view.nbytes == kept.view.nbytes:
                self._there[operand.memory] = [*self._there[kept.memory]]

    def _whole(self, call: Call, calls: range) -> list[int]:
        """What is there when a run ends: not what an op may have written its output over."""
        made = [self.problem.calls[each] for each in calls]
        used = {value for each in made for value in (*each.reads, *each.makes)}
        there = dict[int, None]()
        for operand in call.present():
            over = operand.intent is Intent.READ and call.op in IN_PLACE
            if not over and operand.memory not in self._lasting:
                there |= dict.fromkeys(self._values(operand))
        return [value for value in there if value in used]
