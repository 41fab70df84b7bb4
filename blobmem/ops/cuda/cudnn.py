"""cuDNN through its frontend: graphs of one convolution, the plans that can run them, and running one.

The frontend is imported when a handle is made. Its arrays have numbers (uids): x is 1, w 2, y 3, the bias 4, what is
added 5, and a plan takes the addresses in this order whichever of them is the result.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Any

from blobmem import dtypes
from blobmem.devices.cuda.array import CudaArray
from blobmem.errors import DeviceError
from blobmem.ops.cuda import strided
from blobmem.ops.cuda.algorithms import Key, Shape
from blobmem.ops.cuda.conv_small import Small
from blobmem.ops.cuda.layout import aligned

FUSED = "bias+"  # what the name of a plan begins with that does all its direction has behind the convolution, too
MIRRORED = "mirrored+"  # and of one that convolves by way of a gradient for the data (`Key.mirrored`)
RELU = "forward+bias+relu"  # the direction of plans that take ReLU of that, too; no choices are made for it
SUM = "+sum"  # in a direction: another array of y's shape is added
_LOSES_NAN = "eng39"  # an engine that, with ReLU, makes 0 of what is no number: a net that diverged would look healthy
_BIAS, _OTHER = 4, 5  # numbers of arrays
_TIMES = "*"  # between the number of parts that the images are taken in, if several, and the rest of a plan's name

MOST_AXES = 3  # spatial ones that cuDNN takes

_BARRED = {
    # float32 sums of float32 products, and Winograd only with tiles whose error stays near rounding
    "fp32": ("TENSOR_CORE", "DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION", "WINOGRAD_TILE_13x13"),
    "tf32": (),
    # sums of float32, too
    "float16": ("REDUCED_PRECISION_REDUCTION",),
    "bfloat16": ("REDUCED_PRECISION_REDUCTION",),
}
_TYPES = {"float32": "FLOAT", "float64": "DOUBLE", "float16": "HALF", "bfloat16": "BFLOAT16"}
"""The frontend's names of dtypes."""


_spare: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
"""Handles of threads that have ended, by CUDA context: they may only be destroyed where it is current, and a new one
takes milliseconds."""


class Cudnn:
    """A handle for one device and thread, and the plans built on it.

    Attributes:
        device: that one.
        plans: by key; None where our own plain kernels were chosen.
        version: cuDNN's, 91900 for 9.19.0.
    """

    def __init__(self, device: Any) -> None:
        self._pool = _spare.setdefault(device.context, [])
        try:
            import cudnn

            self.handle: int = self._pool.pop() if self._pool else cudnn.create_handle()
        except (ImportError, RuntimeError) as error:
            raise DeviceError(
                f"convolutions on a CUDA device need cuDNN and nvidia-cudnn-frontend 1.23 ({error}): "
                "pip install 'blobmem[cuda]'"
            ) from error
        self.module = cudnn
        self.version = int(cudnn.backend_version())
        self.plans: dict[Key, Plan | Small | None] = {}
        self.errors = (RuntimeError, ValueError, cudnn.cudnnGraphNotSupportedError)
        self.device = device
        self._stream: int | None = None

    def follow(self) -> int:
        """The handle, set to this thread's compute stream."""
        stream = self.device.compute_stream().handle
        if stream != self._stream:
            self.module.set_stream(handle=self.handle, stream=stream)
            self._stream = stream
        return self.handle

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._pool.append(self.handle)

    def listed(self, key: Key, form: str = "") -> Iterator[tuple[int, str, Any]]:
        """(index, name, graph) of every plan for a key that its math and its determinism allow, none of them built.

        With the form FUSED those of all that the direction says together, and where ReLU is among that those that keep
        what is no number; with MIRRORED those of the gradient for the data that it is. Nothing where cuDNN does not
        support the graph.
        """
        run = key.mirrored if form == MIRRORED else key
        if run is None:
            return
        graph = build_graph(self.module, run, form == FUSED, self.handle)
        modes = self.module.heur_mode
        try:
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([modes.A, modes.B, modes.FALLBACK])
        except self.errors:
            return
        graph.deselect_numeric_notes([getattr(self.module.numerical_note, name) for name in barred(key)])
        seen = set()
        for index in range(graph.get_execution_plan_count()):
            engine = graph.get_plan_name_at_index(index)
            name = form + engine
            if name not in seen and not (form == FUSED and _words(key)[-1] == "relu" and loses_nan(name)):
                seen.add(name)
                yield index, name, graph

    def build(self, key: Key, name: str) -> Plan | None:
        """The plan of that name for a key; None if there is no such plan or it cannot be built (any more)."""
        parts, whole = parts_of(name)
        for index, listed, graph in self.listed(key.part(parts), form_of(whole)):
            if listed == whole and self.built(graph, index):
                return Plan(self, graph, key, name)
        return None

    def built(self, graph: Any, index: int) -> bool:
        """Build a plan of a graph, which is the one that it runs from then on; whether that was possible."""
        try:
            graph.build_plan_at_index(index)
        except self.errors:
            return False
        return True


def in_parts(name: str, parts: int) -> str:
    """The name of the plan that takes the images in so many parts, one after another in the same workspace."""
    return f"{parts}{_TIMES}{name}" if parts > 1 else name


def parts_of(name: str) -> tuple[int, str]:
    """The number of parts in the name of a plan, and the name of what runs for each."""
    parts, _, whole = name.rpartition(_TIMES)
    return int(parts or 1), whole


def loses_nan(whole: str) -> bool:
    """Whether a plan of that name would make 0 of what is no number if it took ReLU, too."""
    return whole.removeprefix(FUSED).partition("_")[0] == _LOSES_NAN


def form_of(whole: str) -> str:
    """FUSED, MIRRORED or nothing: the form of a plan of that name."""
    return next((form for form in (FUSED, MIRRORED) if whole.startswith(form)), "")


def mirrored_bytes(key: Key, form: str) -> int:
    """Workspace in bytes that a plan's weights take in front of its own, if it is a mirrored one."""
    return aligned(math.prod(key.w) * dtypes.of(key.dtype).itemsize) if form == MIRRORED else 0


def mirror(w: CudaArray, address: int, layout: str) -> None:
    """Put weights (outputs, inputs, taps...) at an address as (inputs, outputs, taps... in reverse order); in "NHWC"
    both have the axis after the first last in memory."""
    outputs, inputs, taps = w.shape[0], w.shape[1], math.prod(w.shape[2:])
    size, steps, start = (inputs, outputs, taps), (taps, inputs * taps, -1), taps - 1
    if layout == "NHWC":
        size, steps, start = (inputs, taps, outputs), (1, -inputs, taps * inputs), (taps - 1) * inputs
    strided.rearranged(w, CudaArray(address, size, w.dtype, w.device), size, steps, start)


class Plan:
    """A plan that can be run.

    Attributes:
        name: as choices have it.
        workspace: bytes that it needs.
        parts: how many parts it takes the images in; each is a run of its own.
        fused: whether it adds the bias, and the other array, too.
        relu: whether it takes ReLU of that.
    """

    __slots__ = (
        "_cudnn", "_front", "_layout", "_run", "_steps", "_weights", "fused", "name", "parts", "relu", "workspace",
    )  # fmt: skip

    def __init__(self, cudnn: Cudnn, graph: Any, key: Key, name: str) -> None:
        self._cudnn = cudnn
        self.name = name
        self.parts, whole = parts_of(name)
        form = form_of(whole)
        self.fused = form == FUSED
        self.relu = self.fused and _words(key)[-1] == "relu"
        part, width = key.part(self.parts), dtypes.of(key.dtype).itemsize
        uids, steps = arrays_of(key, self.fused), {1: math.prod(part.x) * width, 3: math.prod(part.y) * width}
        self._steps = [steps.get(3 if uid == _OTHER else uid, 0) for uid in uids]
        self._weights, self._front = (key.w, dtypes.of(key.dtype)), mirrored_bytes(key, form)
        self._layout = key.layout
        self.workspace = int(graph.get_workspace_size()) + self._front
        graph._prepare_variant_pack_template()
        order = graph._get_variant_pack_uids_sorted()
        if order != uids:
            raise DeviceError(f"the cuDNN frontend orders a convolution's arrays {order}, expected was {uids}")
        self._run = graph._execute_with_ptrs

    def run(self, addresses: list[int], workspace: int, part: int = 0) -> None:
        """Queue a part, on addresses of x, w, y (and if fused of bias and other) and of the workspace, on the compute
        stream.

        A weights' gradient is that of the part. Raises DeviceError if cuDNN refuses.
        """
        if part:
            addresses = [start + part * step for start, step in zip(addresses, self._steps, strict=True)]
        if self._front:
            x, w, y = addresses
            if not part:
                mirror(CudaArray(w, *self._weights, self._cudnn.device), workspace, self._layout)
            addresses, workspace = [y, workspace, x], workspace + self._front
        try:
            self._run(addresses, workspace, self._cudnn.follow())
        except self._cudnn.errors as error:
            self._cudnn.device.synchronize()  # says so if it was the GPU that failed
            raise DeviceError(f"cuDNN could not run a convolution: {error}") from error


def barred(key: Key) -> tuple[str, ...]:
    """Names of the numerical notes that a plan for this key must not have."""
    notes = () if key.dtype == "float64" else _BARRED[key.math]
    return (*notes, "NONDETERMINISTIC") if key.deterministic else notes


def _words(key: Key) -> list[str]:
    """What a direction says: "forward", "data" or "weights", and what follows it."""
    return key.direction.split("+")


def arrays_of(key: Key, fused: bool) -> list[int]:
    """The numbers of the arrays that a plan takes, with all that the direction says if it is `fused`."""
    words = _words(key) if fused else ()
    return [1, 2, 3, *[_BIAS] * ("bias" in words), *[_OTHER] * ("sum" in words)]


def build_graph(cudnn: Any, key: Key, fused: bool = False, handle: int | None = None) -> Any:
    """The frontend's graph for a key, not yet validated.

    With `fused` what the direction says is done to what a forward pass gives: another array and a bias are added, and
    ReLU is taken.
    """
    number = getattr(cudnn.data_type, _TYPES[key.dtype])
    inner = getattr(cudnn.data_type, _TYPES[dtypes.exact(dtypes.of(key.dtype)).name])
    graph = cudnn.pygraph(
        name=key.direction, io_data_type=number, intermediate_data_type=inner, compute_data_type=inner, handle=handle
    )
    shapes = {1: _planar(key.x), 2: _planar(key.w), 3: _planar(key.y), _OTHER: _planar(key.y)}
    shapes[_BIAS] = _planar((1, key.w[0], *[1] * len(key.pad)))

    def tensor(uid: int) -> Any:
        shape = shapes[uid]
        return graph.tensor(dim=shape, stride=strides(shape, key.layout), data_type=number, uid=uid)

    window = {
        "padding": _pair(key.pad, 0), "stride": _pair(key.stride, 1), "dilation": _pair(key.dilation, 1),
    }  # fmt: skip
    if key.direction == "data":
        result, uid = graph.conv_dgrad(loss=tensor(3), filter=tensor(2), **window), 1
    elif key.direction == "weights":
        result, uid = graph.conv_wgrad(image=tensor(1), loss=tensor(3), **window), 2
    else:
        result, uid = graph.conv_fprop(image=tensor(1), weight=tensor(2), **window), 3
    shape = shapes[uid]

    def between(value: Any) -> Any:
        return value.set_dim(shape).set_stride(strides(shape, key.layout)).set_data_type(inner)

    words = _words(key) if fused else ()
    if "sum" in words:  # in the order in which cuDNN has kernels for all of it
        result = graph.add(a=between(result), b=tensor(_OTHER))
    if "bias" in words:
        result = graph.bias(input=between(result), bias=tensor(_BIAS))
    if "relu" in words:
        result = graph.relu(input=between(result))
    result.set_output(True).set_data_type(number).set_dim(shape).set_stride(strides(shape, key.layout)).set_uid(uid)
    return graph


def _pair(values: Shape, absent: int) -> list[int]:
    """An entry per spatial axis of cuDNN, which has two at least."""
    return [absent] * (2 - len(values)) + list(values)


def _planar(shape: Shape) -> list[int]:
    return [*shape[:2], *_pair(shape[2:], 1)]


def strides(shape: list[int], layout: str) -> list[int]:
    """Strides in elements of a packed array: "NCHW" as its axes stand, "NHWC" with the channels fastest."""
    order = range(len(shape)) if layout == "NCHW" else [0, *range(2, len(shape)), 1]
    inner = {axis: math.prod(shape[later] for later in list(order)[place + 1 :]) for place, axis in enumerate(order)}
    return [inner[axis] for axis in range(len(shape))]
