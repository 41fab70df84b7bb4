"""Which array takes over the bytes of another: an op's output, made in place of an input that nobody reads again."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from blobmem.memory import Intent, SyncedMemory
from blobmem.ops.call import Call, Operand, memories

if TYPE_CHECKING:
    from blobmem.net.plan.liveness import Use

_ALL_BUT_LAST = slice(0, -1)

IN_PLACE: dict[str, tuple[tuple[int, ...] | slice, tuple[int, ...]]] = {
    # element by element: (x, y), (x, dy, dx) and others
    **dict.fromkeys(
        (
            "absval_forward", "batch_norm_backward_global", "batch_norm_inference", "bnll_forward", "clip_forward",
            "copy", "dropout_forward", "eltwise_sum_backward", "elu_forward", "exp_forward",
            "log_forward", "power_forward", "relu6_forward", "relu_forward", "sigmoid_forward", "swish_forward",
            "tanh_forward", "threshold_forward",
        ),
        ((0,), (1,)),
    ),
    **dict.fromkeys(
        (
            "absval_backward", "bnll_backward", "clip_backward", "exp_backward", "log_backward", "relu6_backward",
            "relu_backward", "sigmoid_backward", "swish_backward", "tanh_backward",
        ),
        ((0, 1), (2,)),
    ),
    **dict.fromkeys(
        ("bias_forward", "dropout_backward", "multiply", "prelu_forward", "scale_backward_data"), ((0,), (2,))
    ),
    **dict.fromkeys(("elu_backward", "power_backward"), ((0, 1, 2), (3,))),
    "axpy_forward": ((1, 2), (3,)),
    "softmax_loss_backward": ((0,), (4,)),
    "prelu_backward_data": ((0, 2), (3,)),
    "scale_forward": ((0,), (3,)),
    "eltwise_sum": (_ALL_BUT_LAST, (-1,)),
    "eltwise_prod": (_ALL_BUT_LAST, (-1,)),
    "eltwise_prod_backward": ((0,), (1,)),
    "eltwise_prod_backward_unstable": ((0, 2, 3), (1,)),
    "eltwise_max": (slice(0, -2), (-2,)),
    "eltwise_max_backward": ((0,), (2,)),
    "sum_arrays": ((0, 1), (-1,)),  # on the host the others are added to it one by one
    # statistics of a channel are taken before any of its elements is written
    "batch_norm_forward": ((0,), (1, 2)),
    "batch_norm_given": ((0,), (1, 2)),
    "batch_norm_backward": ((0, 2), (3,)),
    "batch_norm_backward_given": ((0, 4), (5,)),
    "conv_batch_norm_backward_given": ((7,), (8,)),
    # what runs in place of several
    "batch_norm_scale_forward": ((0,), (1, 2)),
    "batch_norm_scale_sum_relu_forward": ((0, 1), (2, 3)),
    "batch_norm_scale_given": ((0,), (1, 2)),
    "batch_norm_scale_sum_relu_given": ((0, 1), (2, 3)),
    "batch_norm_scale_inference": ((0,), (1,)),
    "sum_batch_norm_scale_inference": ((0, 1), (2, 3)),
    "batch_norm_scale_backward": ((0, 4), (5,)),
    "relu_bias_backward": ((0, 1), (2,)),
    "sums_relu_bias_backward": ((0, 1, 2), (3,)),
    "scale_relu_forward": ((0,), (3,)),
    "scale_sum_relu_forward": ((0, 3), (6,)),
    "sum_relu_forward": ((0, 1), (2,)),
    "sum_relu_backward": ((0, 1), (2, 3)),  # all that it writes is the same
    "sums_relu_backward": ((0, 1, 2, 3), (3, 4, 5)),
    "sums_relu_batch_norm_scale_backward": ((0, 1, 2), (3, 4, 8)),  # the last is made when the others are there
}  # fmt: skip
"""Op -> positions of inputs and of outputs, of which any output may lie where any input does, on every device: an
element is written after all inputs were read there, or whatever else its value depends on. They are of one size."""


def heirs(
    steps: Sequence[Sequence[Call]], uses: Mapping[SyncedMemory, Use], until: Sequence[int]
) -> dict[Hashable, Hashable]:
    """Of places whose bytes another one takes over, which that is; each is taken over once, and takes over one.

    Where a step may run as one call or as several, it has to be right both ways.

    Args:
        steps, until: as `lifetimes` has them.
        uses: how they use each memory.
    """
    found: dict[Hashable, Hashable] = {}
    for index, calls in enumerate(steps):
        if all(each.op not in IN_PLACE for each in calls):
            continue
        one_by_one = calls[:-1] or calls
        begun: dict[SyncedMemory, Operand] = {}  # how each memory that the step has used so far was used last
        before: dict[SyncedMemory, list[Operand]] = {}  # what had the bytes of what the step makes in place
        for at, each in enumerate(one_by_one):
            born = [operand for operand in each.present() if _is_born(operand, index, begun, uses)]
            begun.update((operand.memory, operand) for operand in each.present())
            if not born:
                continue
            later = {*memories(one_by_one[at + 1 :])}
            # what has lived longest first: lifetimes that lie within each other are packed best
            oldest_first = sorted(begun.items(), key=lambda item: uses[item[0]].first)
            for new in born:
                for memory, old in oldest_first:
                    use = uses[memory]
                    if use.pinned or use.last != index or use.until != until[index] or memory in later:
                        continue
                    if not use.is_all(old) or use.place(old) in found:
                        continue
                    olds = [*before.get(memory, ()), old]
                    if _may_lie(new, old, each) and all(_may_lie(new, one, calls[-1]) for one in olds):
                        found[use.place(old)] = uses[new.memory].place(new)
                        before[new.memory] = olds
                        break
    return found


def _is_born(
    operand: Operand, index: int, begun: Mapping[SyncedMemory, Operand], uses: Mapping[SyncedMemory, Use]
) -> bool:
    """Whether the operand is the first use of its memory, which replaces all of it, in step `index`."""
    if operand.intent is not Intent.OVERWRITE:
        return False
    memory = operand.memory
    use = uses[memory]
    return not use.pinned and use.first == index and memory not in begun and use.is_all(operand)


def _may_lie(new: Operand, old: Operand, call: Call) -> bool:
    """Whether what `new` is may lie where `old` is while a call runs."""
    if new.memory is old.memory or new.blob.dtype != old.blob.dtype or new.form != old.form:
        return False
    if new.nbytes != old.nbytes:
        return False
    olds, news = _positions(call, old), _positions(call, new)
    if not olds or not news:
        return True
    inputs, outputs = IN_PLACE.get(call.op, ((), ())) if isinstance(call.op, str) else ((), ())
    places = range(len(call.operands))
    allowed = places[inputs] if isinstance(inputs, slice) else inputs
    if len(olds) > 1 or len(news) > 1 or olds[0] not in allowed or news[0] not in {places[at] for at in outputs}:
        return False
    return _form(call, olds[0]) == old.form == _form(call, news[0])


def _positions(call: Call, like: Operand) -> list[int]:
    memory = like.memory
    return [at for at, each in enumerate(call.operands) if each is not None and each.memory is memory]


def _form(call: Call, at: int) -> Any:
    operand = call.operands[at]
    return None if operand is None else operand.form
