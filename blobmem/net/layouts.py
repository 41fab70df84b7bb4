"""A pass over a schedule's calls: arrays of images are kept channels last where the device's libraries are faster so.

The calls that can do with it use arrays of the schedule's own (`memory.reordered`); every other reader, calls and users
alike, finds the usual order, which is made when it is asked for.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from blobmem.devices import Device
from blobmem.dtypes import is_half
from blobmem.memory import SyncedMemory
from blobmem.memory.reordered import Form, Reordered
from blobmem.ops.call import Call, Operand
from blobmem.ops.registry import ArraySpec

Shape = tuple[int, ...]
Place = tuple[SyncedMemory, int]

_POSITIONS: dict[str, tuple[int, ...]] = {
    "conv_forward": (0, 3), "conv_sum_forward": (0, 3, 4), "conv_backward_data": (0, 2),
    "conv_backward_weights": (0, 1), "deconv_forward": (0, 3), "deconv_backward_data": (0, 2),
    "deconv_backward_weights": (0, 1), "max_pool_forward": (0, 1, 2), "max_pool_backward": (0, 1, 2),
    "ave_pool_forward": (0, 1), "ave_pool_backward": (0, 1), "lrn_forward": (0, 1), "lrn_backward": (0, 1, 2),
    "take_items": (1,),
}  # fmt: skip
"""Ops with a keyword `layout`, and which of their operands it is about."""

_VOLUMES = frozenset({
    "conv_forward", "conv_sum_forward", "conv_backward_data", "conv_backward_weights", "deconv_forward",
    "deconv_backward_data", "deconv_backward_weights",
})  # fmt: skip
"""Those of them that know it of images with three spatial axes, too."""

_FOLDED: dict[str, tuple[int, ...]] = {
    "batch_norm_forward": (0, 1, 2), "batch_norm_given": (0, 1, 2), "batch_norm_inference": (0, 1),
    "batch_norm_moments": (0,), "batch_norm_sums": (0, 3), "batch_norm_backward_given": (0, 4, 5),
    "batch_norm_backward": (0, 2, 3), "batch_norm_backward_global": (0, 1), "batch_norm_scale_backward": (0, 4, 5),
    "scale_forward": (0, 3),
    "scale_backward_data": (0, 2), "scale_backward_gamma": (0, 1), "scale_backward_beta": (0,), "bias_forward": (0, 2),
    "conv_backward_bias": (0,), "prelu_forward": (0, 2), "prelu_backward_data": (0, 2, 3),
    "prelu_backward_slope": (0, 1),
}  # fmt: skip
"""Ops on (outer, channels, inner), to which channels last is (outer * inner, channels, 1)."""

_ELEMENTWISE = frozenset({
    "relu_forward", "relu_backward", "sigmoid_forward", "sigmoid_backward", "tanh_forward", "tanh_backward",
    "elu_forward", "elu_backward", "power_forward", "power_backward", "copy", "sum_arrays", "eltwise_sum",
    "eltwise_sum_backward", "eltwise_prod", "eltwise_prod_backward", "relu6_forward", "relu6_backward",
    "swish_forward", "swish_backward", "clip_forward", "clip_backward", "multiply",
})  # fmt: skip

_BESIDE_NUMBERS = {"multiply": (0, 2)}
"""Of such an op with numbers, too, which operands are images."""

_TILES = frozenset({"tile_forward", "tile_backward"})
"""Ops on (outer, inner) and (outer, tiles, inner); of channels they are on (images * positions, channels)."""

_ALONG_AXIS = frozenset({"concat_forward", "concat_backward", "slice_forward", "slice_backward"})

IMAGES = (4, 5)
"""Axes of arrays that may lie channels last."""

_SEEDS = frozenset({"conv_forward", "conv_backward_data", "conv_backward_weights"})
"""The ops for whose sake it is done."""


def is_faster(calls: Sequence[Call], device: Device) -> bool:
    """Whether a net of these calls is faster on the device with its images channels last.

    Where the device says so, not if its small convolutions lose by it (`_stays`). Where it does not say, by what its
    convolutions took when their algorithms were chosen. Only a net with groups is looked at so: in full precision cuDNN
    turns the arrays over to compute, which pays for groups alone.
    """
    seeds = [call for call in calls if call.op in _SEEDS]
    known = getattr(device, "channels_last", False)
    if known is not None:
        return bool(known) and not (seeds and _stays(seeds, device))
    if any(is_half(call.operand(0).blob.dtype) for call in seeds):
        return True  # tensor cores want them so
    makers = [(call, make) for call in seeds if (make := _rewriting(call)) is not None]
    if all(call.attributes["group"] == 1 for call, _ in makers):
        return False
    usual = _total((call for call, _ in makers), device)
    # of a small net the host's time counts, and another search would take long
    return usual >= _MEASURED_FROM and _total((make() for _, make in makers), device) < _WORTH * usual


def _stays(convolutions: Sequence[Call], device: Device) -> bool:
    """Whether a net of small convolutions is no slower with its images as they are: our own kernels take either order,
    and other ops then turn nothing over."""
    from blobmem.ops.cuda.conv import are_small

    fit, ours = are_small(((str(each.op), _specs(each), each.attributes) for each in convolutions), device)
    if ours or not fit:
        return ours
    makers = [_rewriting(call) for call in convolutions]
    last = _total((make() if make else call for call, make in zip(convolutions, makers, strict=True)), device)
    return _total(convolutions, device) <= last + _TURNS * len(convolutions)


def _total(convolutions: Iterable[Call], device: Device) -> float:
    """Milliseconds of them all; NaN if one's are not known."""
    from blobmem.ops.cuda.conv import milliseconds

    times = [milliseconds(str(each.op), _specs(each), each.attributes, device) for each in convolutions]
    return sum(math.nan if ms is None else ms for ms in times)


def _specs(call: Call) -> list[ArraySpec | None]:
    return [None if each is None else ArraySpec(tuple(each.op_shape), each.blob.dtype) for each in call.operands]


class _Known:
    """What is known of a call: what makes its channels-last version, if it has one, and that."""

    __slots__ = ("_last", "call", "make")

    def __init__(self, call: Call) -> None:
        self.call, self.make = call, _rewriting(call)
        self._last: Call | None = None

    def made(self) -> Call:
        """The version, the same one while the call itself stays as it is."""
        call, last = self.call, self._last
        assert self.make is not None
        if last is None or (last.stream, last.together, last.layer) != (call.stream, call.together, call.layer):
            last = self._last = self.make()
        return last


_known: contextvars.ContextVar[dict[int, _Known] | None] = contextvars.ContextVar("_known", default=None)


@contextlib.contextmanager
def remembering() -> Iterator[None]:
    """Meanwhile `channels_last` remembers what becomes of calls, as no array gets another shape: plans that are tried
    have most calls in common."""
    token = _known.set({})
    try:
        yield
    finally:
        _known.reset(token)


def _known_of(calls: Iterable[Call]) -> list[_Known]:
    known = _known.get()
    if known is None:
        return [_Known(call) for call in calls]
    if len(known) > _MOST_KNOWN:
        known.clear()
    result = []
    for call in calls:
        found = known.get(id(call))
        if found is None:
            found = known[id(call)] = _Known(call)  # which keeps the call, so that no other has its id
        result.append(found)
    return result


def channels_last(calls: Sequence[Call]) -> list[Call]:
    """The calls, those on images rewritten."""
    known = _known_of(calls)
    makers = [each.make for each in known]
    given = (operand for call in calls for operand in call.present() if operand.form is not None)
    chosen: set[Place] = {*map(_place, given)}
    waiting = {id(call): _places(call) for call, make in zip(calls, makers, strict=True) if make is not None}
    for call in calls:
        if call.op in _SEEDS:
            chosen.update(waiting.get(id(call), ()))
    rewritten: set[int] = set()
    found = True
    while found:
        found = False
        for each, places in waiting.items():
            if each not in rewritten and not chosen.isdisjoint(places):
                rewritten.add(each)
                chosen.update(places)
                found = True
    users: dict[Place, list[Call]] = {}
    for call in (call for call in calls if id(call) in rewritten):
        for place in waiting[id(call)]:
            users.setdefault(place, []).append(call)
    result = [each.made() if each.make is not None and id(each.call) in rewritten else each.call for each in known]
    result = [_turning(old, new, users) if new is not old else old for old, new in zip(calls, result, strict=True)]
    return _with_copies(result)


def _with_copies(calls: list[Call]) -> list[Call]:
    """The calls, those that copy parts of what lies channels last to the host and back rewritten, too."""
    copies = [at for at, each in enumerate(calls) if each.op in ("evict", "fetch")]
    if all(calls[at].operand(0).part is None or calls[at].op == "fetch" for at in copies):
        return calls  # others are told how what they copy lies
    last = {_place(operand) for call in calls for operand in call.present() if operand.form is not None}
    homes = set[SyncedMemory]()  # of what is copied so
    for at in copies:
        each, home = calls[at], calls[at].attributes["home"]
        shape = _image(each.operand(0))
        if shape is not None and (home in homes or (each.op == "evict" and _place(each.operand(0)) in last)):
            homes.add(home)
            calls[at] = _with(each, {0: shape}, _last)
    return calls


def _turning(old: Call, new: Call, users: Mapping[Place, list[Call]]) -> Call:
    """The call, channels last; or for a convolution over a net's images, which only such read, one that turns them over
    by itself: tensor cores take no less than 16 bytes of channels anyway."""
    if old.op not in _OVER_IMAGES:
        return new
    x = old.operand(0)
    place = _place(x)
    over = all(each.op in _OVER_IMAGES and _places(each).index(place) == 0 for each in users[place])
    if not over or x.op_shape[1] >= 16 // x.blob.dtype.itemsize or new.operand(0).form is None:
        return new
    return new.over((x, *new.operands[1:]), {**new.attributes, "layout": "NCHW to NHWC"})


_OVER_IMAGES = frozenset({"conv_forward", "conv_backward_weights"})
"""The ops that know the layout "NCHW to NHWC", of their first operand."""

_MOVED: dict[int, Any] = {1: np.uint8, 2: np.float16, 4: np.float32}
"""What an array is moved as, whatever it stands for, by the bytes of an element; masks may be in bytes."""

_MOST_KNOWN = 1 << 15
"""Calls that are remembered at a time: with their versions they take a few KiB of the host each."""

_MEASURED_FROM = 2.0  # ms that a net's convolutions take
_TURNS = 0.004  # ms for what is turned over, widened and narrowed around a small convolution
_WORTH = 0.95  # of the convolutions' time: the rest pays for turning arrays over where other ops want them


def _positions(call: Call) -> Iterable[int]:
    op = str(call.op)
    positions = _POSITIONS.get(op) or _FOLDED.get(op) or _BESIDE_NUMBERS.get(op) or range(len(call.operands))
    return (at for at in positions if call.operands[at] is not None)


def _places(call: Call) -> list[Place]:
    return [_place(call.operand(at)) for at in _positions(call)]


def _place(operand: Operand) -> Place:
    """That of all the array, whose parts lie in the same order."""
    return operand.memory, operand.offset - (operand.part[0] * operand.nbytes if operand.part else 0)


def _rewriting(call: Call) -> Callable[[], Call] | None:
    """What makes the call's channels-last version; None if it has none."""
    op = call.op
    if not isinstance(op, str):
        return None
    forms = {at: _image(call.operands[at]) for at in _positions(call)}
    axes = IMAGES if op in _VOLUMES else IMAGES[:1]
    if not forms or any(form is None for form in forms.values()):
        return None
    if op in _POSITIONS and all(len(call.operand(at).op_shape) in axes for at in forms):
        return lambda: _with(call, forms, _last, layout="NHWC")
    if op in _FOLDED and all(_is_folded(call.operand(at).op_shape, shape) for at, shape in forms.items()):
        return lambda: _with(call, forms, lambda s: (s[0] * math.prod(s[2:]), s[1], 1))
    if op in _ALONG_AXIS and call.attributes["axis"] == 1:
        return lambda: _with(call, forms, _last, axis=len(call.operand(0).blob.shape) - 1)
    if op in _TILES and _are_channels(call, forms):
        once = min(shape[1] for shape in forms.values() if shape is not None)
        return lambda: _with(call, forms, lambda s: (s[0] * math.prod(s[2:]), *_tiles(s[1], once)))
    if op in _ELEMENTWISE and len(set(forms.values())) == 1:
        return lambda: _with(call, forms, _last)
    return None


def _image(operand: Operand | None) -> Shape | None:
    """The (images, channels, spatial...) of an operand; None for anything else."""
    if operand is None or len(operand.blob.shape) not in IMAGES or not operand.blob.count:
        return None
    if operand.blob.dtype.itemsize not in _MOVED:
        return None
    return operand.array_shape


def _is_folded(shape: Shape, image: Shape | None) -> bool:
    assert image is not None
    return shape == image or shape == (image[0], image[1], math.prod(image[2:]))


def _are_channels(call: Call, forms: Mapping[int, Shape | None]) -> bool:
    """Whether a tiling repeats images' channels, and those more than once."""
    once, tiled = sorted((shape for shape in forms.values() if shape is not None), key=lambda shape: shape[1])
    outer, inner = next(operand.op_shape for operand in call.present() if len(operand.op_shape) == 2)
    return once[1] < tiled[1] and (outer, inner) == (once[0], math.prod(once[1:])) and once[2:] == tiled[2:]


def _tiles(channels: int, once: int) -> Shape:
    return (once,) if channels == once else (channels // once, once)


def _last(shape: Shape) -> Shape:
    return (shape[0], *shape[2:], shape[1])


def _with(call: Call, forms: dict[int, Any], shaped: Callable[[Shape], Shape], **attributes: Any) -> Call:
    operands = list(call.operands)
    for at, shape in forms.items():
        operand = call.operand(at)
        images, channels, positions = shape[0], shape[1], math.prod(shape[2:])
        # of one channel, or one position, the two orders are the same
        form = (images, channels, positions, operand.blob.dtype) if channels > 1 and positions > 1 else None
        operands[at] = Operand(
            operand.blob, operand.diff, operand.intent, shaped(shape), operand.accumulate, form, operand.part
        )
    return call.over(tuple(operands), {**call.attributes, **attributes})


def reordered_of(memory: SyncedMemory) -> Reordered:
    """What keeps a memory's bytes channels last, made if it was not."""
    reordered = memory.reordered
    if reordered is None:
        array = SyncedMemory(0, memory.device, name=f"{memory.name} (channels last)")
        reordered = memory.reordered = Reordered(memory, turn, array)
    return reordered


def turn(device: Any, source: int, target: int, form: Form, back: bool) -> None:
    """Copy an array, its channels made last or, `back`, second again (`memory.reordered.Turn`)."""
    from blobmem.ops.cuda import layout

    images, channels, positions, dtype = form
    dtype = np.dtype(_MOVED[dtype.itemsize])
    first, last = (images, channels, positions), (images, positions, channels)
    if back:
        layout.to_channels_first(device.as_array(source, last, dtype), device.as_array(target, first, dtype))
    else:
        layout.to_channels_last(device.as_array(source, first, dtype), device.as_array(target, last, dtype))
