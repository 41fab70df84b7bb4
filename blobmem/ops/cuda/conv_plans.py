"""The plan that runs a convolution: found among the choices, or searched for by timing, and built for this thread."""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import Any, NamedTuple

import numpy as np

from blobmem.devices.cuda.array import CudaArray
from blobmem.dtypes import is_half
from blobmem.errors import DeviceError, OutOfDeviceMemory
from blobmem.ops.cuda import algorithms
from blobmem.ops.cuda.algorithms import DIRECT, Choice, Key, Registry, Shape
from blobmem.ops.cuda.conv_search import Search, room_within
from blobmem.ops.cuda.conv_small import SMALL, Small
from blobmem.ops.cuda.cudnn import MOST_AXES, RELU, Cudnn, Plan, parts_of
from blobmem.ops.cuda.layout import channels_first
from blobmem.ops.registry import ArraySpec

_log = logging.getLogger(__name__)

_WITH_LESS = {"forward+bias": "forward", "forward+bias+sum+relu": "forward+bias"}


def key_of(direction: str, device: Any, x: ArraySpec | CudaArray, w: ArraySpec | CudaArray, stride: Shape, pad: Shape,
           dilation: Shape, group: int, layout: str = "NCHW") -> Key:  # fmt: skip
    """The key of a convolution from x, which is in the layout, with weights w, in one of its directions.

    ValueError for channels last with other than two spatial axes.
    """
    return _key(direction, x.shape, w.shape, stride, pad, dilation, group, x.dtype, layout, device.math,
                device.deterministic, device.workspace_limit)  # fmt: skip


@functools.lru_cache(4096)
def _key(direction: str, x: Shape, w: Shape, stride: Shape, pad: Shape, dilation: Shape, group: int, dtype: np.dtype,
         layout: str, math: str, deterministic: bool, limit: int | None) -> Key:  # fmt: skip
    limit = algorithms.WORKSPACE_LIMIT if limit is None else limit
    return Key(direction, channels_first(x, layout), w, stride, pad, dilation, group, dtype.name, layout,
               dtype.name if is_half(dtype) else math, deterministic, limit)  # fmt: skip


class Room(NamedTuple):
    """Bytes of workspace that a plan takes, the number of parts that it takes the images in, and whether it is cuDNN's,
    for which weights are turned over."""

    nbytes: int
    parts: int
    turns: bool = True


def room_of(key: Key, device: Any) -> Room | None:
    """What a convolution's plan takes, None for our own plain kernels, which need no workspace.

    On a device with a GPU this searches for the plan and builds it; where that may not hold enough for a search, so
    that it is too small for the convolution, too, the limit is charged. Where there is no GPU the files are looked up;
    for a convolution that is in none the limit is charged, and the device is marked `uncertain`.
    """
    if not device.predicts:
        if _is_beyond(key, device):
            return Room(key.most, 2)
        plan = plan_of(key, device)
        if isinstance(plan, Small):
            return Room(plan.workspace, 1, turns=False)
        return None if plan is None else Room(plan.workspace, plan.parts)
    if not _known_to_cudnn(key):
        return None
    choice = _predicted(key, device)
    if choice is None:
        if not device.uncertain:
            _log.warning(
                "%s: no algorithm is known for some convolutions (%s, say): each is charged its limit of %.0f MiB",
                device.model, key.text, key.most / 2**20,
            )  # fmt: skip
            device.uncertain = True
        return Room(key.most, 2)  # several, as that takes more
    if choice.plan == DIRECT:
        return None
    return Room(choice.workspace, parts_of(choice.plan)[0], not choice.plan.startswith(SMALL))


def within(key: Key, room: int | None, device: Any) -> Key:
    """The key, or where the plan that it chooses takes more workspace than there is room for, that of what does not."""
    if room is None:
        return key
    usual = room_of(key._replace(direction="forward+bias") if key.direction == RELU else key, device)
    return key if usual is None or usual.nbytes <= room else key._replace(room=room)


def plan_ms(key: Key, device: Any) -> float | None:
    """What the plan for a key took when it was chosen; None where there is none, or it is not known."""
    if not _known_to_cudnn(key):
        return None
    if device.predicts:
        choice = _predicted(key, device)
    else:
        if _is_beyond(key, device) or plan_of(key, device) is None:
            return None
        registry = algorithms.registry(device.model, device.library("cudnn", Cudnn).version, key.math)
        less = _in_less(key, device)
        choice = registry.find(key) or (None if less is None else registry.find(less))
    return None if choice is None or choice.plan == DIRECT else choice.ms


def chosen(key: Key, device: Any, room: int | None = None) -> Choice | None:
    """What was chosen for a key on a GPU of the device's model, if it was; where that takes more workspace than there
    is room for, what was chosen for that room, if it is known. Nothing is searched for."""
    choice = _predicted(key, device)
    if room is not None and choice is not None and choice.workspace > room:
        return algorithms.predict(device.model, key.math, key._replace(room=room)) or choice
    return choice


def is_small(key: Key, device: Any) -> bool:
    """Whether our own small kernels compute a convolution, as far as that is known."""
    if not device.predicts:
        return not _is_beyond(key, device) and isinstance(plan_of(key, device), Small)
    choice = _predicted(key, device)
    return choice is not None and choice.plan.startswith(SMALL)


def plan_of(key: Key, device: Any) -> Plan | Small | None:
    """The plan for a key, built for this thread's handle; None where our own plain kernels are to run.

    For the direction RELU that of "forward+bias", with ReLU in it (`Plan.relu`) where that is to be had.
    """
    cudnn: Cudnn | None = device.library("cudnn", Cudnn)
    if cudnn is None:
        return None
    try:
        return cudnn.plans[key]
    except KeyError:
        find = _with_relu if key.direction == RELU else _find
        plan = cudnn.plans[key] = find(key, device, cudnn) if _known_to_cudnn(key) else None
        return plan


def _predicted(key: Key, device: Any) -> Choice | None:
    """What the files have for a key, or else for what a search would have done with on such a device (`_find`), or for
    the convolution with less behind it, which takes about as long."""
    choice = algorithms.predict(device.model, key.math, key)
    less = _in_less(key, device) if choice is None else None
    choice = choice if less is None else algorithms.predict(device.model, key.math, less)
    if choice is None and key.direction in _WITH_LESS:
        return _predicted(key._replace(direction=_WITH_LESS[key.direction]), device)
    return choice


def _in_less(key: Key, device: Any) -> Key | None:
    """The key of a search that does with what the device may hold, where that has less workspace than the usual one."""
    room = None if device.most_bytes is None else room_within(device.most_bytes, key)
    return None if room is None or room >= key.most else key._replace(room=room)


def _is_beyond(key: Key, device: Any) -> bool:
    """Whether no plan is known, and the device may hold less than a search for one takes."""
    if device.most_bytes is None or room_within(device.most_bytes, key) is not None or not _known_to_cudnn(key):
        return False
    cudnn: Cudnn | None = device.library("cudnn", Cudnn)
    return cudnn is not None and algorithms.registry(device.model, cudnn.version, key.math).find(key) is None


def _known_to_cudnn(key: Key) -> bool:
    # of float64 the frontend's plans make no numbers: it hands them their factors as float32
    return (
        key.dtype != "float64" and len(key.stride) <= MOST_AXES and 0 not in key.x and 0 not in key.w and 0 not in key.y
    )


def _find(key: Key, device: Any, cudnn: Cudnn) -> Plan | Small | None:
    """The registered plan; if it cannot be built (by another build of cuDNN, say) the search is made again, once. Where
    the device may hold less than the search takes, it is one for plans with less workspace."""
    registry = algorithms.registry(device.model, cudnn.version, key.math)
    try:
        choice = registry.find(key) or _search(registry, key, device, cudnn)
    except OutOfDeviceMemory as error:
        less = _in_less(key, device)
        if less is None or error.requested <= device.most_bytes:  # there may be room another time
            raise
        return _find(less, device, cudnn)
    for again in (True, False):
        if choice.plan == DIRECT:
            return None
        plan = Small.named(key, choice.plan) or cudnn.build(key, choice.plan)
        if plan is not None and plan.workspace <= choice.workspace:
            return plan
        if again:
            choice = _search(registry, key, device, cudnn, lost=choice)
    raise DeviceError(f"cuDNN lists plan {choice.plan} for a convolution but cannot build it: {key.text}")


def _with_relu(key: Key, device: Any, cudnn: Cudnn) -> Plan | Small | None:
    """The plan that was chosen without ReLU, or its twin with it, which takes as long and no more workspace."""
    chosen = plan_of(key._replace(direction="forward+bias"), device)
    if not isinstance(chosen, Plan) or not chosen.fused:
        return chosen
    twin = cudnn.build(key, chosen.name)
    return chosen if twin is None or twin.workspace > chosen.workspace else twin


def _search(registry: Registry, key: Key, device: Any, cudnn: Cudnn, lost: Choice | None = None) -> Choice:
    search = Search(key, device, cudnn)
    with device.alone(), contextlib.closing(search.candidates()) as candidates:
        return registry.find_or_register(key, candidates, search.measure, lost)
