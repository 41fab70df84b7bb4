"""Steps of a schedule that a device captures once, and then queues by one call.

What a replay does to the states of memories is what the steps would have done. Each step accesses what it uses when it
runs; where no memory's epoch has moved since, none of these accesses would change anything, and where some have, those
accesses are repeated, in order, before the replay.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from blobmem import memory as memory_package
from blobmem.devices import Device, Stream
from blobmem.devices.cuda.array import CudaArray
from blobmem.memory import Intent, SyncedMemory, View
from blobmem.memory.blob import moves
from blobmem.memory.slot import Slot
from blobmem.net.lanes import Lanes
from blobmem.ops.call import Operand
from blobmem.ops.host.random import Draws

if TYPE_CHECKING:
    from blobmem.net.schedule import Step

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
            result.append(Lanes(run, device))
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
        turns = any(not seen[view.memory].allows(operand) for operand, view in _uses(step) if view.memory in seen)
        if run and (turns or step.eager or run[-1].eager):
            yield run
            run, seen = [], {}
        run.append(step)
        for operand, view in _uses(step):
            seen.setdefault(view.memory, _Lying(operand.form, set())).places.add((view.offset, view.nbytes))
    if run:
        yield run


def _uses(step: Step) -> list[tuple[Operand, View]]:
    return [(bound.operand, bound.operand.view) for bound in step.order]


class _Lying(NamedTuple):
    """How the steps of a run have a memory: in which order, and which of its bytes."""

    form: Any
    places: set[tuple[int, int]]

    def allows(self, operand: Operand) -> bool:
        """Whether another access turns nothing: accesses for a run come before it, so that none may bring an array into
        another order than an earlier step leaves or finds it."""
        view = operand.view
        apart = operand.form is None or operand.intent is Intent.OVERWRITE
        return operand.form == self.form and (apart or (view.offset, view.nbytes) in self.places)


class _Graph(NamedTuple):
    """What was captured of the steps, as they run where some of what they add to is fresh (zero, and overwritten).

    Attributes:
        native: the device's graph.
        fresh: of each step that adds, whether it overwrites instead.
        varied: the steps whose numbers are others at each launch, what stands for the device to them, their arguments.
        told: what the numbers of each of these were a function of at the last launch.
    """

    native: Any
    fresh: list[bool]
    varied: list[tuple[Step, Any, list[Any]]]
    told: list[Any]

    def launch(self) -> None:
        """Queue it, with the numbers that steps would run with now."""
        for index, (step, told, arguments) in enumerate(self.varied):
            state = _state_of(step)
            if state != self.told[index]:
                self.told[index] = state
                told.again()
                step.launch(arguments)
        self.native.launch()


class Captured:
    """Steps that run as one graph once they have run a few times.

    There is a graph for each pattern of what is fresh among the gradients that they add to: a sum over batches has two.

    Attributes:
        steps: all of them.
        refused: why they cannot be captured, once that has been tried; "" if they can, for all that is known.
    """

    __slots__ = (
        "_adding",
        "_device",
        "_epochs",
        "_graphs",
        "_keepers",
        "_lanes",
        "_last",
        "_moved",
        "_moves",
        "_places",
        "_runs",
        "_scratch",
        "_slots",
        "_stream",
        "_taken",
        "_versions",
        "_wait",
        "_whole",
        "refused",
        "steps",
    )  # fmt: skip

    def __init__(self, steps: Sequence[Step], device: Device) -> None:
        self.steps, self.refused = list(steps), ""
        self._device, self._lanes = device, Lanes(steps, device)
        self._adding = [step for step in steps if step.accumulators and not step.begins and not step.once]
        self._graphs: dict[tuple[bool, ...], _Graph] = {}
        self._runs: Counter[tuple[bool, ...]] = Counter()  # one by one, since there was no graph
        self._wait = _RUNS

    def run(self, stream: Stream | None, scratch: Sequence[SyncedMemory]) -> None:
        """Run the steps, given this thread's stream and workspaces."""
        before = tuple(step.is_fresh() for step in self._adding)
        changed = self._changed() if self._graphs else set()
        if self._graphs and not self._hold(changed, stream, scratch):
            self._graphs.clear()
            self._begin_anew()
        graph = self._graphs.get(before)
        if graph is not None:
            if self._follow(graph, changed, stream, scratch):
                graph.launch()
            else:
                self._graphs.clear()
                self._begin_anew()
                for step in self._taken:  # which have accessed what they use
                    step.renew()
                    step.launch()
            return
        ripe = self._runs[before] >= self._wait and not memory_package.debug
        if not (ripe and self._capture(before, stream, scratch)):
            self._lanes.run(stream, scratch)
            self._runs[before] += 1

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
        if any(step.once for step in steps) or not steps:
            return False
        for step in steps:
            step.prepare(stream, scratch)
        varied: list[tuple[Step, Any, list[Any]]] = []
        at = steps[0]

        def queue(graph: Any) -> None:
            def one(step: Step) -> None:
                nonlocal at
                at = step
                if step.varies or any(isinstance(value, Draws) for value in step.attributes.values()):
                    told = graph.varied()
                    arguments = [_on(told, argument) for argument in step.arguments]
                    varied.append((step, told, arguments))
                    step.launch(arguments)
                else:
                    step.launch()

            self._lanes.each(steps, one)

        try:
            native = self._device.capture(queue)
        except Exception as error:  # any library's
            log.warning(
                "layer '%s' cannot be captured in a CUDA graph, and runs without: %s", at.call.layer_name, error
            )
            self._graphs.clear()
            self._wait, self.refused = 1 << 62, f"layer '{at.call.layer_name}': {error}"
            for step in steps:
                step.launch()
            return True
        if self._graphs and not self._hold(self._changed(), stream, scratch):  # what was just accessed has moved
            self._graphs.clear()
        elif len(self._graphs) == _MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
            self._begin_anew()
        self._remember(steps, stream, scratch)
        fresh = [not step.attributes["accumulate"] for step in self._adding]
        self._graphs[before] = graph = _Graph(native, fresh, varied, [_state_of(step) for step, _, _ in varied])
        graph.launch()
        return True

    def _remember(self, steps: Sequence[Step], stream: Stream | None, scratch: Sequence[SyncedMemory]) -> None:
        """What the graphs rely on."""
        self._taken = steps
        # steps are in other runs, too, which follow their operands: what was here is remembered here
        self._places = [_Place(bound) for step in steps for bound in step.order]
        self._last = [place for place in self._places if place.bound.operand.form is not None]
        keepers = {bound.keeper: None for step in steps for bound in step.order}
        keepers |= {step.room or scratch[step.lane]: None for step in steps if step.takes_scratch}
        self._keepers = list(keepers)
        self._versions = [keeper.version for keeper in keepers]
        self._stream, self._moves = stream, moves()
        self._scratch = scratch if any(workspace in keepers for workspace in scratch) else None
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

    def _hold(self, changed: set[SyncedMemory], stream: Stream | None, scratch: Sequence[SyncedMemory]) -> bool:
        """Whether all that the graphs use is where it was; `changed` are those of it whose epochs have moved."""
        if stream is not self._stream or memory_package.debug:
            return False
        if self._scratch not in (None, scratch):
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
        self, graph: _Graph, changed: set[SyncedMemory], stream: Stream | None, scratch: Sequence[SyncedMemory]
    ) -> bool:
        """Repeat the accesses of the steps to what has changed; whether arrays are where the graph has them."""
        for step, fresh in zip(self._adding, graph.fresh, strict=True):
            step.attributes["accumulate"] = not fresh
        if not changed:
            return True
        begun = {step for step, fresh in zip(self._adding, graph.fresh, strict=True) if fresh}
        for step in self._taken:
            refilled = step in begun and step.refill()
            for bound in step.order:
                if bound.keeper in changed and not (refilled and bound.operand.accumulate):
                    intent = Intent.OVERWRITE if step in begun and bound.operand.accumulate else bound.operand.intent
                    bound.resolve(step.side, self._device, intent, stream)
            if step.takes_scratch and (room := step.room or scratch[step.lane]) in changed:
                step.access_scratch(room, stream)
        self._see()
        return all(place.address == place.bound.array.address for place in self._last)


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
