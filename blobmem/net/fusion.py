"""A pass over a schedule's calls: runs of them that one op of the device does with fewer passes over memory.

A fused op leaves in every array that anybody reads later what the calls would have left, to rounding, so that a pass
over part of the net, which runs the calls one by one, goes on from it. Some ops take the operands of many of their own
calls, and fuse under their own names.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from blobmem.dtypes import is_half
from blobmem.layers.norm import Scale
from blobmem.memory import Intent, SyncedMemory
from blobmem.ops.call import Call, Operand
from blobmem.ops.registry import ArraySpec, table

if TYPE_CHECKING:
    from blobmem.net.build import Node


ROUNDED = frozenset({
    "conv_batch_norm_backward_given", "conv_batch_norm_given", "conv_batch_norm_gradients", "conv_batch_norm_moments",
    "conv_batch_norm_sums", "conv_moments",
})  # fmt: skip
"""Ops whose results are those of the calls that they replace, or do with others, to rounding, not to the bit."""


LARGE = 8 << 20
"""Bytes of what a convolution makes, of less of which a batch norm takes less time than its weights do beforehand."""


class Group(NamedTuple):
    """Calls up to `stop` in place of which `call` runs.

    `skipped` are arrays that the calls write and `call` does not, so that what they would have left is not there.
    """

    stop: int
    call: Call
    skipped: tuple[Operand, ...] = ()


def ops_of(device: Any) -> Mapping[str, Any]:
    """The ops of a device that its calls may run as: on one that computes deterministically all leave the same bits."""
    ops = table(device.family)
    if getattr(device, "deterministic", False):
        return {name: each for name, each in ops.items() if name not in ROUNDED}
    return ops


def groups(
    calls: Sequence[Call], ops: Mapping[str, Any], passing: Container[SyncedMemory] = (), device: Any = None
) -> dict[int, Group]:
    """Where runs of calls begin that one of `ops` replaces, on a device; without one, none of those that say what they
    take there.

    `passing` are memories that nobody reads but these calls. What is in one need not be written if nobody reads it
    behind the calls that are replaced, or not before all of it is written again.
    """
    behind = _Behind(calls, passing)
    found: dict[int, Group] = {}
    at = 0
    while at < len(calls):
        group = None
        for match in _MATCHES.get(str(calls[at].op), ()):
            group = match(calls, at)
            if (
                group is not None
                and _takes(ops.get(str(group.call.op)), group.call, device)
                and group.stop - at <= (calls[at].together or len(calls))
                and all(behind.nobody_reads(each, group.stop) for each in group.skipped)
            ):
                group.call.stream = min(each.stream for each in calls[at : group.stop])
                found[at] = group
                break
            group = None
        at = at + 1 if group is None else group.stop
    return found


def _takes(op: Any, call: Call, device: Any) -> bool:
    """Whether an op, if there is one, does for a call on a device."""
    if op is None or op.takes is None:
        return op is not None
    specs = (None if each is None else ArraySpec(each.op_shape, each.blob.dtype) for each in call.operands)
    return device is not None and bool(op.takes(*specs, device=device, **call.attributes))


class _Behind:
    """What becomes of memories that nobody reads but these calls."""

    def __init__(self, calls: Sequence[Call], passing: Container[SyncedMemory]) -> None:
        self._calls, self._passing = calls, passing
        self._uses: dict[SyncedMemory, list[int]] = defaultdict(list)
        for at, each in enumerate(calls):
            for memory in {operand.memory for operand in each.present()}:
                if memory in passing:
                    self._uses[memory].append(at)

    def nobody_reads(self, operand: Operand, at: int) -> bool:
        """Whether no call from `at` on reads what there is now in the operand's place."""
        if operand.memory not in self._passing:
            return False
        uses = self._uses[operand.memory]
        for position in uses[bisect_left(uses, at) :]:
            mine = [each for each in self._calls[position].present() if each.memory is operand.memory]
            if any(each.intent is not Intent.OVERWRITE for each in mine):
                return False
            if any(each.offset == operand.offset and each.nbytes >= operand.nbytes for each in mine):
                return not self._calls[position].once
        return True


def share_kept(nodes: Iterable[Node]) -> None:
    """Let a Scale in place, which keeps its input, have the array in which the BatchNorm before it keeps just that."""
    before: Node | None = None
    for node in nodes:
        kept = node.layer.internal.get("bottom")
        if before is not None and isinstance(node.layer, Scale) and kept is not None:
            normalized = before.layer.internal.get("normalized") if before.layer.keeps_state else None
            if before.layer.type == "BatchNorm" and normalized is not None and before.top[0] is node.bottom[0]:
                kept.share_data(normalized)
                node.layer.input_is_kept = True
        before = node


# -------------------------------------------------------------------- what calls look like


def _place(operand: Operand | None) -> Any:
    return None if operand is None else (operand.memory, operand.offset)


def _same(*operands: Operand | None) -> bool:
    places = {None if operand is None else (*_place(operand), operand.nbytes) for operand in operands}
    return len(places) == 1 and None not in places


def _one_order(*operands: Operand | None) -> bool:
    """Whether elements stand in one order in all of these: a flattened array has the same place, and may not."""
    return len({operand.form for operand in operands if operand is not None}) == 1


def _is(calls: Sequence[Call], at: int, op: str) -> bool:
    return at < len(calls) and calls[at].op == op and not calls[at].once


def _fused(first: Call, op: str, *operands: Operand | None, **attributes: Any) -> Call:
    return dataclasses.replace(first, op=op, operands=operands, attributes=attributes)


def _relu_in_place(calls: Sequence[Call], at: int, y: Operand, slope: float | None = None) -> bool:
    if not _is(calls, at, "relu_forward"):
        return False
    x, out = calls[at].operands
    return _same(x, out, y) and slope in (None, calls[at].attributes["slope"])


# -------------------------------------------------------------------- batch normalisation, scale, ReLU


def _normalize_forward(calls: Sequence[Call], at: int) -> Group | None:
    """BatchNorm, a Scale in place, and perhaps a ReLU in place."""
    first = calls[at]
    y = first.operand(1)
    stop = at + 1
    if not _is(calls, stop, "scale_forward"):
        return None
    x, gamma, beta, out = calls[stop].operands
    if not _same(x, out, y) or out is None or out.op_shape != y.op_shape or gamma is None or len(gamma.op_shape) != 1:
        return None
    stop += 1
    relu = _relu_in_place(calls, stop, y, 0.0)
    op = str(first.op).replace("norm", "norm_scale")
    call = _fused(first, op, *first.operands, gamma, beta, **first.attributes, relu=relu)
    return Group(stop + relu, call)


def _normalize_sum_forward(calls: Sequence[Call], at: int) -> Group | None:
    """BatchNorm, a Scale in place, and a sum of that and another array, with a ReLU in place."""
    norm = _normalize_forward(calls, at)
    if norm is None or norm.call.attributes["relu"]:
        return None
    group = _sum_forward(calls, norm.stop) if _is(calls, norm.stop, "eltwise_sum") else None
    if group is None:
        return None
    x, top, xhat, *rest = norm.call.operands
    a, b, y = group.call.operands
    other = b if _same(a, top) else a
    if other is None or not any(_same(each, top) for each in (a, b)):
        return None
    if any(_same(other, each) for each in (top, xhat)) or not _one_order(x, top, other, y):
        return None
    attributes = {key: value for key, value in norm.call.attributes.items() if key != "relu"}
    op = str(norm.call.op).replace("scale", "scale_sum_relu")
    call = _fused(calls[at], op, x, other, y, xhat, *rest, **attributes, **group.call.attributes)
    return Group(group.stop, call, _elsewhere(y, top))


def _elsewhere(y: Operand | None, *tops: Operand | None) -> tuple[Operand, ...]:
    """Those of the tops that are not in y's place."""
    return tuple(top for top in tops if top is not None and not _same(top, y))


def normalize_backward(calls: Sequence[Call], at: int) -> Group | None:
    """The gradients of the same; without a ReLU these may be of an array that is left as it is."""
    first, stop = calls[at], at
    relu = first.op == "relu_backward"
    if relu:
        if first.attributes["slope"] != 0 or not _same(*first.operands[1:]):
            return None
        stop += 1
    dbeta: Operand | None = None
    if _is(calls, stop, "scale_backward_beta"):
        dbeta = calls[stop].operands[1]
        stop += 1
    elif relu:  # there may be a beta that learns nothing, without which nobody knows where the ReLU was shut
        return None
    if not all(
        _is(calls, stop + i, op)
        for i, op in enumerate(("scale_backward_gamma", "scale_backward_data", "batch_norm_backward"))
    ):
        return None
    of_gamma, of_data, of_norm = calls[stop : stop + 3]
    xhat, inv_std, dy, dx = of_norm.operands
    kept, _, dgamma = of_gamma.operands
    gamma = of_data.operands[1]
    given, scaled = of_data.operands[::2]
    diffs = [given, of_gamma.operands[1]]
    diffs += [calls[stop - 1].operands[0]] if dbeta is not None else []
    diffs += [first.operands[2], scaled] if relu else []
    scales = [operand for operand in (dgamma, dbeta) if operand is not None]
    if (
        not _same(*diffs)
        or not _same(scaled, dy)
        or not (_same(given, dy) or _one_order(given, dy))
        or not _same(kept, xhat)
        or kept is None or xhat is None or kept.op_shape != xhat.op_shape
        or dgamma is None or gamma is None or len(gamma.op_shape) != 1
        or not all(operand.accumulate for operand in scales)
    ):  # fmt: skip
        return None
    if relu and not _same(first.operands[0], _data_of(dy)) and not _is_made_again(calls, at, kept, gamma):
        return None
    beta = None if dbeta is None else dataclasses.replace(dbeta, diff=False, intent=Intent.READ, accumulate=False)
    operands = (xhat, inv_std, gamma, beta, given, dx, dgamma, dbeta)
    call = _fused(first, "batch_norm_scale_backward", *operands, relu=relu)
    return Group(stop + 3, call, () if _same(given, dy) else _elsewhere(dx, dy))


def _is_made_again(calls: Sequence[Call], at: int, kept: Operand, gamma: Operand) -> bool:
    """Whether what the gradient of a ReLU, call `at`, reads was made anew of these (`plan.recompute`), or by a batch
    norm that ran again and made these, too, there or by itself (`plan.again`)."""
    y = calls[at].operands[0]
    made = next((i for i in range(at - 1, 0, -1) if _relu_in_place(calls, i, calls[at].operand(0))), None)
    if made is None or not _is(calls, made - 1, "scale_forward"):
        return False
    x, times, _, out = calls[made - 1].operands
    if not _same(out, y) or not _same(times, gamma):
        return False
    if _same(x, kept):
        return True
    if made < 2 or not _is(calls, made - 2, "batch_norm_given") or not _same(x, calls[made - 2].operands[1]):
        return False
    maker = next((i for i in range(at - 1, -1, -1) if kept.memory in calls[i].written_memories()), None)
    if maker is None or not _is(calls, maker, "batch_norm_given"):
        return False
    return _same(calls[maker].operands[4], calls[made - 2].operands[4])


def _made_again(calls: Sequence[Call], at: int) -> Group | None:
    """What makes a top anew for the gradient of its ReLU alone, which the op for the gradients does by itself.

    The array is then left as it was.
    """
    y = calls[at].operand(3)
    if not _relu_in_place(calls, at + 1, y, 0.0) or not _is(calls, at + 2, "relu_backward"):
        return None
    group = normalize_backward(calls, at + 2) if _same(calls[at + 2].operands[0], y) else None
    return None if group is None else group._replace(skipped=(y,))


def _scale_relu_forward(calls: Sequence[Call], at: int) -> Group | None:
    """A Scale and a ReLU in place."""
    first, y = calls[at], calls[at].operand(3)
    if not _relu_in_place(calls, at + 1, y, 0.0) or not _one_order(y, *calls[at + 1].operands):
        return None
    return Group(at + 2, _fused(first, "scale_relu_forward", *first.operands))


def _scale_sum_forward(calls: Sequence[Call], at: int) -> Group | None:
    """One Scale or two, and a sum of what it made and another array, or of what both made, with a ReLU in place."""
    stop = at + 1 + _is(calls, at + 1, "scale_forward")
    group = _sum_forward(calls, stop) if _is(calls, stop, "eltwise_sum") else None
    if group is None:
        return None
    a, b, y = group.call.operands
    x, gamma, beta, top = calls[at].operands
    other = b if _same(a, top) else a
    factors: list[Operand | None] = [None, None]
    if not any(_same(each, top) for each in (a, b)) or _same(other, top) or not _one_order(x, top, other, y):
        return None
    tops = [top]
    if stop == at + 2:
        source, *factors, made = calls[at + 1].operands
        if not _same(made, other) or _same(source, top) or not _one_order(source, made):
            return None
        if calls[at].operand(0).op_shape != calls[at + 1].operand(0).op_shape:
            return None
        other = source
        tops.append(made)
    call = _fused(calls[at], "scale_sum_relu_forward", x, gamma, beta, other, *factors, y, **group.call.attributes)
    return Group(group.stop, call, _elsewhere(y, *tops))


def _data_of(diff: Operand | None) -> Operand | None:
    return None if diff is None else dataclasses.replace(diff, diff=False, intent=Intent.READ)


# -------------------------------------------------------------------- a sum of two, ReLU


def _sum_forward(calls: Sequence[Call], at: int) -> Group | None:
    """A sum of two arrays and a ReLU in place."""
    first = calls[at]
    if len(first.operands) != 3 or tuple(first.attributes["coeffs"]) != (1, 1):
        return None
    if not _relu_in_place(calls, at + 1, first.operand(2)):
        return None
    slope = calls[at + 1].attributes["slope"]
    return Group(at + 2, _fused(first, "sum_relu_forward", *first.operands, slope=slope))


def _sum_normalize_inference(calls: Sequence[Call], at: int) -> Group | None:
    """A sum of two arrays, and a BatchNorm of it with running statistics, a Scale in place, and perhaps a ReLU."""
    first = calls[at]
    if len(first.operands) != 3 or tuple(first.attributes["coeffs"]) != (1, 1):
        return None
    norm = _normalize_forward(calls, at + 1) if _is(calls, at + 1, "batch_norm_inference") else None
    a, b, total = first.operands
    if norm is None or not _same(total, norm.call.operand(0)):
        return None
    x, y, *given = norm.call.operands
    if not _one_order(a, b, total, x, y):
        return None
    kept = None if _same(total, y) else total
    call = _fused(first, "sum_batch_norm_scale_inference", a, b, kept, y, *given, **norm.call.attributes)
    return Group(norm.stop, call)


def _sum_backward(calls: Sequence[Call], at: int) -> Group | None:
    """The gradients of the same."""
    first = calls[at]
    y, dy, dx = first.operands
    if not _same(dy, dx) or dy is None:
        return None
    if not all(_is(calls, at + i, "eltwise_sum_backward") for i in (1, 2)):
        return None
    one, other = calls[at + 1], calls[at + 2]
    if one.layer != other.layer or one.attributes["coeff"] != 1 or other.attributes["coeff"] != 1:
        return None
    da, db = one.operands[1], other.operands[1]
    if not _same(one.operands[0], other.operands[0], dy) or _same(da, dy) or _same(db, dy) or _same(da, db):
        return None
    if not _one_order(y, dy, da, db):
        return None
    slope = first.attributes["slope"]
    both = dataclasses.replace(dy, intent=Intent.WRITE)
    return Group(at + 3, _fused(first, "sum_relu_backward", y, both, da, db, slope=slope))


def _sums_backward(calls: Sequence[Call], at: int) -> Group | None:
    """The gradient of a split in two, and the gradients of a sum of two and a ReLU before it; or of that ReLU, where
    the sum passes its gradient on as it is (`plan.through`)."""
    first = calls[at]
    if len(first.operands) != 3 or not _is(calls, at + 1, "relu_backward"):
        return None
    one, two, total = first.operands
    group = _sum_backward(calls, at + 1) or _shut(calls, at + 1)
    if group is None or not _same(total, calls[at + 1].operands[1]):
        return None
    y, dy, da, db = group.call.operands
    if dy is None or any(_same(source, target) for source in (one, two) for target in (dy, da, db)):
        return None
    if not _one_order(y, one, two, dy):
        return None
    written = dataclasses.replace(dy, intent=Intent.OVERWRITE)
    call = _fused(first, "sums_relu_backward", y, one, two, written, da, db, **group.call.attributes)
    return Group(group.stop, call)


def _shut(calls: Sequence[Call], at: int) -> Group | None:
    """The gradient of a ReLU in place, where it is no part of another group."""
    y, dy, dx = calls[at].operands
    if not _same(dy, dx) or normalize_backward(calls, at) is not None or _relu_bias_backward(calls, at) is not None:
        return None
    slope = calls[at].attributes["slope"]
    return Group(at + 1, _fused(calls[at], "sum_relu_backward", y, dy, None, None, slope=slope))


def _sums_normalize_backward(calls: Sequence[Call], at: int) -> Group | None:
    """The same, and the gradients of a Scale and a BatchNorm that made one of the two that were added."""
    group = _sums_backward(calls, at)
    norm = None
    if group is not None and group.stop < len(calls):
        made = _is(calls, group.stop, "batch_norm_scale_backward")  # by `plan.through`
        norm = Group(group.stop + 1, calls[group.stop]) if made else normalize_backward(calls, group.stop)
    if group is None or norm is None or norm.call.attributes["relu"]:
        return None
    y, one, two, total, da, db = group.call.operands
    xhat, inv_std, gamma, _, dy, dx, dgamma, dbeta = norm.call.operands
    if da is None:
        read, other, apart = total, total, None
    else:
        read, other = (da, db) if _same(da, dy) else (db, da)
        apart = total
    if not _same(read, dy) or _same(other, dx) or (da is not None and _same(other, dy)):
        return None
    if any(_same(xhat, each) for each in (total, other)) or not _one_order(y, one, two, other, xhat, dx):
        return None
    operands = (y, one, two, apart, other, xhat, inv_std, gamma, dx, dgamma, dbeta)
    call = _fused(calls[at], "sums_relu_batch_norm_scale_backward", *operands, **group.call.attributes)
    return Group(norm.stop, call, () if da is None else _elsewhere(dx, dy))


def _unread_sums_normalize_backward(calls: Sequence[Call], at: int) -> Group | None:
    """The same, where nobody reads what the gradients of the split come to."""
    group = _sums_normalize_backward(calls, at)
    if group is None or group.call.operands[3] is None:
        return None
    operands = group.call.operands
    call = dataclasses.replace(group.call, operands=(*operands[:3], None, *operands[4:]))
    return group._replace(call=call, skipped=(*group.skipped, group.call.operand(3)))


# -------------------------------------------------------------------- a convolution or an inner product, ReLU


def _relu_behind(calls: Sequence[Call], at: int) -> Group | None:
    """A convolution or an inner product and a ReLU in place."""
    first = calls[at]
    y = first.operand(3)
    if not _relu_in_place(calls, at + 1, y, 0.0) or not _one_order(y, *calls[at + 1].operands):
        return None
    op = str(first.op).removesuffix("_forward") + "_relu_forward"
    return Group(at + 2, _fused(first, op, *first.operands, **first.attributes))


def _sum_behind(calls: Sequence[Call], at: int) -> Group | None:
    """In halves, a convolution, a sum of its top and another array, and perhaps a ReLU in place.

    Not where a batch norm follows, which takes the sum upon itself.
    """
    first, top = calls[at], calls[at].operand(3)
    if not is_half(top.blob.dtype) or not _is(calls, at + 1, "eltwise_sum") or len(calls[at + 1].operands) != 3:
        return None
    a, b, y = calls[at + 1].operands
    other = b if _same(a, top) else a
    if (
        tuple(calls[at + 1].attributes["coeffs"]) != (1, 1)
        or y is None
        or not any(_same(each, top) for each in (a, b))
        or any(_same(other, each) for each in (top, y))
        or _same(y, first.operands[0])
        or not _one_order(top, other, y)
        or _sum_normalize_inference(calls, at + 1) is not None
    ):
        return None
    relu = _relu_in_place(calls, at + 2, y, 0.0)
    x, w, bias, _ = first.operands
    operands = (x, w, bias, other, dataclasses.replace(y, shape=top.shape))
    call = _fused(first, "conv_sum_forward", *operands, **first.attributes, relu=relu)
    return Group(at + 2 + relu, call, _elsewhere(y, top))


def _tile_behind(calls: Sequence[Call], at: int) -> Group | None:
    """The same of what is repeated along the channels, which is read as it is."""
    x, tiles = calls[at].operands
    group = _sum_behind(calls, at + 1) if _is(calls, at + 1, "conv_forward") else None
    if group is None or x is None or tiles is None or not _same(group.call.operand(3), tiles):
        return None
    a, b, bias, _, y = group.call.operands
    return group._replace(call=group.call.over((a, b, bias, x, y)), skipped=(*group.skipped, tiles))


def _norm_behind(calls: Sequence[Call], at: int) -> Group | None:
    """A convolution and a batch norm of its large top by given statistics, and what that takes upon itself: a Scale, a
    sum, a ReLU. In halves the shift is rounded to one, as the top would be."""
    if not _is(calls, at + 1, "batch_norm_given") or calls[at].operand(3).nbytes < LARGE:
        return None
    norm = Group(at + 2, calls[at + 1])
    found = (match(calls, at + 1) for match in (_normalize_sum_forward, _normalize_forward))
    groups = (_normalized(calls, at, each) for each in (*found, norm) if each is not None)
    return next((each for each in groups if each is not None), None)


def _normalized(calls: Sequence[Call], at: int, norm: Group) -> Group | None:
    """A convolution and the batch norm behind it, with all that this takes upon itself."""
    first, (x, w, bias, top) = calls[at], calls[at].operands
    source, *operands = norm.call.operands
    other = operands.pop(0) if "sum" in str(norm.call.op) else None
    y, kept, mean, inv_std, *factors = operands
    made = [each for each in (y, kept) if each is not None]
    arrays = [each for each in (*made, other) if each is not None]
    gamma, beta = factors or (None, None)
    if (
        not _same(source, top)
        or top is None
        or norm.call.attributes.get("slope", 0) != 0
        or (kept is not None and gamma is None)
        or any(_same(x, each) for each in made)
        or len({_place(each) for each in arrays}) < len(arrays)
        or not _one_order(top, *arrays)
    ):
        return None
    y, other, kept = (None if each is None else dataclasses.replace(each, shape=top.shape) for each in (y, other, kept))
    relu = bool(norm.call.attributes.get("relu", other is not None))
    given = (x, w, bias, other, y, kept, mean, inv_std, gamma, beta)
    call = _fused(first, "conv_batch_norm_given", *given, **first.attributes, relu=relu)
    return Group(norm.stop, call, _elsewhere(kept, *_elsewhere(y, top, *norm.skipped)))


def _moments_behind(calls: Sequence[Call], at: int, read: bool = False) -> Group | None:
    """A convolution and the moments of its top, which is written if it is `read` behind them."""
    first, (x, w, bias, top) = calls[at], calls[at].operands
    if not _is(calls, at + 1, "batch_norm_moments") or top is None:
        return None
    source, moments = calls[at + 1].operands
    if not _same(source, top) or not _one_order(source, top):
        return None
    operands = x, w, bias, top if read else None, moments
    call = _fused(first, "conv_moments", *operands, **first.attributes, **calls[at + 1].attributes)
    return Group(at + 2, call, () if read else (top,))


def _gradient_behind(calls: Sequence[Call], at: int, read: bool = False) -> Group | None:
    """A convolution, a batch norm of its top by given statistics, and the sums for the gradient of that, or the
    gradient; what is normalised is written if it is `read` behind the sums."""
    first, (x, w, bias, top) = calls[at], calls[at].operands
    if not _is(calls, at + 1, "batch_norm_given") or top is None:
        return None
    source, y, kept, mean, inv_std = calls[at + 1].operands
    if y is None or not _same(source, top) or _same(x, y) or not _one_order(top, source, y):
        return None
    made, last = (top, y, *([] if kept is None else [kept])), at + 2
    if _is(calls, last, "batch_norm_sums"):
        xhat, gamma, beta, dy, sums = calls[last].operands
        outputs, op = (dy, y if read else None, sums), "conv_batch_norm_sums"
    elif _is(calls, last, "batch_norm_backward_given") and not read:
        xhat, _, gamma, beta, dy, dx, sums = calls[last].operands
        outputs, op = (dy, dx, sums), "conv_batch_norm_backward_given"
    else:
        return None
    if not any(_same(xhat, each) for each in (y, kept)) or any(_same(dy, each) for each in made):
        return None
    if not _one_order(top, *outputs[:2]):
        return None
    shaped = (None if each is None else dataclasses.replace(each, shape=top.shape) for each in outputs[:2])
    operands = (x, w, bias, mean, inv_std, gamma, beta, *shaped, outputs[2])
    attributes = first.attributes | calls[last].attributes
    call = dataclasses.replace(first, op=op, operands=operands, attributes=attributes)
    return Group(last + 1, call, tuple(each for each in made if not (read and _same(each, y))))


def _relu_bias_backward(calls: Sequence[Call], at: int) -> Group | None:
    """The gradient of a ReLU and that of the bias of the convolution before it, where channels come last."""
    first = calls[at]
    if not _is(calls, at + 1, "conv_backward_bias"):
        return None
    dy, db = (calls[at + 1].operand(place) for place in (0, 1))
    if not _same(first.operands[2], dy) or first.operand(2).form != dy.form or not db.accumulate:
        return None
    _, channels, *inner = dy.op_shape
    if channels == 1 or math.prod(inner) != 1:
        return None
    return Group(at + 2, _fused(first, "relu_bias_backward", *first.operands, db, **first.attributes))


def _sums_bias_backward(calls: Sequence[Call], at: int) -> Group | None:
    """The gradient of a split in two, and those of a ReLU and of a bias before it, where channels come last."""
    first = calls[at]
    if len(first.operands) != 3 or not _is(calls, at + 1, "relu_backward"):
        return None
    group, (one, two, total) = _relu_bias_backward(calls, at + 1), first.operands
    if group is None:
        return None
    y, dy, dx, db = group.call.operands
    if dx is None or not _same(total, dy, dx) or any(_same(each, total) for each in (y, one, two)):
        return None
    if not _one_order(y, one, two, dx):
        return None
    written = dataclasses.replace(dx, intent=Intent.OVERWRITE)
    call = _fused(first, "sums_relu_bias_backward", y, one, two, written, db, **group.call.attributes)
    return Group(group.stop, call)


# -------------------------------------------------------------------- a join


def _concat_backward(calls: Sequence[Call], at: int) -> Group | None:
    """The gradients of all that was joined: the division of one array."""
    first, stop, offset = calls[at], at, 0
    dy, axis = first.operand(0), first.attributes["axis"]
    parts: list[Operand] = []
    while _is(calls, stop, "concat_backward") and calls[stop].operands[0] == dy:
        if calls[stop].attributes != {"axis": axis, "offset": offset}:
            break
        parts.append(calls[stop].operand(1))
        offset += parts[-1].op_shape[axis]
        stop += 1
    whole = [dy, *parts]
    if len(parts) < 2 or offset != dy.op_shape[axis] or len({_place(each) for each in whole}) < len(whole):
        return None
    return Group(stop, _fused(first, "slice_forward", *whole, axis=axis))


# -------------------------------------------------------------------- what solvers do to many parameters


def _updates(calls: Sequence[Call], at: int) -> Group | None:
    """Updates of parameters that share no arrays, with the same attributes but for their multipliers; all may read the
    scale of the losses."""
    first, places, stop = calls[at], set[Any](), at
    multipliers: list[float] = []
    while _is(calls, stop, str(first.op)):
        call = calls[stop]
        own = call.operands[:-1] if call.attributes.get("scaled") else call.operands
        mine = {_place(operand) for operand in own}
        own_multipliers = {"multipliers": call.attributes["multipliers"]}
        alike = call.attributes == first.attributes | own_multipliers and _dtypes(call) == _dtypes(first)
        if not alike or mine & places:
            break
        places |= mine
        multipliers += own_multipliers["multipliers"]
        stop += 1
    operands = [operand for call in calls[at:stop] for operand in call.operands]
    attributes = first.attributes | {"multipliers": tuple(multipliers)}
    return Group(stop, _fused(first, str(first.op), *operands, **attributes)) if stop > at + 1 else None


def _sums_of_squares(calls: Sequence[Call], at: int) -> Group | None:
    """Sums added to one number."""
    first, stop = calls[at], at
    out = first.operands[-1]
    while _is(calls, stop, "sumsq") and _same(calls[stop].operands[-1], out) and _dtypes(calls[stop]) == _dtypes(first):
        stop += 1
    diffs = [operand for call in calls[at:stop] for operand in call.operands[:-1]]
    return Group(stop, _fused(first, "sumsq", *diffs, out)) if stop > at + 1 else None


def _dtypes(call: Call) -> list[Any]:
    return [operand.blob.dtype for operand in call.present()]


UPDATES = ("sgd_update", "nesterov_update", "adagrad_update", "rmsprop_update", "adadelta_update", "adam_update")
_MATCHES = {  # those first that write least
    **dict.fromkeys(UPDATES, (_updates,)),
    "sumsq": (_sums_of_squares,),
    "batch_norm_forward": (_normalize_sum_forward, _normalize_forward),
    "batch_norm_given": (_normalize_sum_forward, _normalize_forward),
    "batch_norm_inference": (_normalize_forward,),
    "concat_backward": (_concat_backward,),
    "conv_forward": (
        _moments_behind,
        functools.partial(_moments_behind, read=True),
        _gradient_behind,
        functools.partial(_gradient_behind, read=True),
        _norm_behind,
        _sum_behind,
        _relu_behind,
    ),
    "inner_product_forward": (_relu_behind,),
    "tile_forward": (_tile_behind,),
    "relu_backward": (normalize_backward, _sum_backward, _relu_bias_backward),
    "scale_backward_beta": (normalize_backward,),
    "scale_backward_gamma": (normalize_backward,),
    "scale_forward": (_made_again, _scale_sum_forward, _scale_relu_forward),
    "eltwise_sum": (_sum_forward, _sum_normalize_inference),
    "sum_arrays": (_unread_sums_normalize_backward, _sums_normalize_backward, _sums_bias_backward, _sums_backward),
}
