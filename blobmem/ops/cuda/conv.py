"""Convolution and its transpose by cuDNN's plans, and by our own kernels where it has none.

Operands and keywords as in `blobmem.ops.host.conv`. Which plan runs is found when the workspace is asked for
(`conv_plans`); the transpose's forward pass is a convolution's gradient for the data, and the other way round. With
`layout="NHWC"`, of two or three spatial axes, x, y and their gradients have shapes (images, spatial..., channels);
weights and their gradients stay as the file has them, and are turned over in the workspace where a plan wants that.
With `layout="NCHW to NHWC"` x, too, is as the file has it, and is turned over in the workspace, or read as it is
(`conv_first`). Weights that are `turned` have (outputs, taps..., channels) in memory already, whatever their shape
says.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from blobmem.devices.cuda.array import CudaArray
from blobmem.dtypes import is_half
from blobmem.errors import DeviceError
from blobmem.ops.cuda import channels, conv_first, conv_normed, conv_slabs
from blobmem.ops.cuda.algorithms import Key
from blobmem.ops.cuda.conv_direct import (
    add,
    add_bias,
    add_sum,
    direct_backward_data,
    direct_backward_weights,
    direct_forward,
    few_outputs_forward,
    has_few_outputs,
    take_channels_last,
)
from blobmem.ops.cuda.conv_plans import chosen, is_small, key_of, plan_ms, plan_of, room_of, within
from blobmem.ops.cuda.conv_slabs import slabs_of
from blobmem.ops.cuda.conv_small import Small, fits
from blobmem.ops.cuda.cudnn import RELU, SUM, Plan
from blobmem.ops.cuda.layout import (
    aligned,
    fold,
    in_layout,
    to_channels_first,
    to_channels_last,
    turned_weights,
    unfold,
    weights_beside,
    weights_turn,
)
from blobmem.ops.cuda.neuron import relu_forward
from blobmem.ops.registry import ArraySpec, op

Shape = tuple[int, ...]
TURNS = "NCHW to NHWC"
"""The layout of images that only convolutions read, beside channels last of all that comes of them."""

Window = tuple[Shape, Shape, Shape, int, str]
"""Stride, padding, dilation, group and layout."""


_WINDOW = ("stride", "pad", "dilation", "group", "layout")


def _window(stride: Shape, pad: Shape, dilation: Shape, group: int, layout: str = "NCHW") -> Window:
    return stride, pad, dilation, group, layout


def _keywords(window: Window) -> dict[str, Any]:
    return dict(zip(_WINDOW, window, strict=True))


def forward_bytes(x: ArraySpec, w: ArraySpec, b: ArraySpec | None, _: ArraySpec, *, device: Any,
                  turned: bool = False, room: int | None = None, **given: Any) -> int:  # fmt: skip
    """Workspace of `forward`, with ReLU or without."""
    return _forward_bytes(_forward_direction(b), x, w, device, turned, room, _window(**given))


def forward_sum_bytes(x: ArraySpec, w: ArraySpec, b: ArraySpec | None, other: ArraySpec, y: ArraySpec, *, device: Any,
                      relu: bool, turned: bool = False, room: int | None = None, **given: Any) -> int:  # fmt: skip
    """Workspace of `forward` with a sum."""
    return _forward_bytes(_summed_direction(b, relu, other, y), x, w, device, turned, room, _window(**given))


def normalized_bytes(x: ArraySpec, w: ArraySpec, b: ArraySpec | None, other: ArraySpec | None, y: ArraySpec,
                     kept: ArraySpec | None, *_: Any, device: Any, relu: bool, turned: bool = False,
                     room: int | None = None, **given: Any) -> int:  # fmt: skip
    """Workspace of `forward` behind weights and a bias that are made for a batch norm (`room_to_normalize`); none where
    that is done at once (`conv_normed`)."""
    if conv_normed.fits(x, w, 1 + (other is not None) + (kept is not None), _window(**given), device):
        return int(conv_normed.room(0)(x, w, turned=turned))
    direction = _normalized_direction(other, kept, relu)
    return sum(_sizes_to_normalize(w)) + _forward_bytes(direction, x, w, device, turned, room, _window(**given))


def _normalized_direction(other: ArraySpec | None, kept: ArraySpec | None, relu: bool) -> str:
    """The direction of a convolution that is normalised as it is made; the rest comes behind what is kept."""
    return _forward_direction(True, relu, True) if other is not None and kept is None else "forward+bias"


def _sizes_to_normalize(w: Any) -> tuple[int, int]:
    return aligned(w.nbytes), aligned(w.shape[0] * w.dtype.itemsize)


def room_to_normalize(w: CudaArray, ws: CudaArray | None) -> tuple[CudaArray, CudaArray, CudaArray]:
    """Where ws begins an array like the weights and one for a bias, and the rest of ws."""
    weights = weights_beside(w, ws)
    assert ws is not None
    bias = ws.part(aligned(w.nbytes), (w.shape[0],), w.dtype)
    front = sum(_sizes_to_normalize(w))
    return weights, bias, ws.part(front, (ws.nbytes - front,), np.uint8)


def _forward_bytes(direction: str, x: ArraySpec, w: ArraySpec, device: Any, turned: bool, room: int | None,
                   window: Window) -> int:  # fmt: skip
    if _is_without_plan(direction, x, w, window, device):
        return 0
    x, window, images = _turned_images(x, window)
    wide = _wide(direction, x, w, window, device, room)
    if wide and (nbytes := wide.workspace_bytes(direction, device, room)):
        return nbytes
    key = key_of(direction, device, x, w, *window)
    slabs = slabs_of(key, room, device)
    plan = _plan_bytes(within(key, room, device), device, w, turned=turned) if slabs is None else slabs.nbytes
    return images + plan


def _data_bytes(dx: ArraySpec, w: ArraySpec, *, device: Any, room: int | None = None, **window: Any) -> int:
    key = key_of("data", device, dx, w, **window)
    slabs = slabs_of(key, room, device)
    return _plan_bytes(within(key, room, device), device, w) if slabs is None else slabs.nbytes


def _weights_bytes(x: ArraySpec, dw: ArraySpec, *, device: Any, accumulate: bool = False, room: int | None = None,
                   **given: Any) -> int:  # fmt: skip
    """For plans, which cannot add to what is there, dw comes first."""
    window = _window(**given)
    if is_first(x, dw, window, device):
        return conv_first.weights_bytes(x, dw, _most(device, room))
    x, window, images = _turned_images(x, window)
    wide = _wide("weights", x, dw, window, device, room)
    if wide and (nbytes := wide.workspace_bytes("weights", device, room)):
        return nbytes
    key = key_of("weights", device, x, dw, *window)
    slabs = slabs_of(key, room, device)
    plan = _plan_bytes(within(key, room, device), device, dw, accumulate) if slabs is None else slabs.nbytes
    return images + plan


_FIRST = frozenset({"forward", "forward+bias", RELU})


def is_first(x: Any, w: Any, window: Window, device: Any) -> bool:
    """Whether kernels of our own take images as they are to channels last."""
    return window[-1] == TURNS and conv_first.fits(x, w, window, device)


def _is_without_plan(direction: str, x: Any, w: Any, window: Window, device: Any) -> bool:
    """Whether a forward pass is always one kernel of our own, which takes no workspace."""
    return direction in _FIRST and (is_first(x, w, window, device) or has_few_outputs(x, w, window))


def _most(device: Any, room: int | None) -> int | None:
    """Bytes of workspace that a call may take."""
    return min((most for most in (room, device.workspace_limit) if most is not None), default=None)


def _turned_images(x: Any, window: Window) -> tuple[Any, Window, int]:
    """What a convolution sees of images that it turns over, and the bytes that this takes; others as they are."""
    if window[-1] != TURNS:
        return x, window, 0
    return ArraySpec(in_layout(x.shape, "NHWC"), x.dtype), (*window[:-1], "NHWC"), aligned(x.nbytes)


def _turn_images(x: CudaArray, ws: CudaArray | None) -> tuple[CudaArray, CudaArray]:
    """Images in the other order, where ws begins, and the rest of ws."""
    held, needed = 0 if ws is None else ws.nbytes, aligned(x.nbytes)
    if ws is None or held < needed:
        raise DeviceError(f"a convolution's images need {needed} bytes of workspace but were given {held}")
    turned = ws.part(0, in_layout(x.shape, "NHWC"), x.dtype)
    to_channels_last(x, turned)
    return turned, ws.part(needed, (held - needed,))


def _plan_bytes(key: Key, device: Any, w: ArraySpec, apart: bool = False, turned: bool = False) -> int:
    """What a plan takes, behind weights in its order if that is another one, or if they are wanted `apart`.

    Our own kernels take weights in the file's order, which those that are `turned` have not.
    """
    room = room_of(key, device)
    if room is None:
        return aligned(w.nbytes) if turned else 0
    if not room.turns:
        return room.nbytes + (aligned(w.nbytes) if turned else 0)
    apart = apart or (key.direction == "weights" and room.parts > 1)
    return room.nbytes + (aligned(w.nbytes) if apart or (weights_turn(w.shape, key.layout) and not turned) else 0)


def milliseconds(op: str, specs: Sequence[Any], attributes: Mapping[str, Any], device: Any) -> float | None:
    """What a convolution's plan took when it was chosen; None where our own plain kernels run, or nothing is known."""
    return plan_ms(_key_of_call(op, specs, attributes, device), device)


def known_ms(op: str, specs: Sequence[Any], attributes: Mapping[str, Any], device: Any) -> float | None:
    """What the plan of a convolution, fused or not, took when it was chosen for a GPU of that model; None if none was.

    Nothing is searched for.
    """
    if op.startswith("deconv"):
        return None
    stated = {name: attributes[name] for name in _WINDOW if name in attributes}
    if op in ("conv_forward", "conv_relu_forward", "conv_sum_forward"):
        other, y = specs[3:5] if op == "conv_sum_forward" else (None, None)
        at, direction = (0, 1), _summed_direction(specs[2], bool(attributes.get("relu")), other, y)
    else:
        at, direction = ((2, 1), "data") if op == "conv_backward_data" else ((0, 2), "weights")
    w, window = specs[at[1]], _window(**stated)
    x = specs[at[0]]
    if is_first(x, w, window, device) or _is_without_plan(direction, x, w, window, device):
        return None
    x, window, _ = _turned_images(x, window)
    ways = () if direction == "data" else _ways(x, w, window, device)
    runs: list[tuple[ArraySpec, ArraySpec, Window]] = [each[:3] for each in ways] or [(x, w, window)]
    room = attributes.get("room")
    keys = [key_of(direction, device, x, w, *window) for x, w, window in runs]
    choices = [chosen(key, device, room) for key in keys]
    known = [None if choice is None else choice.ms for choice in choices] + [conv_slabs.known_ms(keys[0], room, device)]
    return min((ms for ms in known if ms is not None), default=None)


def are_small(calls: Iterable[tuple[str, Sequence[Any], Mapping[str, Any]]], device: Any) -> tuple[bool, bool]:
    """Whether our own small kernels could compute all these convolutions, and whether they do: given are ops, specs of
    their operands, and attributes."""
    keys = [_key_of_call(*call, device) for call in calls]
    fit = all(map(fits, keys))
    return fit, fit and all(is_small(key, device) for key in keys)


def _key_of_call(op: str, specs: Sequence[Any], attributes: Mapping[str, Any], device: Any) -> Key:
    window = _window(**attributes)
    if op == "conv_forward":
        direction, x, w = _forward_direction(specs[2]), specs[0], specs[1]
    elif op == "conv_backward_data":
        direction, x, w = "data", specs[2], specs[1]
    else:
        direction, x, w = "weights", specs[0], specs[2]
    return key_of(direction, device, x, w, *window)


def _forward_direction(b: Any, relu: bool = False, summed: bool = False) -> str:
    """The direction of a forward pass; ReLU alone behind it is none of its business."""
    if summed:
        return "forward" + "+bias" * (b is not None) + SUM + "+relu" * relu
    return "forward" if b is None else RELU if relu else "forward+bias"


def _summed_direction(b: Any, relu: bool, other: Any, y: Any) -> str:
    """The direction of a forward pass with a sum, if there is another array; tiles, of which plans know nothing, are
    added behind it."""
    tiled = other is not None and other.size < y.size
    return _forward_direction(b, relu and not tiled, other is not None and not tiled)


def _run(plan: Plan, arrays: tuple[CudaArray, ...], ws: CudaArray | None, offset: int = 0) -> None:
    """Queue all parts of a plan with its workspace from `offset` on."""
    for part in range(plan.parts):
        _run_part(plan, part, arrays, ws, offset)


def _run_part(plan: Plan, part: int, arrays: tuple[CudaArray, ...], ws: CudaArray | None, offset: int) -> None:
    if plan.workspace and (ws is None or ws.nbytes < offset + plan.workspace):
        held = 0 if ws is None else ws.nbytes
        raise DeviceError(f"a convolution needs {offset + plan.workspace} bytes of workspace but was given {held}")
    plan.run([array.address for array in arrays], 0 if ws is None else ws.address + offset, part)


def forward(x: CudaArray, w: CudaArray, b: CudaArray | None, y: CudaArray, ws: CudaArray | None, window: Window,
            relu: bool = False, turned: bool = False, other: CudaArray | None = None,
            room: int | None = None) -> None:  # fmt: skip
    """`conv_forward`, plus `other` if there is one, or each of its tiles (`conv_direct.add_sum`), and with `relu`
    max(0, .) of that."""
    after = _After(b, other, relu, _summed_direction(b, relu, other, y))
    given, (seen, window, images) = window, _turned_images(x, window)
    if _is_without_plan(after.direction, x, w, given, x.device):
        if is_first(x, w, given, x.device):
            conv_first.forward(x, w, b, y, relu=after.relu_first, turned=turned)
        else:
            few_outputs_forward(x, w, b, y, relu=after.relu_first)
        after.add_tiles(y, window[-1])
        return
    wide = _wide(after.direction, seen, w, window, x.device, room)
    if wide and wide.forward(x, w, y, ws, after, bool(images), turned, room):
        return
    if images:
        x, ws = _turn_images(x, ws)
    key = key_of(after.direction, x.device, x, w, *window)
    slabs = slabs_of(key, room, x.device)
    if slabs is not None:
        slabs.forward(x, w, y, key.pad[0], ws, turned)
        after.run(y, window[-1])
        return
    plan = plan_of(within(key, room, x.device), x.device)
    if turned and (plan is None or isinstance(plan, Small)):
        to_channels_first(w, w := weights_beside(w, ws))
    if plan is None:
        direct_forward(x, w, b, y, **_keywords(window))
        after._replace(b=None).run(y, window[-1])
        return
    if isinstance(plan, Small):
        plan.forward(x, w, b, y, after.relu_first)
        after.add_tiles(y, window[-1])
        return
    w, offset = (w, 0) if turned else turned_weights(w, ws, window[-1])
    _run_forward(plan, x, w, y, ws, offset, window[-1], after)


class _After(NamedTuple):
    """What is done to what a convolution makes: a bias and another array, or its tiles, are added, and ReLU is taken;
    and the direction of plans that do so, but for tiles."""

    b: CudaArray | None
    other: CudaArray | None
    relu: bool
    direction: str

    @property
    def tiles(self) -> bool:
        """Whether tiles are added, behind any plan."""
        return self.other is not None and SUM not in self.direction

    @property
    def relu_first(self) -> bool:
        """Whether ReLU is taken with no tiles to be added before."""
        return self.relu and not self.tiles

    def add_tiles(self, y: CudaArray, layout: str) -> None:
        """Do what is left where all but tiles was added, if there are any."""
        if self.tiles:
            self._replace(b=None).run(y, layout)

    def run(self, y: CudaArray, layout: str) -> None:
        """Do it in one pass."""
        if self.other is not None:
            add_sum(self.b, self.other, y, layout, self.relu)
        elif self.b is not None:
            add_bias(self.b, y, layout, self.relu)
        elif self.relu:
            relu_forward(y, y, slope=0.0)


def _run_forward(plan: Plan, x: CudaArray, w: CudaArray, y: CudaArray, ws: CudaArray | None, offset: int, layout: str,
                 after: _After) -> None:  # fmt: skip
    """Queue a plan, and what it leaves to do."""
    if not plan.fused:
        _run(plan, (x, w, y), ws, offset)
        after.run(y, layout)
        return
    beside = after.b, None if after.tiles else after.other
    _run(plan, (x, w, y, *(each for each in beside if each is not None)), ws, offset)
    after.add_tiles(y, layout)
    if after.relu_first and not plan.relu:
        relu_forward(y, y, slope=0.0)


def _backward_data(dy: CudaArray, w: CudaArray, b: CudaArray | None, dx: CudaArray, ws: CudaArray | None,
                   window: Window, room: int | None = None) -> None:  # fmt: skip
    """dx from dy; with `b`, the outputs of a deconvolution of dy."""
    key = key_of("data", dx.device, dx, w, *window)
    slabs = slabs_of(key, room, dx.device)
    if slabs is not None:
        slabs.backward_data(dy, w, dx, key.pad[0], ws)
        return
    plan = plan_of(within(key, room, dx.device), dx.device)
    if plan is None:
        direct_backward_data(dy, w, b, dx, **_keywords(window))
        return
    if isinstance(plan, Small):
        plan.forward(dy, w, b, dx)
        return
    w, offset = turned_weights(w, ws, window[-1])
    _run(plan, (dx, w, dy), ws, offset)
    if b is not None:
        add_bias(b, dx, window[-1])


def _backward_weights(x: CudaArray, dy: CudaArray, dw: CudaArray, ws: CudaArray | None, accumulate: bool,
                      window: Window, room: int | None = None) -> None:  # fmt: skip
    if is_first(x, dw, window, x.device):
        conv_first.weights(x, dy, dw, ws, accumulate=accumulate, most=_most(x.device, room))
        return
    seen, window, images = _turned_images(x, window)
    wide = _wide("weights", seen, dw, window, x.device, room)
    if wide and wide.backward_weights(x, dy, dw, ws, accumulate, bool(images), room):
        return
    if images:
        x, ws = _turn_images(x, ws)
    key = key_of("weights", x.device, x, dw, *window)
    slabs = slabs_of(key, room, x.device)
    if slabs is not None:
        slabs.backward_weights(x, dy, dw, key.pad[0], ws, accumulate)
        return
    plan = plan_of(within(key, room, x.device), x.device)
    turns = weights_turn(dw.shape, window[-1])
    if plan is None:
        direct_backward_weights(x, dy, dw, accumulate=accumulate, **_keywords(window))
    elif isinstance(plan, Small):
        plan.weights(x, dy, dw, ws, accumulate)
    elif turns or accumulate or plan.parts > 1:
        fresh = weights_beside(dw, ws)
        for part in range(plan.parts):
            adds = accumulate or part > 0
            target = fresh if turns or adds else dw
            _run_part(plan, part, (x, target, dy), ws, aligned(dw.nbytes))
            if turns:
                take_channels_last(fresh, dw, accumulate=adds)
            elif adds:
                add(fresh, dw)
    else:
        _run(plan, (x, dw, dy), ws)


class _Wide(NamedTuple):
    """A convolution of few channels as tensor cores want it: channels last, in whole packs of 16 bytes, zeros behind.

    The first convolution of most nets has 3, and would take as long as a dozen others. Squares of `fold` pixels, the
    stride's if not 1, may be one of x each: that has all their channels, the taps are fewer, and the stride is 1. Of
    volumes, which have more taps, a pixel of x has all that the last axis of a window sees.

    Attributes:
        x, w, window: of the convolution that takes its place.
        pad: the zeros above and left of the images that are in x.
        columns: from a square to the next, and of one that count; None for squares that lie side by side.
    """

    x: ArraySpec
    w: ArraySpec
    window: Window
    fold: Shape
    pad: Shape
    columns: tuple[int, int] | None = None

    def _key(self, direction: str, device: Any, room: int | None) -> Key:
        return within(key_of(direction, device, self.x, self.w, *self.window), room, device)

    def milliseconds(self, direction: str, device: Any, room: int | None) -> float:
        """What `plan` took when it was chosen; infinity where there is none, or it is not known."""
        key = self._key("forward+bias" if direction == RELU else direction, device, room)
        ms = plan_ms(key, device)
        return math.inf if ms is None or is_small(key, device) else ms

    def plan(self, direction: str, device: Any, room: int | None = None) -> Plan | None:
        """None where none takes the channels of zeros, or our own kernels would, which are faster without these."""
        plan = plan_of(self._key(direction, device, room), device)
        return None if isinstance(plan, Small) else plan

    def workspace_bytes(self, direction: str, device: Any, room: int | None = None) -> int:
        """0 where there is no `plan`."""
        taken = room_of(self._key(direction, device, room), device)
        return 0 if taken is None or not taken.turns else self._places()[-1] + taken.nbytes

    def _places(self) -> tuple[int, int]:
        """Where in ws the weights begin, behind the images, and where they end."""
        return (w := aligned(self.x.nbytes)), w + aligned(self.w.nbytes)

    def _arrays(self, ws: CudaArray | None) -> tuple[CudaArray, CudaArray]:
        at, stop = self._places()
        if ws is None or ws.nbytes < stop:
            raise DeviceError(f"a convolution needs {stop} bytes of workspace but was given {ws and ws.nbytes}")
        return ws.part(0, self.x.shape, self.x.dtype), ws.part(at, in_layout(self.w.shape, "NHWC"), self.w.dtype)

    def forward(self, x: CudaArray, w: CudaArray, y: CudaArray, ws: CudaArray | None, after: _After, planes: bool,
                turned: bool, room: int | None) -> bool:  # fmt: skip
        """Whether there is a plan, which it then ran. `planes`: x has its channels second."""
        plan = self.plan(after.direction, x.device, room)
        if plan is None:
            return False
        images, wide = self._arrays(ws)
        fold(x, images, self.fold, self.pad, last=not planes, columns=self.columns)
        fold(w.reshape(*in_layout(w.shape, "NHWC")) if turned else w, wide, self.fold, (0, 0), last=turned)
        _run_forward(plan, images, wide, y, ws, self._places()[-1], self.window[-1], after)
        return True

    def backward_weights(self, x: CudaArray, dy: CudaArray, dw: CudaArray, ws: CudaArray | None, accumulate: bool,
                         planes: bool, room: int | None) -> bool:  # fmt: skip
        """Whether there is a plan, which it then ran. `planes`: x has its channels second."""
        plan = self.plan("weights", x.device, room)
        if plan is None:
            return False
        images, wide = self._arrays(ws)
        fold(x, images, self.fold, self.pad, last=not planes, columns=self.columns)
        for part in range(plan.parts):
            _run_part(plan, part, (images, wide, dy), ws, self._places()[-1])
            unfold(wide, dw, self.fold, accumulate=accumulate or part > 0)
        return True


def _wide(direction: str, x: Any, w: Any, window: Window, device: Any, room: int | None = None) -> _Wide | None:
    """What takes the place of a convolution of few channels last; of two the faster, the first if that is not known."""
    ways = _ways(x, w, window, device)
    if len(ways) < 2:
        return ways[0] if ways else None
    return min(ways, key=lambda each: each.milliseconds(direction, device, room))


def _ways(x: Any, w: Any, window: Window, device: Any) -> tuple[_Wide, ...]:
    if (
        not w.shape[1] % (16 // w.dtype.itemsize)
        or len(x.shape) not in (4, 5)
        or window[-1] != "NHWC"
        or window[-2] > 1
        or not (is_half(w.dtype) or (device.math == "tf32" and w.dtype == np.float32))
    ):
        return ()
    return (_widened if len(x.shape) == 4 else _widened_volumes)(x.shape, w.shape, x.dtype, window)


@functools.lru_cache(256)
def _widened_volumes(x: Shape, w: Shape, dtype: np.dtype, window: Window) -> tuple[_Wide, ...]:
    """With the taps of the last axis as channels, unless these are apart."""
    stride, pad, dilation, group, layout = window
    (outputs, channels, *taps), few = w, math.gcd(w[1], pack := 16 // dtype.itemsize)
    if dilation[-1] != 1:
        return ()
    square = -(-taps[-1] * few // pack) * pack // few  # pixels, whose channels are whole packs
    across = (x[3] + 2 * pad[-1] - taps[-1]) // stride[-1] + 1
    images = (*x[:3], across, square * channels)
    weights = (outputs, square * channels, *taps[:-1], 1)
    own: Window = (*stride[:-1], 1), (*pad[:-1], 0), dilation, group, layout
    specs = ArraySpec(images, dtype), ArraySpec(weights, dtype)
    return (_Wide(*specs, own, (1, square), (0, pad[-1]), (stride[-1], taps[-1])),)


@functools.lru_cache(256)
def _widened(x: Shape, w: Shape, dtype: np.dtype, window: Window) -> tuple[_Wide, ...]:
    """As it is, and where there is a stride folded."""
    stride, pad, dilation, group, layout = window
    (outputs, channels, *taps), pack = w, 16 // dtype.itemsize
    missing = -channels % pack
    images, weights = (*x[:3], x[3] + missing), (outputs, channels + missing, *taps)
    plain = _Wide(ArraySpec(images, dtype), ArraySpec(weights, dtype), window, (1, 1), (0, 0))
    square = math.prod(stride)
    if square == 1 or {*dilation} != {1} or any(k < s for k, s in zip(taps, stride, strict=True)):
        return (plain,)
    few = pack // math.gcd(pack, square)  # channels of a pixel are a multiple of this
    many = -(-channels // few) * few * square
    axes = list(zip(x[1:3], taps, stride, pad, strict=True))
    fewer = [-(-k // s) for _, k, s, _ in axes]
    sides = [(n + 2 * p - k) // s + -(-k // s) for n, k, s, p in axes]
    images, weights = (x[0], *sides, many), (outputs, many, *fewer)
    single: Window = (1, 1), (0, 0), dilation, group, layout
    return plain, _Wide(ArraySpec(images, dtype), ArraySpec(weights, dtype), single, stride, pad)


def _folded(dy: Any, db: Any) -> tuple[int, int, int]:
    return dy.shape[0], db.shape[0], math.prod(dy.shape[2:])


@op(family="cuda", workspace=forward_bytes)
def conv_forward(x: CudaArray, w: CudaArray, b: CudaArray | None, y: CudaArray, *, ws: CudaArray | None = None,
                 stride: Shape, pad: Shape, dilation: Shape, group: int, layout: str = "NCHW",
                 turned: bool = False, room: int | None = None) -> None:  # fmt: skip
    """y = x convolved with w, plus b per channel (None: no bias). A plan takes at most `room` bytes of workspace."""
    window = stride, pad, dilation, group, layout
    forward(x, w, b, y, ws, window, turned=turned, room=room)


@op(family="cuda", workspace=lambda dy, w, dx, **others: _data_bytes(dx, w, **others))
def conv_backward_data(dy: CudaArray, w: CudaArray, dx: CudaArray, *, ws: CudaArray | None = None, stride: Shape,
                       pad: Shape, dilation: Shape, group: int, layout: str = "NCHW",
                       room: int | None = None) -> None:  # fmt: skip
    """The gradient for x. A plan takes at most `room` bytes of workspace."""
    window = stride, pad, dilation, group, layout
    _backward_data(dy, w, None, dx, ws, window, room)


@op(family="cuda", workspace=lambda x, dy, dw, **others: _weights_bytes(x, dw, **others))
def conv_backward_weights(x: CudaArray, dy: CudaArray, dw: CudaArray, *, ws: CudaArray | None = None, stride: Shape,
                          pad: Shape, dilation: Shape, group: int, accumulate: bool, layout: str = "NCHW",
                          room: int | None = None) -> None:  # fmt: skip
    """The gradient for w. A plan takes at most `room` bytes of workspace."""
    window = stride, pad, dilation, group, layout
    _backward_weights(x, dy, dw, ws, accumulate, window, room)


@op(family="cuda", workspace=lambda dy, db, **_: channels.workspace_bytes(_folded(dy, db)))
def conv_backward_bias(dy: CudaArray, db: CudaArray, *, ws: CudaArray | None = None, accumulate: bool) -> None:
    """The gradient for a bias per channel: dy summed over images and positions; of deconvolutions too."""
    channels.sum_per_channel(_folded(dy, db), dy, None, db, ws, accumulate=accumulate)


@op(family="cuda", workspace=lambda x, w, b, y, **others: _data_bytes(y, w, **others))
def deconv_forward(x: CudaArray, w: CudaArray, b: CudaArray | None, y: CudaArray, *, ws: CudaArray | None = None,
                   stride: Shape, pad: Shape, dilation: Shape, group: int, layout: str = "NCHW") -> None:  # fmt: skip
    """y = the transpose of a convolution with w, applied to x, plus b per channel (None: no bias)."""
    window = stride, pad, dilation, group, layout
    _backward_data(x, w, b, y, ws, window)


@op(family="cuda", workspace=lambda dy, w, dx, **others: forward_bytes(dy, w, None, dx, **others))
def deconv_backward_data(dy: CudaArray, w: CudaArray, dx: CudaArray, *, ws: CudaArray | None = None, stride: Shape,
                         pad: Shape, dilation: Shape, group: int, layout: str = "NCHW") -> None:  # fmt: skip
    """The gradient for a deconvolution's x."""
    window = stride, pad, dilation, group, layout
    forward(dy, w, None, dx, ws, window)


@op(family="cuda", workspace=lambda x, dy, dw, **others: _weights_bytes(dy, dw, **others))
def deconv_backward_weights(x: CudaArray, dy: CudaArray, dw: CudaArray, *, ws: CudaArray | None = None, stride: Shape,
                            pad: Shape, dilation: Shape, group: int, accumulate: bool,
                            layout: str = "NCHW") -> None:  # fmt: skip
    """The gradient for a deconvolution's w."""
    window = stride, pad, dilation, group, layout
    _backward_weights(dy, x, dw, ws, accumulate, window)
