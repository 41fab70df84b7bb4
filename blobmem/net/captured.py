"""Steps of a schedule that a device captures once, and then queues by one call.

What a replay does to the states of memories is what the steps would have done. Each step accesses what it uses when it
runs; where no memory's epoch has moved since, none of these accesses would change anything, and where some have, those
accesses are repeated, in order, before the replay.

An access may turn an array over, to channels last or back. What the steps before one of them leave is turned within the
graph, if it is all that they leave there: the same then happens in every run. What comes from outside is turned before.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from blobmem import memory as memory_package
from blobmem.devices import Device, Stream
from blobmem.devices.cuda.array import CudaArray
from blobmem.memory import Intent, SyncedMemory, View
from blobmem.memory.blob import moves
from blobmem.memory.parked import Parked
from blobmem.memory.reordered import turned_later
from blobmem.memory.slot import Slot
from blobmem.net.lanes import OUT, Lanes, in_turn, launch, make, prepare
from blobmem.ops.call import Operand
from blobmem.ops.host.random import Draws

if TYPE_CHECKING:
    from blobmem.net.steps import Step

log = logging.getLogger("blobmem")

LEAST = 4  # steps, of which fewer are as quick to queue one by one
_RUNS = 1  # before a capture: it may load and allocate
_MOST_RUNS = 64  # before another one, where captured steps do not stay good
_MOST_GRAPHS = 2  # of the same steps


def pieces(program: Sequence[Step], device: Device) -> list[Step | Captured | Lanes]:
    """The steps of a program, runs of those that can be captured, or be queued on two streams, in one piece each."""
    result: list[Step | Captured | Lanes] = []
    for run in _runs(program):
        if len(run) >= LEAST and device.graphs and not run[0].eager:
            result.append(Captured(run, device))
        elif any(step.lane for step in run) and not run[0].eager:
            result.append(Lanes(run, device, _turned_within))
        else:
            result += run
    return result


def why_eager(found: Iterable[Step | Captured | Lanes], device: Device) -> dict[Step, str]:
    """Of each step in such pieces, why it is queued by itself in every run; "" where it becomes part of a graph."""
    reasons: dict[Step, str] = {}
    alone = "too few calls in a row for a graph" if device.graphs else "the device captures nothing"
    for piece in found:
        if isinstance(piece, Captured):
            reasons |= dict.fromkeys(piece.steps, piece.refused)
        elif isinstance(piece, Lanes):
            reasons |= dict.fromkeys(piece.steps, alone)
        else:
            reasons[piece] = piece.eager or alone
    return reasons


def _runs(program: Iterable[Step]) -> Iterable[list[Step]]:
    run: list[Step] = []
    seen: dict[SyncedMemory, _Lying] = {}
    for step in program:
        if run and (step.eager or run[-1].eager or not _allow(seen, step)):
            yield run
            run, seen = [], {}
        run.append(step)
        _add(seen, step)
    if run:
        yield run


def _allow(seen: dict[SyncedMemory, _Lying], step: Step) -> bool:
    """Whether a graph of steps that have `seen` memories so may have this one, too."""
    uses = [(bound.operand, bound.operand.view) for bound in step.order]
    return all(seen[view.memory].allows(operand, view) for operand, view in uses if view.memory in seen)


def _add(seen: dict[SyncedMemory, _Lying], step: Step) -> None:
    for bound in step.order:
        operand, view = bound.operand, bound.operand.view
        seen.setdefault(view.memory, _Lying(operand)).add(operand, view)


def _turned_within(steps: Iterable[Step]) -> list[set[SyncedMemory]] | None:
    """For each step the memories whose bytes the graph turns before it; None if the steps are none for one graph."""
    seen: dict[SyncedMemory, _Lying] = {}
    result = []
    for step in steps:
        if not _allow(seen, step):
            return None
        result.append({memory for bound in step.order if (memory := bound.operand.memory) in seen})
        _add(seen, step)
    turned = {memory for memory, lying in seen.items() if lying.turned}
    return [memories & turned for memories in result]


class _Lying:
    """How the steps of a run have a memory: in which order, and which of its bytes.

    Attributes:
        replaced: all that they use of it, if the first of them replaced that.
        turned: they have it in more than one order, or parts of it that may each have to be turned as they come.
    """

    __slots__ = ("_known", "_order", "_written", "replaced", "turned")

    def __init__(self, first: Operand) -> None:
        view = first.view
        self._order, self.turned, self._written = _order(first), False, False
        self._known = place = view.offset, view.offset + view.nbytes  # what is there in that order for sure
        self.replaced = place if first.intent is Intent.OVERWRITE else None

    def allows(self, operand: Operand, view: View) -> bool:
        """Whether a graph may have another access: what it turns, if anything, has been left by an earlier one, or is
        only read."""
        place, writes = (view.offset, view.offset + view.nbytes), operand.intent is not Intent.READ
        if place == self.replaced or not (self._written or writes):
            return True
        apart = operand.form is None or operand.intent is Intent.OVERWRITE
        return _order(operand) == self._order and not self.turned and (apart or self._knows(place))

    def add(self, operand: Operand, view: View) -> None:
        place, overwrites = (view.offset, view.offset + view.nbytes), operand.intent is Intent.OVERWRITE
        ordered, known = operand.form is not None, self._knows(place)
        self.turned |= _order(operand) != self._order or (ordered and not known and not overwrites)
        self._written |= operand.intent is not Intent.READ
        if not known or (overwrites and place[0] == self._known[0]):  # as `Reordered.access` knows it
            follows = overwrites and place[0] == self._known[1]
            self._known = (self._known[0] if follows else place[0]), place[1]
        if place != self.replaced:
            self.replaced = None

    def _knows(self, place: tuple[int, int]) -> bool:
        return self._known[0] <= place[0] and place[1] <= self._known[1]


def _order(operand: Operand) -> Any:
    """In which order an operand has its bytes: in one, whatever the number of images."""
    return None if operand.form is None else operand.form[1:]


class Varied:
    """The steps of a graph whose numbers are others at each launch, what takes records (`Op.before`) among them."""

    def __init__(self) -> None:
        self._feeding: list[tuple[Step, Any, list[Any]]] = []  # as the others, told each time
        # each with what stands for the device to it, its arguments, and what its numbers were last a function of
        self._steps: list[list[Any]] = []

    def queue(self, step: Step, graph: Any) -> None:
        """Queue a step in a graph that is being made."""
        feeds = step.before is not None
        if not (feeds or step.varies or any(isinstance(value, Draws) for value in step.attributes.values())):
            step.launch_in(graph)
            return
        told = graph.varied()
        arguments = [_on(told, argument) for argument in step.arguments]
        if feeds:
            self._feeding.append((step, told, arguments))
            step.launch(arguments, begun=-1)
        else:
            self._steps.append([step, told, arguments, _state_of(step)])
            step.launch(arguments)

    def tell(self) -> None:
        """Have the graph's next launch use the numbers that the steps would run with now."""
        for varied in self._steps:
            step, told, arguments, before = varied
            state = _state_of(step)
            if state != before:
                varied[3] = None  # if it is interrupted, the graph has neither
                told.again()
                step.launch(arguments)
                varied[3] = state
        for step, told, arguments in self._feeding:
            begun = step.launch(fn=step.before)
            if told.again(begun):
                step.launch(arguments, begun=begun)


class _Graph(NamedTuple):
    """What was captured of the steps, as they run where some of what they add to is fresh (zero, and overwritten).

    Attributes:
        native: the device's graph.
        fresh: of each step that adds, whether it overwrites instead.
        turned: of each step, what is turned over before it.
        begun: of each memory with a sum that it overwrites, where that is; None if others lie there, too.
        varied: the steps whose numbers are others at each launch.
        taking: what it copies bytes of the device to.
    """

    native: Any
    fresh: list[bool]
    turned: list[list[Any]]
    begun: dict[SyncedMemory, tuple[int, int]] | None
    varied: Varied
    taking: list[Parked]

    def launch(self) -> None:
        """Queue it, with the numbers that steps would run with now."""
        self.varied.tell()
        for home in self.taking:
            home.holds = False  # should this fail
        self.native.launch()
        for home in self.taking:
            home.holds = True


class Captured:
    """Steps that run as one graph once they have run a few times.

    There is a graph for each pattern of what is fresh among the gradients that they add to: a sum over batches has two.

    Attributes:
        steps: all of them.
        refused: why they cannot be captured, once that has been tried; "" if they can, for all that is known.
    """

    __slots__ = (
        "_adding",
        "_again",
        "_device",
        "_epochs",
        "_expected",
        "_graphs",
        "_keepers",
        "_lanes",
        "_last",
        "_launched",
        "_moved",
        "_moves",
        "_places",
        "_runs",
        "_scratch",
        "_slots",
        "_stream",
        "_sums",
        "_taken",
        "_together",
        "_turned",
        "_uses",
        "_versions",
        "_wait",
        "_whole",
        "refused",
        "steps",
    )  # fmt: skip

    def __init__(self, steps: Sequence[Step], device: Device) -> None:
        self.steps, self.refused = list(steps), ""
        self._device, self._lanes = device, Lanes(steps, device, _turned_within)
        self._adding = [step for step in steps if step.accumulators and not step.begins and not step.once]
        self._graphs: dict[tuple[bool, ...], _Graph] = {}
        self._runs: Counter[tuple[bool, ...]] = Counter()  # one by one, since there was no graph
        self._wait = _RUNS
        self._again: _Graph | None = None  # what was launched last, if nothing else has run since
        self._launched: tuple[_Graph, list[Any]] | None = None  # by the last run, if no more, and turned before it

    def run(self, stream: Stream | None, scratch: Sequence[SyncedMemory]) -> None:
        """Run the steps, given this thread's stream and workspaces."""
        if self._again is not None and self._is_as_left(self._again, stream, scratch):
            self._launched = self._again, []
            self._again.launch()
            return
        self._again = self._launched = None
        before = tuple(step.is_fresh() for step in self._adding)
        changed = self._changed() if self._graphs else set()
        if self._graphs and not self._hold(changed, stream, scratch):
            self._graphs.clear()
            self._begin_anew()
        graph = self._graphs.get(before)
        if graph is not None:
            at_once: list[Any] = []
            turned = self._follow(graph, changed, stream, at_once)
            if turned is None:
                graph.launch()
                self._leave(graph)
                self._launched = graph, at_once
            else:
                self._graphs.clear()
                self._begin_anew()
                for step in self._taken:  # which have accessed what they use
                    step.renew()
                in_turn(self._taken, turned, launch)
            return
        ripe = self._runs[before] >= self._wait and not memory_package.debug
        if not (ripe and self._capture(before, stream, scratch)):
            self._lanes.run(stream, scratch)
            self._runs[before] += 1

    @property
    def repeats(self) -> bool:
        """Whether `run_again` would do what the last run did."""
        return self._launched is not None

    def run_again(self) -> None:
        """Queue what the last run did, where every access would find all as that one left it."""
        assert self._launched is not None
        graph, turns = self._launched
        make(turns)
        graph.launch()

    @property
    def ran(self) -> Any:
        """What the last run was: as long as this is the same, `queue` queues the same."""
        assert self._launched is not None
        graph, turns = self._launched
        return graph.native, turns

    def queue(self, one: Callable[[Step], None]) -> None:
        """Have each step of the last run queued by `one`, in place of the graph."""
        assert self._launched is not None
        graph, turns = self._launched
        self._tell(graph)
        make(turns)
        self._lanes.each(self._taken, graph.turned, one)

    @property
    def graphs(self) -> list[Any]:
        """The device's graphs that there are now."""
        return [graph.native for graph in self._graphs.values()]

    def _begin_anew(self) -> None:
        self._runs.clear()
        self._wait = min(2 * self._wait, _MOST_RUNS)

    # ---------------------------------------------------------------- capturing

    def _capture(self, before: tuple[bool, ...], stream: Stream | None, scratch: Sequence[SyncedMemory]) -> bool:
        """Capture the steps and run what was captured; False, with nothing done, if one has to run by itself first."""
        steps = [step for step in self.steps if not (step.once and step.is_done())]
        within = _turned_within(steps)
        if any(step.once for step in steps) or not steps or within is None:
            return False
        turned = prepare(steps, within, stream, scratch)
        varied, at = Varied(), steps[0]

        def queue(graph: Any) -> None:
            def one(step: Step) -> None:
                nonlocal at
                at = step
                varied.queue(step, graph)

            self._lanes.each(steps, turned, one)

        try:
            native = self._device.capture(queue)
        except Exception as error:  # any library's
            log.warning(
                "layer '%s' cannot be captured in a CUDA graph, and runs without: %s", at.call.layer_name, error
            )
            self._graphs.clear()
            self._wait, self.refused = 1 << 62, f"layer '{at.call.layer_name}': {error}"
            in_turn(steps, turned, launch)
            return True
        if self._graphs and not self._hold(self._changed(), stream, scratch):  # what was just accessed has moved
            self._graphs.clear()
        elif len(self._graphs) == _MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
            self._begin_anew()
        self._remember(steps, within, stream, scratch)
        fresh = [not step.attributes["accumulate"] for step in self._adding]
        taking = [step.home for step in steps if isinstance(step.home, Parked) and step.copies == OUT]
        self._graphs[before] = graph = _Graph(native, fresh, turned, self._begun(fresh), varied, taking)
        graph.launch()
        self._leave(graph)
        return True

    def _begun(self, fresh: Iterable[bool]) -> dict[SyncedMemory, tuple[int, int]] | None:
        """See _Graph."""
        result = {}
        for step, begins in zip(self._adding, fresh, strict=True):
            for bound in step.accumulators:
                if isinstance(bound.keeper, Slot):
                    return None
                if begins:
                    if self._taken[self._uses[bound.keeper][0][0]] is not step:
                        return None
                    result[bound.keeper] = bound.view.offset, bound.view.nbytes
        return result

    def _remember(
        self,
        steps: Sequence[Step],
        turned: list[set[SyncedMemory]],
        stream: Stream | None,
        scratch: Sequence[SyncedMemory],
    ) -> None:
        """What the graphs rely on."""
        self._taken, self._turned = steps, turned
        # the accesses to each keeper: numbers of the step and, in its order, the operand; what is beside comes last
        self._uses: dict[SyncedMemory, list[tuple[int, int]]] = {}
        for number, step in enumerate(steps):
            found = [*(bound.keeper for bound in step.order), *step.beside(scratch)]
            for at, keeper in enumerate(found):
                self._uses.setdefault(keeper, []).append((number, at))
        within = set[SyncedMemory]().union(*turned)
        bounds = (bound for step in steps for bound in step.order if bound.view.memory in within)
        self._together = {keeper for bound in bounds for keeper in (bound.keeper, bound.view.memory)}
        # steps are in other runs, too, which follow their operands: what was here is remembered here
        self._places = [_Place(bound) for step in steps for bound in step.order]
        self._last = [place for place in self._places if place.bound.operand.form is not None]
        keepers = self._keepers = list(self._uses)
        self._versions = [keeper.version for keeper in keepers]
        self._stream, self._moves = stream, moves()
        self._scratch = scratch if any(workspace in self._uses for workspace in scratch) else None
        # slots are many, and have the epoch of their arena, which is looked at once
        slots = [keeper for keeper in keepers if isinstance(keeper, Slot)]
        whole = dict.fromkeys(keeper.place.memory if isinstance(keeper, Slot) else keeper for keeper in keepers)
        self._slots, self._whole = slots, list(whole)
        self._see()

    def _see(self) -> None:
        self._epochs = [memory.epoch for memory in self._whole]
        self._moved = [slot.moved for slot in self._slots]

    def _changed(self) -> set[SyncedMemory]:
        """The keepers whose epochs have moved since they were last seen."""
        whole = {memory for memory, epoch in zip(self._whole, self._epochs, strict=True) if memory.epoch != epoch}
        changed = {slot for slot, moved in zip(self._slots, self._moved, strict=True) if slot.moved != moved}
        return whole | changed | {slot for slot in self._slots if whole and slot.place.memory in whole}

    # ---------------------------------------------------------------- replaying

    def _leave(self, graph: _Graph) -> None:
        """Remember how all is once a graph is launched: mostly nothing happens then but that sums are cleared."""
        begun = graph.begun
        if begun is not None:
            self._again = graph
            self._sums = [(memory, memory.epoch, *place) for memory, place in begun.items()]
            self._expected = [memory.epoch + (memory in begun) for memory in self._whole]

    def _is_as_left(self, graph: _Graph, stream: Stream | None, scratch: Sequence[SyncedMemory]) -> bool:
        """Whether the graph is what to launch, and no access needs to be repeated; it is then as if all had been."""
        if not self._is_for(stream, scratch) or moves() != self._moves:
            return False
        if [memory.epoch for memory in self._whole] != self._expected:
            return False
        if [slot.moved for slot in self._slots] != self._moved:
            return False
        if not all(memory.is_cleared_since(*place) for memory, *place in self._sums):
            return False
        for memory, *place in self._sums:
            memory.refill(*place)
        self._tell(graph)
        return True

    def _tell(self, graph: _Graph) -> None:
        """Let steps that add know whether they overwrite in the graph."""
        for step, fresh in zip(self._adding, graph.fresh, strict=True):
            step.attributes["accumulate"] = not fresh

    def _is_for(self, stream: Stream | None, scratch: Sequence[SyncedMemory]) -> bool:
        """Whether the graphs are of this stream and workspace, and may be used."""
        return stream is self._stream and self._scratch in (None, scratch) and not memory_package.debug

    def _hold(self, changed: set[SyncedMemory], stream: Stream | None, scratch: Sequence[SyncedMemory]) -> bool:
        """Whether all that the graphs use is where it was; `changed` are those of it whose epochs have moved."""
        if not self._is_for(stream, scratch):
            return False
        if moves() != self._moves:
            if not all(step.is_done() for step in self.steps if step.once):
                return False
            if not all(place.is_kept() for place in self._places):
                return False
            self._moves = moves()
        if not changed:
            return True
        versions = zip(self._keepers, self._versions, strict=True)
        if any(keeper in changed and keeper.version != version for keeper, version in versions):
            return False
        return all(place.is_kept() for place in self._last if place.keeper in changed)

    def _follow(
        self, graph: _Graph, changed: set[SyncedMemory], stream: Stream | None, at_once: list[Any]
    ) -> Sequence[list[Any]] | None:
        """Repeat the accesses of the steps to what has changed; what is turned outside of the graph goes to `at_once`.

        None if arrays are where the graph has them, and are turned as it does that; else what to turn before each step.
        """
        self._tell(graph)
        if not changed:
            return None
        begun = {step for step, fresh in zip(self._adding, graph.fresh, strict=True) if fresh}
        turned: Sequence[list[Any]] = graph.turned
        if not changed.isdisjoint(self._together):
            changed |= self._together
            turned = [[] for _ in self._taken]
        refilled: dict[Step, bool] = {}
        for number, at in sorted({use for keeper in changed for use in self._uses.get(keeper, ())}):
            step = self._taken[number]
            if at == len(step.order):
                step.access_beside(self._scratch, stream)
                continue
            bound, begins = step.order[at], False
            if step in begun:
                if step not in refilled:
                    refilled[step] = step.refill()
                begins = bound.operand.accumulate
            if not (begins and refilled[step]):
                with turned_later(self._turned[number], at_once) as turns:
                    bound.resolve(step.side, self._device, Intent.OVERWRITE if begins else bound.operand.intent, stream)
                turned[number].extend(turns)
        self._see()
        kept = all(place.address == place.bound.array.address for place in self._last)
        return None if kept and turned == graph.turned else turned


class _Place:
    """Where an operand was when it was captured."""

    __slots__ = ("address", "bound", "keeper", "memory", "nbytes", "offset")

    def __init__(self, bound: Any) -> None:
        view = bound.operand.view
        self.bound, self.keeper, self.address = bound, bound.keeper, bound.array.address
        self.memory, self.offset, self.nbytes = view.memory, view.offset, view.nbytes

    def is_kept(self) -> bool:
        """Whether its bytes are where they were, for the step too, which may have run elsewhere since."""
        operand = self.bound.operand
        for view in (operand.view, self.bound.view):
            if view.memory is not self.memory or (view.offset, view.nbytes) != (self.offset, self.nbytes):
                return False
        reordered = self.memory.reordered
        return operand.form is None or (reordered is not None and reordered.array is self.keeper)


def _on(device: Any, argument: Any) -> Any:
    if not isinstance(argument, CudaArray):
        return argument
    return CudaArray(argument.address, argument.shape, argument.dtype, device)


def _state_of(step: Step) -> Any:
    """What the numbers of a step depend on."""
    return [
        value.state.iteration if isinstance(value, Draws) else value
        for name, value in step.attributes.items()
        if name not in ("ws", "accumulate")
    ]
