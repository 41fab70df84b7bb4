"""The plan that runs a convolution: found among the choices, or searched for by timing, and built for this thread."""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np

from blobmem.devices.cuda.array import CudaArray
from blobmem.devices.cuda.context import bindings, check
from blobmem.errors import DeviceError
from blobmem.ops.cuda import algorithms
from blobmem.ops.cuda.algorithms import DIRECT, Candidate, Choice, Key, Shape
from blobmem.ops.cuda.conv_direct import (
    add_bias,
    direct_backward_data,
    direct_backward_weights,
    direct_forward,
    noise,
)
from blobmem.ops.cuda.cudnn import FUSED, MOST_AXES, Cudnn, Plan
from blobmem.ops.cuda.layout import channels_first, in_layout
from blobmem.ops.registry import ArraySpec

_ALIGNMENT = 512  # bytes, of what is cut from a workspace
_COLD = 64 << 20  # bytes that are written before each timed run: more than an H200 caches
_RUNS = 5
_MOST = 16  # plans of a graph, best guesses of cuDNN first: building all of them takes seconds, and none later was best
_HOPELESS = 1.5  # times the best so far is not worth more runs

_NAMES = {np.dtype(np.float32): "float32", np.dtype(np.float64): "float64"}  # dtype.name is slow

_log = logging.getLogger(__name__)


def key_of(direction: str, device: Any, x: ArraySpec | CudaArray, w: ArraySpec | CudaArray, stride: Shape, pad: Shape,
           dilation: Shape, group: int, layout: str = "NCHW") -> Key:  # fmt: skip
    """The key of a convolution from x, which is in the layout, with weights w, in one of its directions.

    ValueError for channels last with other than two spatial axes.
    """
    limit = algorithms.WORKSPACE_LIMIT if device.workspace_limit is None else device.workspace_limit
    source = channels_first(x.shape, layout)
    return Key(direction, source, w.shape, stride, pad, dilation, group, _NAMES[x.dtype], layout, device.math,
               device.deterministic, limit)  # fmt: skip


def workspace_bytes(key: Key, device: Any) -> int | None:
    """Bytes of the workspace that a convolution takes, None for our own kernels, which need none.

    On a device with a GPU this searches for the plan and builds it. Where there is none the files are looked up; for a
    convolution that is in none the limit is charged, and the device is marked `uncertain`.
    """
    if not device.predicts:
        plan = plan_of(key, device)
        return None if plan is None else plan.workspace
    if not _known_to_cudnn(key):
        return None
    choice = algorithms.predict(device.model, key.math, key)
    if choice is None:
        if not device.uncertain:
            _log.warning(
                "%s: no algorithm is known for some convolutions (%s, say): each is charged its limit of %.0f MiB",
                device.model, key.text, key.limit / 2**20,
            )  # fmt: skip
            device.uncertain = True
        return key.limit
    return None if choice.plan == DIRECT else choice.workspace


def plan_ms(key: Key, device: Any) -> float | None:
    """What the plan for a key took when it was chosen; None where there is none, or it is not known."""
    if not _known_to_cudnn(key):
        return None
    if device.predicts:
        choice = algorithms.predict(device.model, key.math, key)
    else:
        if plan_of(key, device) is None:
            return None
        choice = algorithms.registry(device.model, device.library("cudnn", Cudnn).version, key.math).find(key)
    return None if choice is None or choice.plan == DIRECT else choice.ms


def plan_of(key: Key, device: Any) -> Plan | None:
    """The plan for a key, built for this thread's handle; None where our own kernels are to run."""
    cudnn: Cudnn | None = device.library("cudnn", Cudnn)
    if cudnn is None:
        return None
    try:
        return cudnn.plans[key]
    except KeyError:
        plan = cudnn.plans[key] = _find(key, device, cudnn) if _known_to_cudnn(key) else None
        return plan


def _known_to_cudnn(key: Key) -> bool:
    # of float64 the frontend's plans make no numbers: it hands them their factors as float32
    return (
        key.dtype == "float32" and len(key.stride) <= MOST_AXES and 0 not in key.x and 0 not in key.w and 0 not in key.y
    )


def _find(key: Key, device: Any, cudnn: Cudnn) -> Plan | None:
    """The registered plan; if it cannot be built (by another build of cuDNN, say) the search is made again, once."""
    registry = algorithms.registry(device.model, cudnn.version, key.math)
    lost: Choice | None = None
    for _ in range(2):
        search = _Search(key, device, cudnn)
        with contextlib.closing(search.candidates()) as candidates:
            choice = registry.find_or_register(key, candidates, search.measure, lost)
        if choice.plan == DIRECT:
            return None
        plan = cudnn.build(key, choice.plan)
        if plan is not None and plan.workspace <= choice.workspace:
            return plan
        lost = choice
    raise DeviceError(f"cuDNN lists plan {choice.plan} for a convolution but cannot build it: {key.text}")


class _Search:
    """Times every plan for a key, on random numbers in scratch memory.

    Attributes:
        arrays: x, w, y and the bias, once a candidate has been asked for; x and y in the key's layout.
    """

    def __init__(self, key: Key, device: Any, cudnn: Cudnn) -> None:
        self.key, self.device, self.cudnn = key, device, cudnn
        self.arrays: list[CudaArray] = []
        self._cold: CudaArray
        self._best = math.inf

    def candidates(self) -> Generator[Candidate, None, None]:
        """The plans, each ready to run while the next has not been asked for."""
        key, listed = self.key, []
        for fused in (True, False) if key.direction == "forward+bias" else (False,):
            listed += list(self._built(fused))
        most = max((workspace for *_, workspace in listed), default=0)
        dtype = np.dtype(key.dtype)
        shapes = (in_layout(key.x, key.layout), key.w, in_layout(key.y, key.layout), (key.w[0],))
        sizes = [aligned(math.prod(shape) * dtype.itemsize) for shape in shapes]
        with self.device.scratch(sum(sizes) + max(aligned(most), _COLD)) as address:
            starts = [address + sum(sizes[:i]) for i in range(len(sizes) + 1)]
            self.arrays = [CudaArray(at, shape, dtype, self.device) for at, shape in zip(starts, shapes, strict=False)]
            self._cold = CudaArray(starts[-1], (_COLD // dtype.itemsize,), dtype, self.device)
            for seed, array in enumerate(self.arrays):
                noise(array, seed)
            for number, (graph, index, name, workspace) in enumerate(listed):
                run = self._runner(graph, index, name.startswith(FUSED))
                yield Candidate(name, number, workspace, run)
            if not listed or (key.group > 1 and key.w[1] == 1):
                yield Candidate(DIRECT, len(listed), 0, lambda: run_direct(key, *self.arrays))

    def _built(self, fused: bool) -> Iterator[tuple[Any, int, str, int]]:
        """(graph, index, name, workspace) of the plans that can be built."""
        found = 0
        for index, name, graph in self.cudnn.listed(self.key, fused):
            if self.cudnn.built(graph, index):
                workspace = int(graph.get_workspace_size_plan_at_index(index))
                if workspace <= self.key.limit:
                    yield graph, index, name, workspace
                    found += 1
                    if found == _MOST:
                        return

    def _runner(self, graph: Any, index: int, fused: bool) -> Callable[[], None]:
        """Runs a plan as the op would, the bias included."""
        _, _, y, b = self.arrays
        workspace, follow = self._cold.address, self.cudnn.follow
        addresses = {uid: array.address for uid, array in enumerate(self.arrays[: 3 + fused], 1)}
        apart = self.key.direction == "forward+bias" and not fused

        def run() -> None:
            graph.execute_plan_at_index(addresses, workspace, index, handle=follow())
            if apart:
                add_bias(b, y, self.key.layout)

        return run

    def measure(self, candidate: Candidate) -> float | None:
        """Milliseconds, the median of a few runs that each find the card's cache cold; None if it cannot run."""
        try:
            candidate.run()
        except (*self.cudnn.errors, DeviceError):
            return None
        self.device.synchronize()
        times: list[float] = []
        while len(times) < _RUNS and (not times or times[0] < _HOPELESS * self._best):
            times.append(self._time(candidate))
        median = statistics.median(times)
        self._best = min(self._best, median)
        return median

    def _time(self, candidate: Candidate) -> float:
        driver, stream = bindings(), self.device.compute_stream().native
        start, stop = (check(driver.cuEventCreate(0), "cuEventCreate") for _ in range(2))
        # while the device is at this the host gets ahead of it, so that short kernels are not timed by their launches
        for seed in range(2):
            noise(self._cold, seed)
        check(driver.cuEventRecord(start, stream), "cuEventRecord")
        candidate.run()
        check(driver.cuEventRecord(stop, stream), "cuEventRecord")
        check(driver.cuEventSynchronize(stop), "cuEventSynchronize")
        elapsed = float(check(driver.cuEventElapsedTime(start, stop), "cuEventElapsedTime"))
        for event in (start, stop):
            check(driver.cuEventDestroy(event), "cuEventDestroy")
        return elapsed


def run_direct(key: Key, x: CudaArray, w: CudaArray, y: CudaArray, b: CudaArray) -> None:
    """Our own kernel for a key, which writes whichever of the arrays is its result; x and y are in its layout."""
    window: dict[str, Any] = {
        "stride": key.stride, "pad": key.pad, "dilation": key.dilation, "group": key.group, "layout": key.layout,
    }  # fmt: skip
    if key.direction == "data":
        direct_backward_data(y, w, None, x, **window)
    elif key.direction == "weights":
        direct_backward_weights(x, y, w, accumulate=False, **window)
    else:
        direct_forward(x, w, b if key.direction == "forward+bias" else None, y, **window)


def aligned(nbytes: int) -> int:
    """Bytes up to where the next array may begin."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
