"""How long a pass takes by how long each of its calls does, copies to the host and back beside them."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple, cast

import numpy as np

from blobmem.devices import Device
from blobmem.dtypes import is_half
from blobmem.memory import Intent, SyncedMemory
from blobmem.net.plan.liveness import Use
from blobmem.net.plan.places import Draft
from blobmem.ops.call import Call, Operand
from blobmem.ops.registry import ArraySpec

LINK = 48e9
"""Bytes that are copied in a second, one way: what a GPU's link to the host does among the calls of a CUDA graph. On an
H200, copies of 3 to 150 MiB of five nets came to 44 to 52 GB/s while calls used its memory, and to 55 alone."""

BOTH = 46e9
"""Bytes that are copied in a second each way where both are busy."""

QUEUED = 10e-6
"""Seconds that a copy takes beside that: of 8 MiB, copies in a graph come to 46 GB/s, of 4 MiB to 42."""

MEMORY = 3e12
"""Bytes that calls read and write in a second, where they do little more than that."""

PRODUCTS = {"tf32": 200e12, "fp32": 40e12, "half": 500e12}
"""Additions and multiplications in a second, of convolutions and inner products."""

MOST_KEYS = 1 << 15
"""Calls whose keys are remembered at a time."""

START = 2e-3  # ms, of any call

ITEMS = 0.85
"""To which power of the number of items times go where the like of a call was measured with another number. For 2 to 20
times as few that comes to 0.77 to 1.06 of what was measured, in the middle of 3000 pairs of calls on an H200; to go in
proportion to 0.61 to 0.83 for convolutions of halves."""

COPIES = ("evict", "fetch")
"""Calls that copy to the host and back, on a stream of their own each."""

_PRODUCTS = {
    "conv_forward": (3, 1), "conv_relu_forward": (3, 1), "conv_sum_forward": (4, 1), "conv_backward_data": (0, 1),
    "conv_backward_weights": (1, 2), "deconv_forward": (0, 1), "deconv_backward_data": (0, 1),
    "deconv_backward_weights": (0, 2),
}  # fmt: skip
"""Of convolutions, which operand is the output (of a transposed one the source), and which the weights."""

_NORMED = frozenset({"conv_batch_norm_backward_given", "conv_batch_norm_sums", "conv_moments"})
"""Convolutions that may make nothing of the size of their output."""

_LINEAR = {
    "inner_product_forward": (0, 1, 3), "inner_product_relu_forward": (0, 1, 3),
    "inner_product_backward_data": (0, 1, 2), "inner_product_backward_weights": (0, 1, 2),
}  # fmt: skip
"""Of products of matrices, which operands are the three matrices."""


class _LookedUp:
    """What is known of a device's model, and the keys of calls, which are kept, so that no other has a call's id."""

    def __init__(self, device: Any) -> None:
        from blobmem.ops.cuda.times import Known

        self.known, self._device = Known(device.model), device
        self._keys: dict[int, tuple[Call, Any]] = {}

    def key(self, call: Call) -> Any:
        """What the call's time depends on."""
        from blobmem.ops.cuda.times import key_of

        found = self._keys.get(id(call))
        if found is None:
            if len(self._keys) > MOST_KEYS:
                self._keys.clear()
            found = self._keys[id(call)] = call, key_of(call, self._device)
        return found[1]


_looked_up: contextvars.ContextVar[dict[Device, _LookedUp] | None] = contextvars.ContextVar("_looked_up", default=None)


@contextlib.contextmanager
def looked_up_once() -> Iterator[None]:
    """Meanwhile what was measured is read once, as no array gets another shape and nothing is measured: plans are
    tried."""
    token = _looked_up.set({})
    try:
        yield
    finally:
        _looked_up.reset(token)


def _look_up(device: Device) -> _LookedUp:
    found = _looked_up.get()
    if found is None:
        return _LookedUp(device)
    if device not in found:
        found[device] = _LookedUp(device)
    return found[device]


class Times:
    """Milliseconds that calls take on a device.

    Of a GPU those that were measured, if the like of a call was, with other numbers of items by `ITEMS`; else what
    a convolution's plan took when it was chosen, and all else reckoned from bytes and products. Other devices are
    reckoned as if they were one.
    """

    def __init__(self, device: Device) -> None:
        self._device, self._known = cast(Any, device), cast(Any, None)
        self._ms: dict[Any, float] = {}  # by keys, what was asked for before
        if hasattr(device, "model"):
            self._looked_up = _look_up(device)
            self._known = self._looked_up.known

    def ms(self, call: Call) -> float:
        """What a call takes, as it runs in a step; nothing if it does not run in each, or not on the device."""
        if call.op in COPIES:
            return self.copy_ms(_nbytes(call.operand(0)))
        if call.once or call.on_host:
            return 0.0
        if self._known is None:
            return self._reckoned(call)
        key = self._key(call)
        if key not in self._ms:
            nbytes, ms = self._known.find(key) or (0, 0.0)
            self._ms[key] = ms * (key.nbytes / nbytes) ** ITEMS if nbytes else self._reckoned(call)
        return self._ms[key]

    def is_known(self, call: Call) -> bool:
        """Whether just such a call was measured on a GPU, or need not be."""
        if call.op in COPIES or call.once or call.on_host:
            return True
        key = self._key(call)
        return (self._known.find(key) or (-1, 0.0))[0] == key.nbytes

    def copy_ms(self, nbytes: int) -> float:
        """What a copy to the host, or back, takes."""
        return (nbytes / LINK + QUEUED) * 1e3

    def _key(self, call: Call) -> Any:
        return self._looked_up.key(call)

    def _reckoned(self, call: Call) -> float:
        if call.op == "conv_batch_norm_given":
            return self._normalized(call)
        moved = sum(_nbytes(each) * (1 + (each.intent is Intent.WRITE)) for each in call.present())
        ms = self._chosen(call)
        if ms is None:
            ms = _products(call) / self._rate(call) * 1e3
        return max(moved / MEMORY * 1e3, ms) + START

    def _normalized(self, call: Call) -> float:
        """What a convolution takes that is normalised as it is made: without that, and with what comes beside."""
        x, w, b, other, y, kept, *_ = call.operands
        attributes = {name: value for name, value in call.attributes.items() if name != "relu"}
        plain = dataclasses.replace(call, op="conv_forward", operands=(x, w, b, y), attributes=attributes)
        beside = sum(_nbytes(each) for each in (w, w, other, kept, kept) if each is not None)
        return self.ms(plain) + beside / MEMORY * 1e3 + START

    def _chosen(self, call: Call) -> float | None:
        """What a convolution's plan took when it was chosen."""
        if self._known is None or call.op not in _PRODUCTS:
            return None
        from blobmem.ops.cuda.conv import known_ms

        specs = [None if each is None else ArraySpec(each.op_shape, each.blob.dtype) for each in call.operands]
        return known_ms(str(call.op), specs, call.attributes, self._device)

    def _rate(self, call: Call) -> float:
        if any(is_half(each.blob.dtype) for each in call.present()):
            return PRODUCTS["half"]
        return PRODUCTS[getattr(self._device, "math", "fp32")]


def _nbytes(operand: Operand) -> int:
    return math.prod(operand.op_shape) * operand.blob.dtype.itemsize


def _products(call: Call) -> float:
    """Additions and multiplications of a call."""
    op = str(call.op)
    if op in _PRODUCTS:
        output, weights = (call.operand(at).op_shape for at in _PRODUCTS[op])
        return 2.0 * math.prod(output) * math.prod(weights[1:])
    if op in _NORMED:
        x, weights = (call.operand(at).op_shape for at in (0, 1))
        return 2.0 * math.prod(x) * math.prod(weights) / weights[1]
    if op in _LINEAR:  # of m by k, k by n and m by n numbers
        return 2.0 * math.sqrt(math.prod(math.prod(call.operand(at).op_shape) for at in _LINEAR[op]))
    return 0.0


class Reckoned(NamedTuple):
    """When what runs in a pass begins and ends, in ms from its beginning.

    Attributes:
        ms: the end of the last.
        begin, end: of each of the draft's units, one schedule's behind the other's; of a copy, when it is under way.
    """

    ms: float
    begin: np.ndarray
    end: np.ndarray


def reckon(drawn: Draft, times: Times, bytes_free: bool = False) -> Reckoned:
    """When what runs in a pass begins and ends, on one stream for calls and one each for copies out and in.

    Each stream is in order, and no pass begins before the one before it has ended. A copy comes after the calls before
    it, a call after the copies that bring what it uses, and what is the first in bytes that are being copied away after
    that copy, but not if `bytes_free`: as if there were others. A copy is slower while those that were queued before it
    the other way are under way.
    """
    calls = [unit.calls[-1] for unit in chain.from_iterable(drawn.units)]
    after = copies_before(calls, None if bytes_free else drawn)
    begins, ends = np.zeros((2, len(calls)))
    computed, copied = 0.0, dict.fromkeys(COPIES, 0.0)
    turns = {*accumulate(map(len, drawn.units))}
    for at, call in enumerate(calls):
        if at in turns:
            computed = max(computed, *copied.values())
        begin = max([computed, *(ends[other] for other in after.get(at, ()))])
        if call.op in COPIES:
            way, other = COPIES if call.op == COPIES[0] else COPIES[::-1]
            begin = max(begin, copied[way])
            copied[way] = end = _copied(begin, times.ms(call), copied[other])
        else:
            computed = end = begin + times.ms(call)
        begins[at], ends[at] = begin, end
    return Reckoned(float(ends.max(initial=0)), begins, ends)


def least_ms(drawn: Draft, times: Times) -> float:
    """No less than that does what runs in a pass take, in ms, with any copies put in."""
    least = dict.fromkeys((None, *COPIES), 0.0)  # of each stream
    for unit in chain.from_iterable(drawn.units):
        *own, last = unit.calls
        ms = times.ms(last)
        if own:  # which may run as one or, where copies want that, one by one
            ms = min(ms, sum(map(times.ms, own)))
        least[last.op if last.op in COPIES else None] += ms
    return max(least.values()) * (1 - 1e-9)  # as sums round in other ways


def _copied(begin: float, ms: float, other: float) -> float:
    """When a copy ends that would take so many ms alone, where the link is busy the other way until `other`."""
    both = min(ms * LINK / BOTH, max(0.0, other - begin))
    return begin + both + (ms - both * BOTH / LINK)


def copies_before(calls: Sequence[Call], drawn: Draft | None = None) -> Mapping[int, list[int]]:
    """For calls, by position, the copies that each has to wait for, but for those that its stream has waited for; with
    a draft, those out of its places too."""
    after: dict[int, list[int]] = defaultdict(list)
    coming: dict[SyncedMemory, int] = {}
    last: dict[tuple[int, int | None], int] = {}  # of where arrays are parked: the copy that is under way
    for at, call in enumerate(calls):
        if call.op in COPIES:
            home = id(call.attributes["home"]), call.attributes.get("start")
            if home in last:
                after[at].append(last[home])
            last[home] = at
        if call.op == "fetch":
            coming[call.operand(0).memory] = at
        elif coming:
            found = {coming.pop(operand.memory) for operand in call.present() if operand.memory in coming}
            after[at] += found
    if last and drawn is not None:
        _add_overlaps(after, calls, drawn)
    return after


def _add_overlaps(after: dict[int, list[int]], calls: Sequence[Call], drawn: Draft) -> None:
    """Let the first call, and the first copy, over bytes that are being copied away wait for that."""
    places = drawn.places()
    firsts = np.array([life.first for life, _ in places.values()])
    starts = np.array([at for _, at in places.values()])
    stops = starts + [life.nbytes for life, _ in places.values()]
    copies = np.array([call.op in COPIES for call in calls])[firsts]
    number = {key: index for index, key in enumerate(places)}
    for at, call in enumerate(calls):
        own = number.get(Use.place(call.operand(0))) if call.op == "evict" else None
        if own is None:
            continue
        life, start = places[Use.place(call.operand(0))]
        meets = (firsts >= life.last) & (starts < start + life.nbytes) & (stops > start)
        meets[own] = False
        for stream in (meets & copies, meets & ~copies):
            if stream.any():
                after[int(firsts[stream].min())].append(at)
