"""Updates: how the gradients of an iteration change the parameters, as a schedule of calls on the device.

One class per solver type says which op it is, how many history blobs each parameter has, and the op's attributes;
the rest (clipping, iter_size, multipliers, what a solverstate holds) is the same for all.
"""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from blobmem.devices import Device, Pages
from blobmem.dtypes import FIRST_SCALE, exact, is_half
from blobmem.errors import NetError
from blobmem.memory import SyncedMemory
from blobmem.memory.blob import Blob
from blobmem.net import Net, weights
from blobmem.net.begun import Begun
from blobmem.net.build import LearnableParam
from blobmem.net.needs import Need, secure
from blobmem.net.plan import state
from blobmem.net.schedule import Schedule
from blobmem.net.settled import Run
from blobmem.ops.call import Call, call, memories, overwrite, read, read_diff, write
from blobmem.ops.registry import table
from blobmem.solvers.masters import Master, make_master
from blobmem.solvers.policy import LearningRate
from blobmem.solvers.state import Slot, Slots

if TYPE_CHECKING:
    from blobmem.net.whole import Whole

REGULARIZATIONS = ("L1", "L2")


class Updater:
    """The update of all parameters of a train net that are learned.

    Class attributes:
        type: the name in a solver's `type`.
        op: the op; its operands are a parameter's gradient, data and history blobs.
        histories: number of history blobs of each parameter.

    Args:
        param: a SolverParameter.
        net: the train net.
        source: the file that `param` came from, for messages.

    Attributes:
        rate: the learning rate's policy.
        history: for each parameter of `net.learnable`, its history blobs, named LAYER/INDEX/history; nothing is
            allocated before the first update. Of halves they are float32.
        masters: for each of those that are halves what they are the roundings of, in float32; None for others.
        scaling: of a float16 net what `next_scale` has, in place of 1.

    Raises NetError for a wrong policy or a wrong field.
    """

    type: ClassVar[str] = ""
    op: ClassVar[str] = ""
    histories: ClassVar[int] = 1

    def __init__(self, param: Any, net: Net, source: str = "") -> None:
        self.param = param
        self.net = net
        self.source = source
        if param.regularization_type not in REGULARIZATIONS:
            raise self.error("regularization_type", " or ".join(REGULARIZATIONS))
        if param.iter_size < 1:
            raise self.error("iter_size", "1 or more")
        self.check()
        self.rate = LearningRate(param, source)
        self.history = [self._make_history(entry) for entry in net.learnable]
        self.masters = [
            make_master(entry.blob, f"{entry.layer}/{entry.index}") if is_half(entry.blob.dtype) else None
            for entry in net.learnable
        ]
        self.scaling: Blob | None = None
        if net.dtype == np.float16:
            self.scaling = Blob((4,), dtype=np.float32, device=self.device, name="loss scale")
        net.scale_losses(self.scaling)
        self._norm: _Norm | None = None
        self._left_out = _Count()
        self._placed: tuple[weakref.ref[Schedule], list[range]] | None = None
        self._compile()
        net.beside = weakref.WeakMethod(self.present_needs)
        net.updater = weakref.WeakMethod(self._calls_after)

    # ---------------------------------------------------------------- for subclasses to extend

    def check(self) -> None:
        """Raise `error` for a field that the type cannot work with."""

    def attributes(self, rate: float, scale: float, iteration: int) -> dict[str, Any]:
        """The op's keywords for all parameters, but for their `multipliers`; here those that all updates have.

        Args:
            rate: the iteration's learning rate, before any lr_mult.
            scale: what gradients are multiplied by first (clipping and iter_size).
            iteration: iterations that are behind.
        """
        return {
            "rate": rate,
            "decay": self.param.weight_decay,
            "regularization": self.param.regularization_type,
            "scale": scale,
        }

    def error(self, field: str, expected: str) -> NetError:
        """A NetError, to be raised, for a field of the solver."""
        where = f"{self.source}: " if self.source else ""
        value = getattr(self.param, field)
        given = f"'{value}'" if isinstance(value, str) else f"{value:g}"
        return NetError(f"{where}{field}: expected {expected}, got {given}")

    # ---------------------------------------------------------------- schedule

    @property
    def device(self) -> Device:
        """Where it computes: where the net does."""
        return self.net.device

    def _follow(self) -> None:
        """Be where the net has moved to, and what its parameters' multipliers make of the update."""
        if self._multipliers != self._present_multipliers():
            self._compile()
        if self._schedule.device is not self.device:
            for blob in self._own():
                blob.data_view.memory.move_to(self.device)
            self._norm = None
            self._compile()

    def _own(self) -> Iterator[Blob]:
        """All blobs of its own but the clipping's sum."""
        for _, own in self._owned():
            yield from own
        if self.scaling is not None:
            yield self.scaling

    def _owned(self) -> Iterator[tuple[LearnableParam, list[Blob]]]:
        """Each learnable parameter with its history and, behind that, what is beside it of a master, if any."""
        for entry, history, master in zip(self.net.learnable, self.history, self.masters, strict=True):
            yield entry, history if master is None else [*history, master.beside]

    def _make_history(self, entry: LearnableParam) -> list[Blob]:
        blob, name = entry.blob, f"{entry.layer}/{entry.index}/history"
        names = [name if slot == 0 else f"{name}{slot}" for slot in range(self.histories)]
        return [Blob(blob.shape, dtype=exact(blob.dtype), device=self.device, name=name) for name in names]

    def _compile(self) -> None:
        # a parameter with rate 0 stays as it is, unless a restored history still moves it
        self._entries = [
            (entry, own)
            for entry, own in self._owned()
            if entry.lr_mult != 0 or not all(is_untouched(blob) for blob in own[: self.histories])
        ]
        self._multipliers = self._present_multipliers()
        self._calls: list[Call] = []
        if self.scaling is not None:
            self._calls += self._checks(self.scaling)
        scaling = [] if self.scaling is None else [read(self.scaling)]
        attributes = self.attributes(1.0, 1.0, 0) | ({"scaled": True} if scaling else {})
        for entry, own in self._entries:
            operands = read_diff(entry.blob), write(entry.blob), *map(write, own), *scaling
            update = call(self.op, *operands, multipliers=(entry.lr_mult, entry.decay_mult), **attributes)
            update.layer_name = entry.layer
            self._calls.append(update)
        if self.scaling is not None:
            self._calls.append(call("next_scale", write(self.scaling)))
        self._schedule, self._brought, self._room = Schedule(self._calls, self.device), set[SyncedMemory](), 0
        if self.param.clip_gradients >= 0 and self._norm is None:
            self._norm = _Norm(self.net)

    def _bring(self) -> None:
        """Let what `run` runs bring what is evicted now (`plan.state`)."""
        evicted = self.net.brings if not self.net.updates_in_backward else set[SyncedMemory]()
        room = self.net.plan_bytes if evicted else 0
        if (evicted, room) == (self._brought, self._room):
            return
        arena = self.net.arena_memory()

        def bringing(calls: Sequence[Call]) -> Schedule:
            if arena is None or not evicted:
                return Schedule(calls, self.device)
            return state.alone(calls, arena, self.device, evicted, room)

        # of the updates, those that need not bring anything run as one, as ever
        order = {"find_bad": 0, self.op: 1, "next_scale": 2}
        calls = sorted(self._calls, key=lambda each: (order[str(each.op)], not evicted.isdisjoint(memories([each]))))
        self._schedule, self._brought, self._room = bringing(calls), evicted, room
        if self._norm is not None:
            self._norm.schedule = bringing(self._norm.calls)

    def _checks(self, scaling: Blob) -> list[Call]:
        """What finds out whether the step is to be left out."""
        by_dtype: dict[np.dtype, list[Blob]] = {}
        for entry, _ in self._entries:
            by_dtype.setdefault(entry.blob.dtype, []).append(entry.blob)
        return [call("find_bad", *map(read_diff, blobs), write(scaling)) for blobs in by_dtype.values()]

    def _present_multipliers(self) -> list[tuple[float, float]]:
        """Of all parameters; a script may change them."""
        return [(entry.lr_mult, entry.decay_mult) for entry in self.net.learnable]

    def place(self, early: bool = True) -> bool:
        """Let updates be part of backward, or with `early` false come after it; whether they are.

        They are not for a net that keeps its blobs, for a sum over batches, for clipping and in float16 (which need all
        gradients at once), or where somebody looks at gradients: debug_info, snapshot_diff, callbacks during backward.
        """
        self._settle()
        param, net = self.param, self.net
        early &= param.iter_size == 1 and param.clip_gradients < 0 and not (param.debug_info or param.snapshot_diff)
        early &= not (net.param.debug_info or net.watches_backward) and self.scaling is None
        placed = net.update_in_backward(self._present_calls if early else None)
        if placed and self._brought:
            self._bring()
        return placed

    def _settle(self) -> None:
        """Let masters begin with what somebody has written since the last update."""
        for master in self.masters:
            if master is not None:
                master.settle()

    def _calls_after(self) -> Sequence[Sequence[Call]]:
        """The calls of each schedule that `run` runs; none if `place` has made updates part of backward."""
        if self.net.updates_in_backward:
            return []
        self._follow()
        return [self._calls] if self._norm is None else [self._norm.calls, self._calls]

    def _present_calls(self) -> Sequence[Call]:
        self._follow()
        return self._calls

    def needs(self) -> list[Need]:
        """The capacity that `run` uses; none if `place` has made updates part of backward. Runs nothing."""
        if self.net.updates_in_backward:
            return []
        return [need for schedule in self._schedules() for need in schedule.all_needs()]

    def present_needs(self) -> list[Need]:
        """`needs`, for a plan that is being made: not to be kept, as arrays are about to move."""
        if self.net.updates_in_backward:
            return []
        return [need for schedule in self._schedules() for need in schedule.needs()]

    def missing(self) -> list[Need]:
        """Those of `needs` that may not be met."""
        return [] if self.net.updates_in_backward else self._missing()

    def _missing(self) -> list[Need]:
        return [need for schedule in self._schedules() for need in schedule.all_missing()]

    def _schedules(self) -> list[Schedule]:
        """What `run` runs."""
        self._follow()
        self._bring()
        return [self._schedule] if self._norm is None else [self._schedule, self._norm.schedule]

    def state_blobs(self) -> list[Blob]:
        """What updates keep on the device: history and what is beside parameters of masters (none is touched for
        lr_mult 0), the scale of losses and the clipping's sum."""
        blobs = [blob for _, own in self._entries for blob in own]
        blobs += [] if self.scaling is None else [self.scaling]
        return blobs if self._norm is None else [*blobs, self._norm.sum]

    def run(self, iteration: int) -> float:
        """Update the parameters from their gradients, which stay as they are; the learning rate that was used.

        Clipped first, on the sums over iter_size batches, then averaged, then regularized, as in Caffe. Raises
        OutOfDeviceMemory before anything has changed, SharedBlobError if other arrays have the gradients' bytes.
        """
        self._settle()
        secure(self._missing())
        gradients = (entry.blob.diff_view.memory for entry, _ in self._entries)
        self.net.group.check(self.net.identity, dict.fromkeys(gradients, False))
        if self._brought:
            self.net.vacate_arena()
        scale = self._clip() / self.param.iter_size
        rate = self.rate.advance(iteration)
        self._set_attributes(self._schedule, rate, scale, iteration)
        try:
            self._schedule.run()
        except BaseException:
            if self._brought:  # then each update has copies, which may fail
                self.net.warn_of_updates()
            raise
        return rate

    def whole_runs(self) -> list[Run]:
        """What the coming iteration will run, the net's part too, if it may be as the last one was (`repeat`).

        Nothing where it runs the net more than once, or looks at gradients.
        """
        if self.param.iter_size > 1 or self._norm is not None or self.param.debug_info:
            return []
        self._follow()
        runs = self.net.whole_runs()
        return runs if self.net.updates_in_backward or not runs else [*runs, Run(self._schedule)]

    def repeat(self, iteration: int, late: bool = False, whole: Whole | None = None) -> Begun:
        """An iteration as the last one was, all of it; its pass. Only where `net.settled` finds that it may.

        `whole` is all that as one graph, if there is one, for `late`. With `late` (where it `may_wait`) nobody has
        waited for the loss when this returns; where a bad value was found before the update, that is left out, and
        counted (`left_out`). Else raises what is raised on the way; the rate has only advanced if nothing is.
        """
        early = self.net.updates_in_backward
        schedule = self.net.compiled()[1] if early else self._schedule
        self._set_attributes(schedule, self.rate.at(iteration), 1.0, iteration, late)
        with self.device.running():
            begun = self.net.repeat(late) if whole is None else self.net.repeat_as_one(whole)
            if not early and whole is None:
                self._schedule.run(again=True)
        self.rate.advance(iteration)
        return begun

    @property
    def may_wait(self) -> bool:
        """Whether the device itself leaves an update out where it found a bad value before."""
        found = table(self.device.family).get(self.op)
        if self.scaling is not None or found is None or not _leaves_out(found.fn):
            return False
        return self._left_out.is_seen_by(self.device)

    def left_out(self) -> int | None:
        """How many of the last updates were left out since this was last asked, once all that is queued has ended.

        None, and nobody waits, if none can have been.
        """
        faults, count = self.device.faults, self._left_out
        if not faults.found and not count.has_moved:
            return None
        with faults.left():
            self.device.synchronize()
        return count.moved()

    def run_in_backward(self, iteration: int, before: Callable[[], float]) -> float:
        """Run the net backward with the updates in it, as `place` has said; `before` and result as for
        `Net.backward_and_update`. The rate does not advance."""
        updated = {id(entry) for entry, _ in self._entries}
        for entry in self.net.learnable:
            if id(entry) not in updated:  # and no update begins its gradient anew
                entry.blob.clear_diff()
        self._set_attributes(self.net.compiled()[1], self.rate.at(iteration), 1.0, iteration)
        return self.net.backward_and_update(before)

    def _set_attributes(
        self, schedule: Schedule, rate: float, scale: float, iteration: int, late: bool = False
    ) -> None:
        if self._placed is None or self._placed[0]() is not schedule:
            self._placed = weakref.ref(schedule), self._together(schedule.calls)
        attributes = self.attributes(rate, scale, iteration)
        if self.may_wait:
            attributes["unless_wrong"] = int(late)
        first = {"unless_wrong": self._left_out.address} if late else {}
        for calls in self._placed[1]:
            schedule.set_attributes(calls, attributes, first)
            first = {}

    def _together(self, calls: Sequence[Call]) -> list[range]:
        """Where updates stand together."""
        found: list[range] = []
        for at in (at for at, each in enumerate(calls) if each.op == self.op):
            if found and found[-1].stop == at:
                found[-1] = range(found[-1].start, at + 1)
            else:
                found.append(range(at, at + 1))
        return found

    def _clip(self) -> float:
        if self._norm is None:
            return 1.0
        norm, limit = self._norm.compute() / self.loss_scale, float(self.param.clip_gradients)
        return limit / norm if norm > limit else 1.0

    @property
    def loss_scale(self) -> float:
        """What gradients are times what they should be, in the coming iteration; 1 but for float16."""
        if self.scaling is None:
            return 1.0
        return self.scaling_state()[0] or FIRST_SCALE

    @property
    def steps_left_out(self) -> int:
        """How many updates were not made, as their gradients were infinite or no numbers."""
        return 0 if self.scaling is None else int(self.scaling_state()[3])

    # ---------------------------------------------------------------- files

    def scaling_state(self) -> list[float]:
        """What a snapshot keeps of the scale of losses; nothing but for float16."""
        if self.scaling is None:
            return []
        return [0.0] * 4 if is_untouched(self.scaling) else [float(value) for value in self.scaling.cpu_data()]

    def load_scaling(self, state: Sequence[float]) -> None:
        """Continue from what `scaling_state` gave; from the beginning, if that is nothing."""
        if self.scaling is not None:
            self.scaling.data[...] = state or 0

    def masters_of(self) -> dict[SyncedMemory, Master]:
        """The masters of parameters that are halves, by what these lie in."""
        pairs = zip(self.net.learnable, self.masters, strict=True)
        return {entry.blob.data_view.memory: master for entry, master in pairs if master is not None}

    def unrounded(self) -> dict[SyncedMemory, np.ndarray]:
        """The values of parameters that are halves before they were rounded, by what they lie in."""
        return {
            memory: master.values() for memory, master in self.masters_of().items() if not is_untouched(master.beside)
        }

    def load_weights(self, path: Any) -> None:
        """Copy a file's parameters, or a message's, to the net's and their masters (`net.weights.load`)."""
        weights.load(self.net, path, {memory: master.set for memory, master in self.masters_of().items()})

    def _in_file_order(self) -> list[tuple[LearnableParam, Blob]]:
        """All first history blobs, then all second ones, as Caffe writes them."""
        return [
            (entry, history[slot])
            for slot in range(self.histories)
            for entry, history in zip(self.net.learnable, self.history, strict=True)
        ]

    def slots(self) -> Slots:
        """What the history in a file has to be."""
        arrays = [
            Slot(f"parameter {entry.index} of layer '{entry.layer}'", blob.shape, blob.dtype)
            for entry, blob in self._in_file_order()
        ]
        return Slots(arrays, f"the {len(self.history)} parameters of {self.net.identity} under {self.type}")

    def arrays(self) -> list[np.ndarray]:
        """The history on the host, in a file's order."""
        return [
            # reading an untouched blob would allocate it
            np.zeros(blob.shape, blob.dtype) if is_untouched(blob) else blob.cpu_data()
            for _, blob in self._in_file_order()
        ]

    def load(self, current_step: int, arrays: Sequence[np.ndarray]) -> None:
        """Continue from a state's current step, and its history as `slots` says."""
        self._follow()
        self.rate.current_step = current_step
        for (_, blob), values in zip(self._in_file_order(), arrays, strict=True):
            if values.any():
                blob.data[...] = values
            else:
                blob.data_view.memory.clear(blob.data_view.offset, blob.data_view.nbytes)
        self._compile()


class _Count:
    """A number in page-locked memory of the host, to which a device adds."""

    def __init__(self) -> None:
        self._pages = Pages(8, 8)
        self._number = self._pages.bytes(0, 8).view(np.int64)
        self._known = 0
        self._device: Device | None = None
        self.address = self._number.ctypes.data

    def is_seen_by(self, device: Device) -> bool:
        """Whether the device can add to it."""
        if device is not self._device:
            self._device = device
            self._pages.pin(device, 8)
        return self._pages.pinned > 0

    @property
    def has_moved(self) -> bool:
        return int(self._number[0]) != self._known

    def moved(self) -> int:
        """By how much, since this was asked last."""
        known, self._known = self._known, int(self._number[0])
        return self._known - known


@functools.cache
def _leaves_out(op: Callable[..., None]) -> bool:
    return "unless_wrong" in inspect.signature(op).parameters


def is_untouched(blob: Blob) -> bool:
    """Whether a blob's data has not been written since it was made (or cleared); it reads zero."""
    view = blob.data_view
    return view.memory.is_zero(view.offset, view.nbytes)


class _Norm:
    """The L2 norm of all parameter gradients together, computed where they are; one number is read."""

    def __init__(self, net: Net) -> None:
        learned = [entry.blob for entry in net.learnable if entry.lr_mult != 0 or _has_gradient(net, entry)]
        self.sum = Blob((1,), dtype=np.float64, device=net.device, name="sum of squared gradients")
        self.calls = [call("fill", overwrite(self.sum), value=0.0)]
        self.calls += [call("sumsq", read_diff(blob), write(self.sum)) for blob in learned]
        self.schedule = Schedule(self.calls, net.device)

    def compute(self) -> float:
        self.schedule.run()
        return math.sqrt(float(self.sum.cpu_data()[0]))


def _has_gradient(net: Net, entry: LearnableParam) -> bool:
    """Whether backward computes the gradient although the solver does not use it (force_backward)."""
    layer = next(node.layer for node in net.nodes if node.layer.name == entry.layer)
    return layer.param_grads[entry.index]
