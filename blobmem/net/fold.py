"""A pass over the calls of a net that only runs forward: batch norm folded into weights.

Where a BatchNorm with running statistics, and a Scale behind it, follow a convolution or an inner product that nobody
else reads, they multiply and shift its outputs, channel by channel, by numbers that stay the same: so do other weights
and another bias. These are arrays of the net's own, made on the host of the parameters, which stay as they are, and
made anew before the next pass where somebody has written a parameter. Results are the same to rounding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

from blobmem.devices import Device
from blobmem.memory import Intent, SyncedMemory
from blobmem.memory.blob import Blob, moves
from blobmem.net.layouts import channels_last
from blobmem.net.needs import secure
from blobmem.net.plan.uses import lie_alike
from blobmem.net.schedule import Schedule
from blobmem.ops.call import Call, Operand, call, memories, overwrite, read

ArrayLike = Callable[[Call, str, tuple[int, ...]], Blob]
"""array_like(maker, purpose, shape) gives an array of the layer that emitted a call."""


class Folded(NamedTuple):
    """A net's calls with batch norm folded into weights.

    Attributes:
        calls: in the order in which they run.
        makers: what makes the weights and biases, on the host.
        layers: first and last of the layers that run as one, by position.
        absent: memories of tops that are never made.
    """

    calls: list[Call]
    makers: list[Call]
    layers: list[tuple[int, int]]
    absent: list[SyncedMemory]

    def divides(self, first: int, last: int) -> bool:
        """Whether a run of layers first to last would be of some layers that run as one, but not of all of them."""
        return any(
            first <= end and begin <= last and not (first <= begin and end <= last) for begin, end in self.layers
        )


def fold(
    calls: Sequence[Call],
    params: Container[SyncedMemory],
    array_like: ArrayLike,
    free: Container[SyncedMemory] = (),
    images_last: bool = False,
) -> Folded | None:
    """The calls of a pass forward with batch norm folded into weights; None if there is none that can be.

    Args:
        calls: of the pass.
        params: the memories of parameters.
        array_like: makes arrays for the weights and biases.
        free: memories that nobody reads but these calls, and that need not be filled.
        images_last: they will run with images channels last. Weights are then kept as a convolution wants them there.
    """
    seen = _Seen(calls, params, free)
    last = channels_last(calls) if images_last else calls
    folded = Folded([], [], [], [])
    at = 0
    while at < len(calls):
        run = _run_at(calls, at, seen)
        if run is None:
            folded.calls.append(calls[at])
            at += 1
            continue
        maker, made = run.calls(array_like, turned=last[at].attributes.get("layout", "NCHW") != "NCHW")
        folded.makers.append(maker)
        folded.calls.append(made)
        folded.layers.append((calls[at].layer, calls[at + run.length - 1].layer))
        folded.absent.extend(run.absent)
        at += run.length
    return folded if folded.makers else None


class _Seen:
    """Who uses which memories."""

    def __init__(self, calls: Sequence[Call], params: Container[SyncedMemory], free: Container[SyncedMemory]) -> None:
        self._params, self._free = params, free
        self._written = {memory for each in calls for memory in each.written_memories()}
        self._users: dict[SyncedMemory, list[int]] = {}
        for at, each in enumerate(calls):
            for memory in dict.fromkeys(memories([each])):
                self._users.setdefault(memory, []).append(at)

    def are_params(self, operands: Sequence[Operand | None]) -> bool:
        """Whether these are parameters, which nobody writes meanwhile."""
        found = (operand.memory for operand in operands if operand is not None)
        return all(memory in self._params and memory not in self._written for memory in found)

    def may_be_absent(self, memory: SyncedMemory, first: int, stop: int) -> bool:
        """Whether nobody misses the memory where calls first to before stop do not fill it."""
        return memory in self._free and all(first <= at < stop for at in self._users[memory])


class _Run(NamedTuple):
    """Calls that run as one: a convolution or an inner product, a batch norm and perhaps a scale.

    Attributes:
        length: how many.
        given: what the weights and the bias are made of: w, b, mean, variance, factor, gamma, beta.
        top: what the last of them writes.
        absent: memories that they write and the one will not.
    """

    first: Call
    length: int
    eps: float
    given: list[Operand | None]
    top: Operand
    absent: list[SyncedMemory]

    def calls(self, array_like: ArrayLike, turned: bool) -> tuple[Call, Call]:
        """What makes the weights, and what runs."""
        x, w, _, y = self.first.operands
        assert w is not None and y is not None
        turned = turned and w.blob.shape[1] > 1 and math.prod(w.blob.shape[2:]) > 1
        weights = array_like(self.first, "folded_weights", w.blob.shape)
        bias = array_like(self.first, "folded_bias", (w.blob.shape[_axis(self.first)],))
        given = [None if each is None else dataclasses.replace(each, shape=None) for each in self.given]
        maker = call("fold_norm", *given, overwrite(weights), overwrite(bias), eps=self.eps, axis=_axis(self.first),
                     turned=turned)  # fmt: skip
        maker.layer, maker.layer_name = self.first.layer, self.first.layer_name
        operands = x, dataclasses.replace(w, blob=weights), read(bias), dataclasses.replace(self.top, shape=y.shape)
        attributes = {**self.first.attributes, "turned": True} if turned else self.first.attributes
        return maker, dataclasses.replace(self.first, operands=operands, attributes=attributes)


def _axis(first: Call) -> int:
    """The axis of the weights that is of outputs."""
    return int(first.attributes.get("transpose", False))


def _run_at(calls: Sequence[Call], at: int, seen: _Seen) -> _Run | None:
    first = calls[at]
    if first.op not in ("conv_forward", "inner_product_forward") or not _is(calls, at + 1, "batch_norm_inference"):
        return None
    x, w, b, y = first.operands
    norm = calls[at + 1]
    source, top, *statistics = norm.operands
    assert x is not None and w is not None and y is not None and source is not None and top is not None
    if not lie_alike(source, y) or y.op_shape[:2] != source.op_shape[:2]:
        return None
    count, tops = 2, [y, top]
    factors: list[Operand | None] = [None, None]
    if _is(calls, at + 2, "scale_forward"):
        scaled, gamma, beta, out = calls[at + 2].operands
        assert scaled is not None and gamma is not None and out is not None
        of_channels = scaled.op_shape == top.op_shape and len(gamma.op_shape) == 1
        if lie_alike(scaled, top) and of_channels and seen.are_params([gamma, beta]):
            count, factors, top = 3, [gamma, beta], out
            tops.append(out)
    given = [w, b, *statistics, *factors]
    absent = list(dict.fromkeys(each.memory for each in tops if each.memory is not top.memory))
    if (
        not seen.are_params(given)
        or top.memory is x.memory
        or not all(lie_alike(top, each) for each in tops if each.memory is top.memory)
        or not all(seen.may_be_absent(memory, at, at + count) for memory in absent)
    ):
        return None
    return _Run(first, count, norm.attributes["eps"], given, top, absent)


def _is(calls: Sequence[Call], at: int, op: str) -> bool:
    return at < len(calls) and calls[at].op == op


class Follower:
    """Runs calls on the host whenever what they read is elsewhere, or has been written since.

    Args:
        calls: each of which replaces what it writes.
        device: the one on which the memories have their other side.
    """

    def __init__(self, calls: Sequence[Call], device: Device) -> None:
        self.calls, self.device = list(calls), device
        self._schedule = Schedule(calls, device, on_host=True)
        self._read = [[view.memory for view in each.reads] for each in calls]
        self._all = [memory for mine in self._read for memory in mine]
        self._seen: list[list[Any]] = [[] for _ in calls]
        self._epochs: list[int] = []
        self._moves = -1

    def follow(self) -> None:
        """Run those calls for which it matters. Whoever has an array over what they read asks for it again to write."""
        now = moves()
        if now == self._moves and [memory.epoch for memory in self._all] == self._epochs:
            return
        self._read = [[view.memory for view in each.reads] for each in self.calls]
        self._all = [memory for mine in self._read for memory in mine]
        secure(self._schedule.all_missing())
        for at, (mine, each) in enumerate(zip(self._read, self.calls, strict=True)):
            if self._state(each) != self._seen[at]:
                self._seen[at] = []
                for memory in mine:
                    memory.expect_write()
                self._schedule.run(at, at + 1)
                if all(memory.unwritten for memory in mine):
                    self._seen[at] = self._state(each)
        self._epochs = [memory.epoch if memory.unwritten else -1 for memory in self._all]
        self._moves = now

    @staticmethod
    def _state(each: Call) -> list[Any]:
        """Where the call's operands are, and when what it reads was written last, for all that is known."""
        return [
            (operand.memory, operand.offset, operand.memory.epoch if operand.intent is Intent.READ else 0)
            for operand in each.present()
        ]
