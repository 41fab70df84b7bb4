"""The search for the plan that runs a convolution fastest: all are built, then each is timed, and the best are checked.

Checked because some are wrong: of cuDNN 9.19's plans for the weights of 5x5 kernels, say, the fastest has an error in
the third digit.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from blobmem import dtypes
from blobmem.devices.cuda.array import CudaArray
from blobmem.errors import DeviceError
from blobmem.ops.cuda import conv_small
from blobmem.ops.cuda.algorithms import DIRECT, NEARLY, WORTH, Candidate, Key
from blobmem.ops.cuda.conv_direct import (
    add,
    add_bias,
    add_sum,
    direct_backward_data,
    direct_backward_weights,
    direct_forward,
    furthest,
    noise,
    take_channels_last,
)
from blobmem.ops.cuda.cudnn import (
    FUSED,
    MIRRORED,
    SUM,
    Cudnn,
    arrays_of,
    form_of,
    in_parts,
    loses_nan,
    mirror,
    mirrored_bytes,
)
from blobmem.ops.cuda.layout import aligned, in_layout, weights_turn

_COLD = 64 << 20  # bytes that are written before each timed run: more than an H200 caches
_RUNS = 5
_MOST = 16  # plans of a graph, best guesses of cuDNN first: building all of them takes seconds, and none later was best
_HOPELESS = 1.5  # times the best so far is not worth more runs
_LOST, _LOADING = 4, 5.0  # nor is, in the first run, so many times the best and ms for loading a kernel
_TOLERANCE = {"fp32": 1e-4, "tf32": 2e-3, "float16": 4e-3, "bfloat16": 3e-2}  # of the largest number
_RESULT = {"data": 0, "weights": 1}  # of the arrays x, w, y: y of all others


class _Built(NamedTuple):
    """A plan that was built, in its graph for one of `parts` parts of the images."""

    graph: Any
    place: int
    name: str
    workspace: int
    parts: int


class _Sample:
    """The first numbers of a key's result by our own kernels, in scratch memory, for plans to be held to.

    Attributes:
        weights: in the file's order.
    """

    def __init__(self, key: Key, arrays: list[CudaArray], address: int) -> None:
        result = _RESULT.get(key.direction, 2)
        self._result = arrays[result]
        self._count = _checked(key)
        dtype, device = self._result.dtype, self._result.device
        errors, exact, weights = (address + offset for offset in _places(key)[:3])
        self._errors = CudaArray(errors, (2,), dtypes.exact(dtype), device)
        self._exact = CudaArray(exact, self._result.shape, dtype, device)  # there is memory for the first ones
        self._turned = key.w if key.direction == "weights" and weights_turn(key.w, key.layout) else None
        operands = list(arrays)
        if key.direction != "weights" and weights_turn(key.w, key.layout):
            operands[1] = CudaArray(weights, key.w, dtype, device)
            take_channels_last(arrays[1], operands[1], accumulate=False)
        self.weights = operands[1]
        operands[result] = self._exact
        run_direct(key, operands, self._count)

    def error_of(self, run: Callable[[], None], turned: bool) -> float:
        """The largest difference from what a run leaves, over the largest number.

        `turned`: gradients for weights are in the order that cuDNN's plans for the layout have.
        """
        self._result.zero()
        run()
        furthest(self._exact, self._result, self._errors, self._count, self._turned if turned else None)
        device, found = self._result.device, np.empty(2, self._errors.dtype)
        device.synchronize()
        device.memcpy_dtoh(found, self._errors.address)
        return float(found[0] / found[1]) if found[0] else 0.0


def _checked(key: Key) -> int:
    """How many numbers of a result are checked: several planes', or filters'."""
    size = math.prod({"data": key.x, "weights": key.w}.get(key.direction, key.y))
    return min(size, 1 << 11 if key.direction == "weights" else 1 << 16)


def _places(key: Key) -> list[int]:
    """Where in its memory a sample's errors, its numbers and the weights in the file's order begin; where it ends."""
    dtype = dtypes.of(key.dtype)
    turned = key.direction != "weights" and weights_turn(key.w, key.layout)
    sizes = [2 * dtypes.exact(dtype).itemsize, _checked(key) * dtype.itemsize]
    sizes += [math.prod(key.w) * dtype.itemsize if turned else 0]
    return [0, *itertools.accumulate(map(aligned, sizes))]


def _shapes(key: Key) -> list[tuple[int, ...]]:
    """Of the arrays of a search."""
    shapes = [in_layout(key.x, key.layout), key.w, in_layout(key.y, key.layout), (key.w[0],)]
    return shapes + ([key.w] if key.direction == "weights" else shapes[2:3] if SUM in key.direction else [])


def _sizes(key: Key) -> list[int]:
    """Their bytes, each up to where the next one may begin."""
    width = dtypes.of(key.dtype).itemsize
    return [aligned(math.prod(shape) * width) for shape in _shapes(key)]


def room_within(nbytes: int, key: Key) -> int | None:
    """The workspace, a power of two, that plans may take for a search to do with so many bytes of device memory; None
    if these do not do for any."""
    left = nbytes - _bytes_beside(key)
    return None if left < _COLD else 1 << left.bit_length() - 1


@functools.lru_cache(4096)
def _bytes_beside(key: Key) -> int:
    """What a search holds beside the workspace."""
    return sum(_sizes(key)) + _places(key)[-1]


class Search:
    """Times every plan for a key, on random numbers in scratch memory.

    Building plans takes longer than timing them, so that is done beforehand, when other threads and processes may be at
    work.

    Attributes:
        arrays: x, w, y, the bias and, for weights, room for the gradient of a part, for a sum, what is added, once a
            candidate has been asked for; x and y in the key's layout.
    """

    def __init__(self, key: Key, device: Any, cudnn: Cudnn) -> None:
        self.key, self.device, self.cudnn = key, device, cudnn
        self.arrays: list[CudaArray] = []
        self._cold: CudaArray
        self._sample: _Sample
        self._best = [math.inf, math.inf]  # ms of the best plan that is modest, and of the best that is not
        self._listed: list[_Built] = []
        ours = conv_small.plans(key) if conv_small.fits(key) else []
        self._small = [plan for plan in ours if plan.workspace <= key.modest]
        forms = (FUSED, "", MIRRORED) if key.direction.startswith("forward+") else ("", MIRRORED)
        for form in forms:
            self._listed += self._built(form, key)
        if self._small and key.math == "tf32":
            # plans without tensor cores, which come too late in that list, need not turn images over
            for form in forms:
                known = {built.name for built in self._listed}
                exact = self._built(form, key._replace(math="fp32"))
                self._listed += [built for built in exact if built.name not in known]

    def candidates(self) -> Generator[Candidate, None, None]:
        """The plans, each ready to run while the next has not been asked for."""
        key, listed = self.key, self._listed
        most = max([*(built.workspace for built in listed), *(plan.workspace for plan in self._small)], default=0)
        dtype, shapes, sizes = dtypes.of(key.dtype), _shapes(key), _sizes(key)
        cold = max(aligned(most), _COLD)
        with self.device.scratch(_bytes_beside(key) + cold) as address:
            starts = [address + sum(sizes[:i]) for i in range(len(sizes) + 1)]
            self.arrays = [CudaArray(at, shape, dtype, self.device) for at, shape in zip(starts, shapes, strict=False)]
            self._cold = CudaArray(starts[-1], (_COLD // dtype.itemsize,), dtype, self.device)
            for seed, array in enumerate(self.arrays):
                noise(array, seed)
            self._sample = _Sample(key, self.arrays, starts[-1] + cold)
            for number, built in enumerate(listed):
                name = in_parts(built.name, built.parts)
                yield Candidate(name, number, built.workspace, self._runner(built))
            for number, plan in enumerate(self._small, len(listed)):
                yield Candidate(plan.name, number, plan.workspace, functools.partial(self._run_small, plan))
            if min(self._best) == math.inf or (key.group > 1 and key.w[1] == 1):
                number = len(listed) + len(self._small)
                yield Candidate(DIRECT, number, 0, lambda: run_direct(key, self.arrays))

    def _run_small(self, plan: conv_small.Small) -> None:
        x, w, y, b = self.arrays[:4]
        if self.key.direction == "weights":
            plan.weights(x, y, w, self._cold.part(0, (plan.workspace,), np.uint8), accumulate=False)
        elif self.key.direction == "data":
            plan.forward(y, self._sample.weights, None, x)
        else:
            plan.forward(x, self._sample.weights, b if self.key.direction == "forward+bias" else None, y)

    def _built(self, form: str, key: Key) -> Iterator[_Built]:
        """The plans for a key that can be built; those whose workspace is not modest with the images in so few parts
        that it is, and last in so few that it is within the limit."""
        found = 0
        large: dict[str, int] = {}
        for index, name, graph in self.cudnn.listed(key, form):
            if form == FUSED and dtypes.is_half(dtypes.of(self.key.dtype)) and loses_nan(name):
                continue  # a ReLU mostly follows, and has none of its own there
            if found < _MOST and self.cudnn.built(graph, index):
                workspace = self._workspace(form, graph, index)
                if workspace <= key.modest:
                    found += 1
                    yield _Built(graph, index, name, workspace, 1)
                elif len(large) < _MOST:
                    large[name] = workspace
        for most in dict.fromkeys((key.modest, key.most)):
            yield from self._in_parts(form, key, dict(large), most)

    def _workspace(self, form: str, graph: Any, index: int) -> int:
        return int(graph.get_workspace_size_plan_at_index(index)) + mirrored_bytes(self.key, form)

    def _in_parts(self, form: str, key: Key, large: dict[str, int], most: int) -> Iterator[_Built]:
        """Plans, by name and the workspace for all images, with these in the fewest parts that need at most so much."""
        for parts in range(1, key.x[0] + 1):
            names = {name for name, workspace in large.items() if workspace <= most * parts}
            if names and (parts == 1 or key.parts_into(parts)):
                for index, name, graph in self.cudnn.listed(key.part(parts), form):
                    if name in names and self.cudnn.built(graph, index):
                        workspace = self._workspace(form, graph, index)
                        if workspace <= most:
                            del large[name]
                            yield _Built(graph, index, name, workspace, parts)

    def _runner(self, built: _Built) -> Callable[[], None]:
        """Runs a plan as the op would, the bias and the sum of the parts included."""
        key, follow = self.key, self.cudnn.follow
        x, w, y, b = self.arrays[:4]
        fresh = other = self.arrays[-1]
        form = form_of(built.name)
        uids, words = arrays_of(key, form == FUSED), key.direction.split("+")
        biased, summed, relu = ("bias" in words, "sum" in words, "relu" in words)
        scratch = self._cold.address + mirrored_bytes(key, form)

        def run() -> None:
            if form == MIRRORED:
                mirror(w, self._cold.address, key.layout)
            for part in range(built.parts):
                adds = part > 0 and key.direction == "weights"
                addresses = {
                    1: x.address + part * (x.nbytes // built.parts),
                    2: (fresh if adds else w).address,
                    3: y.address + part * (y.nbytes // built.parts),
                }
                addresses |= {4: b.address, 5: other.address + part * (y.nbytes // built.parts)}
                addresses = {uid: addresses[uid] for uid in uids}
                if form == MIRRORED:
                    addresses = {1: addresses[3], 2: self._cold.address, 3: addresses[1]}
                built.graph.execute_plan_at_index(addresses, scratch, built.place, handle=follow())
                if adds:
                    add(fresh, w)
            if form != FUSED:
                if summed:
                    add_sum(b if biased else None, other, y, key.layout, relu)
                elif biased:
                    add_bias(b, y, key.layout)

        return run

    def measure(self, candidate: Candidate) -> float | None:
        """Milliseconds, the least of a few runs that each find the card's cache cold; None if a plan fails or is wrong.

        The least, as other processes' work on the card can only add to a time. Only what may be chosen is checked.
        """
        large = candidate.workspace > self.key.modest
        best = min(self._best[1], self._best[0] / WORTH) if large else self._best[0]
        try:
            ms = least(lambda: self._time(candidate), best)
            if ms <= best * NEARLY and not self.is_right(candidate):
                return None
        except (*self.cudnn.errors, DeviceError):
            self.device.synchronize()  # says so if it was the GPU that failed
            return None
        self._best[large] = min(self._best[large], ms)
        return ms

    def is_right(self, candidate: Candidate) -> bool:
        """Whether a candidate's numbers are those of our own kernels, to what the key's math allows."""
        if candidate.plan == DIRECT:
            return True
        turned = not candidate.plan.startswith(conv_small.SMALL)
        return self._sample.error_of(candidate.run, turned) <= _TOLERANCE[self.key.math]

    def _time(self, candidate: Candidate) -> float:
        # while the device is at this the host gets ahead of it, so that short kernels are not timed by their launches
        for seed in range(2):
            noise(self._cold, seed)
        ms: float = self.device.timed(candidate.run)
        return ms


def least(run: Callable[[], float], best: float) -> float:
    """The least of the milliseconds of a few runs; fewer where another plan's `best` is out of reach."""
    first = run()  # loads the kernels, too
    if first > _LOST * best + _LOADING:
        return first
    times = [run(), run()]
    while len(times) < _RUNS and min(times) < _HOPELESS * best:
        times.append(run())
    return min(times)


def run_direct(key: Key, arrays: Sequence[Any], most: int | None = None) -> None:
    """Our own kernel for a key, which writes whichever of x, w and y is its result; then come a bias and what is added.

    x and y are in the key's layout. With `most` only so many of the first elements are written.
    """
    x, w, y, b, *others = arrays
    window: dict[str, Any] = {
        "stride": key.stride, "pad": key.pad, "dilation": key.dilation, "group": key.group, "layout": key.layout,
        "most": most,
    }  # fmt: skip
    if key.direction == "data":
        direct_backward_data(y, w, None, x, **window)
    elif key.direction == "weights":
        direct_backward_weights(x, y, w, accumulate=False, **window)
    else:
        words = key.direction.split("+")
        direct_forward(x, w, b if "bias" in words else None, y, **window)
        if "sum" in words:
            add_sum(None, others[0], y, key.layout, "relu" in words, most)
