"""Steps of a schedule that a device captures once, and then queues by one call.

What a replay does to the states of memories is what the steps would have done. Each step accesses what it uses when it
runs; where no memory's epoch has moved since, none of these accesses would change anything, and where some have, those
accesses are repeated, in order, before the replay.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from blobmem import memory as memory_package
from blobmem.devices import Device, Stream
from blobmem.devices.cuda.array import CudaArray
from blobmem.memory import Intent, SyncedMemory, View
from blobmem.memory.blob import moves
from blobmem.memory.slot import Slot
from blobmem.ops.call import Operand
from blobmem.ops.host.random import Draws

if TYPE_CHECKING:
    from blobmem.net.schedule import Step

log = logging.getLogger("blobmem")

LEAST = 4  # steps, of which fewer are as quick to queue one by one
_RUNS = 1  # before a capture: it may load and allocate
_MOST_RUNS = 64  # before another one, where captured steps do not stay good


def pieces(program: Sequence[Step], device: Device) -> list[Step | Captured]:
    """The steps of a program, runs of those that can be captured in one piece each."""
    result: list[Step | Captured] = []
    for run in _runs(program):
        if len(run) >= LEAST and device.graphs:
            result.append(Captured(run, device))
        else:
            result += run
    return result


def _runs(program: Iterable[Step]) -> Iterable[list[Step]]:
    run: list[Step] = []
    seen: dict[SyncedMemory, _Lying] = {}
    for step in program:
        turns = any(not seen[view.memory].allows(operand) for operand, view in _uses(step) if view.memory in seen)
        if run and (turns or not step.captures or not run[-1].captures):
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


class Captured:
    """Steps that run as one graph once they have run a few times."""

    __slots__ = (
        "_adding", "_device", "_epochs", "_graph", "_keepers", "_moved", "_moves", "_runs", "_scratch", "_slots",
        "_stream", "_told", "_varied", "_versions", "_wait", "_whole", "steps",
    )  # fmt: skip

    def __init__(self, steps: Sequence[Step], device: Device) -> None:
        self.steps = list(steps)
        self._device = device
        self._graph: Any = None
        self._runs, self._wait = 0, _RUNS

    def run(self, stream: Stream | None, scratch: SyncedMemory) -> None:
        """Run the steps, given this thread's stream and workspace."""
        if self._graph is not None:
            if self._holds(stream, scratch):
                self._tell()
                self._graph.launch()
                return
            self._graph, self._runs, self._wait = None, 0, min(2 * self._wait, _MOST_RUNS)
        if self._runs >= self._wait and not memory_package.debug and self._capture(stream, scratch):
            return
        self._runs += 1
        for step in self.steps:
            step.run(stream, scratch)

    # ---------------------------------------------------------------- capturing

    def _capture(self, stream: Stream | None, scratch: SyncedMemory) -> bool:
        """Capture the steps and run what was captured; False, with nothing done, if one has to run by itself first."""
        steps = [step for step in self.steps if not (step.once and step.is_done())]
        if any(step.once for step in steps) or not steps:
            return False
        for step in steps:
            step.prepare(stream, scratch)
        self._varied: list[tuple[Step, Any, list[Any]]] = []
        at = steps[0]

        def queue(graph: Any) -> None:
            nonlocal at
            for at in steps:
                if at.varies or any(isinstance(value, Draws) for value in at.attributes.values()):
                    told = graph.varied()
                    arguments = [_on(told, argument) for argument in at.arguments]
                    self._varied.append((at, told, arguments))
                    at.launch(arguments)
                else:
                    at.launch()

        try:
            graph = self._device.capture(queue)
        except Exception as error:  # any library's
            log.warning(
                "layer '%s' cannot be captured in a CUDA graph, and runs without: %s", at.call.layer_name, error
            )
            self._wait = 1 << 62
            for step in steps:
                step.launch()
            return True
        self._remember(steps, stream, scratch)
        self._graph = graph
        graph.launch()
        return True

    def _remember(self, steps: Sequence[Step], stream: Stream | None, scratch: SyncedMemory) -> None:
        """What the graph relies on."""
        keepers = {bound.keeper: None for step in steps for bound in step.order}
        keepers |= {step.room or scratch: None for step in steps if step.takes_scratch}
        self._keepers = list(keepers)
        self._versions = [keeper.version for keeper in keepers]
        adding = [step for step in steps if step.accumulators and not step.begins]
        self._adding = [(step, not step.attributes["accumulate"]) for step in adding]
        self._stream, self._moves = stream, moves()
        self._scratch = scratch if scratch in keepers else None
        self._told = [_state_of(step) for step, _, _ in self._varied]
        for _, told, _ in self._varied:
            told.again()
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

    def _holds(self, stream: Stream | None, scratch: SyncedMemory) -> bool:
        """Whether the graph does what the steps would do now; what they access is then accessed."""
        if stream is not self._stream or memory_package.debug:
            return False
        if self._scratch not in (None, scratch):
            return False
        if moves() != self._moves:
            if not all(step.is_done() if step.once else step.is_in_place() for step in self.steps):
                return False
            self._moves = moves()
        changed = self._changed()
        return not (changed or self._adding) or self._follow(changed, stream)

    def _follow(self, changed: set[SyncedMemory], stream: Stream | None) -> bool:
        """Repeat the accesses to memories whose epochs have moved, if all arrays are still where they were."""
        versions = zip(self._keepers, self._versions, strict=True)
        if any(keeper in changed and keeper.version != version for keeper, version in versions):
            return False
        if any(step.is_fresh() != fresh for step, fresh in self._adding):
            return False
        fresh = {step for step, is_fresh in self._adding if is_fresh}
        for step in self.steps:
            if step in fresh and step.refill():
                continue
            for bound in step.order:
                if bound.keeper in changed:
                    intent = Intent.OVERWRITE if step in fresh and bound.operand.accumulate else bound.operand.intent
                    bound.resolve(step.side, self._device, intent, stream)
            if step.takes_scratch and (room := step.room or self._scratch) in changed:
                step.access_scratch(room, stream)
        self._see()
        return True

    def _tell(self) -> None:
        """Let the graph have the numbers that steps would run with now."""
        for index, (step, told, arguments) in enumerate(self._varied):
            state = _state_of(step)
            if state != self._told[index]:
                self._told[index] = state
                told.again()
                step.launch(arguments)


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
