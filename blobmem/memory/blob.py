"""Blob: an N-dimensional array with a gradient, over views that may share their memory with other blobs."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from blobmem import devices
from blobmem.dtypes import is_half
from blobmem.errors import DeviceError, NetError, SharedBlobError
from blobmem.memory.synced import SyncedMemory
from blobmem.memory.views import Intent, Side, View
from blobmem.proto import caffe_pb2
from blobmem.proto.arrays import blob_array, blob_shape, fill_blob, shape_matches

if TYPE_CHECKING:
    from blobmem.devices import Device

MAX_AXES = 32
_MAX_BYTES = 1 << 46
_DLPACK_HOST, _DLPACK_CUDA = 1, 2

_counter = itertools.count(1)
_moves = 0


def moves() -> int:
    """A number that changes whenever any blob's data or gradient gets another place, or size."""
    return _moves


def note_move() -> None:
    """Have whoever relies on `moves` look again."""
    global _moves
    _moves = next(_counter)


def _checked_shape(shape: Iterable[Any], itemsize: int) -> tuple[int, ...]:
    dims = tuple(int(d) for d in shape)
    if len(dims) > MAX_AXES:
        raise ValueError(f"a blob has at most {MAX_AXES} axes, got {len(dims)}")
    if any(d < 0 for d in dims):
        raise ValueError(f"the dimensions of a blob cannot be negative, got {dims}")
    if math.prod(max(d, 1) for d in dims) * itemsize > _MAX_BYTES:  # NumPy has no empty arrays beyond its limit either
        raise ValueError(f"a blob of shape {dims} would take more than {_MAX_BYTES >> 40} TiB")
    return dims


class _Half:
    """One of a blob's two arrays: its view, and the arrays last handed out over it.

    An array is handed out again while its memory's pages are the same, and without any check while its epoch is.
    """

    __slots__ = ("array", "epoch", "frozen", "frozen_epoch", "lent", "version", "view")

    def __init__(self, view: View) -> None:
        self._place(view)

    def rebind(self, view: View) -> None:
        note_move()
        self._place(view)

    def _place(self, view: View) -> None:
        self.view = view
        self.array: Any = None
        self.epoch = -1
        self.frozen: Any = None
        self.frozen_epoch = -1
        self.version = -1
        self.lent: Any = None  # keeps the device side in its place

    def is_held(self, writeable: bool = False) -> bool:
        """Whether anybody else still holds an array over the bytes (a writable one, if so asked), or gave it."""
        if self.array is not None and sys.getrefcount(self.array) > 2:
            return True
        self.array, self.epoch = None, -1
        if not writeable:
            if self.frozen is not None and sys.getrefcount(self.frozen) > 2:
                return True
            self.frozen, self.frozen_epoch = None, -1
        memory = self.view.memory
        # whoever gave an array has it still, for all we know
        return self.view.offset < memory.adopted or memory.lent(self.view.offset, self.view.nbytes, writeable)


class Blob:
    """An N-dimensional array, `data`, and its gradient, `diff`, each a view of a SyncedMemory.

    Args:
        *shape: dimensions, as integers or one sequence. No dimension at all is a scalar.
        dtype: any NumPy float or integer type, or bfloat16 of ml_dtypes; float32 by default.
        device: where the device side lives; the default device when None.
        name: used for allocations and in messages.

    Nothing is allocated before it is first touched. Raises TypeError for a dtype that is neither float nor
    integer, ValueError for a negative dimension or more than 32 axes.
    """

    __slots__ = ("__weakref__", "_count", "_data", "_diff", "_shape", "dtype", "name", "owner")

    def __init__(self, *shape: Any, dtype: Any = np.float32, device: Device | None = None, name: str = "") -> None:
        self.dtype = np.dtype(dtype)
        if (self.dtype.kind not in "fiu" and not is_half(self.dtype)) or not self.dtype.isnative:
            raise TypeError(f"a blob holds floats or integers in this machine's byte order, not {self.dtype}")
        self.name = name
        self.owner: Any = None
        self._shape = _checked_shape(_flat(shape), self.dtype.itemsize)
        self._count = math.prod(self._shape)
        memory = SyncedMemory(0, device, name=name)
        self._data = _Half(memory.view(0, self.nbytes))
        self._diff: _Half | None = None

    # ---------------------------------------------------------------- shape

    @property
    def shape(self) -> tuple[int, ...]:
        """The dimensions."""
        return self._shape

    @property
    def num_axes(self) -> int:
        """Number of axes; 0 for a scalar."""
        return len(self._shape)

    @property
    def nbytes(self) -> int:
        """Bytes of `data` (and, as many again, of `diff`)."""
        return self._count * self.dtype.itemsize

    def canonical_axis(self, axis: int) -> int:
        """The axis counted from the front; negative ones count from the back. Raises IndexError outside."""
        if not -len(self._shape) <= axis < len(self._shape):
            raise IndexError(f"axis {axis} is out of range for {self.describe()}")
        return axis % len(self._shape)

    @property
    def count(self) -> int:
        """Number of elements."""
        return self._count

    def count_of(self, start: int, end: int | None = None) -> int:
        """Number of elements over axes [start, end), to the last by default. Negative axes count from the back."""
        axes = len(self._shape)
        first, last, _ = slice(start, end).indices(axes)
        if not -axes <= start <= axes or (end is not None and not -axes <= end <= axes) or first > last:
            raise IndexError(f"axes [{start}, {end}) are out of range for {self.describe()}")
        return math.prod(self._shape[first:last])

    def offset(self, *indices: Any) -> int:
        """Position, in elements, of the element at the given indices; missing ones are 0. Raises IndexError."""
        index = tuple(_flat(indices))
        if len(index) > len(self._shape):
            raise IndexError(f"{len(index)} indices for {self.describe()}")
        position = 0
        for axis, dim in enumerate(self._shape):
            i = index[axis] if axis < len(index) else 0
            if not 0 <= i < dim:
                raise IndexError(f"index {i} is out of range for axis {axis} of {self.describe()}")
            position = position * dim + i
        return position

    def _legacy(self, axis: int) -> int:
        if len(self._shape) > 4:
            raise ValueError(f"{self.describe()} has more than the 4 axes that num, channels, height and width name")
        return self._shape[axis] if axis < len(self._shape) else 1

    num = property(lambda self: self._legacy(0), doc="Caffe's name for axis 0 (1 if absent).")
    channels = property(lambda self: self._legacy(1), doc="Caffe's name for axis 1 (1 if absent).")
    height = property(lambda self: self._legacy(2), doc="Caffe's name for axis 2 (1 if absent).")
    width = property(lambda self: self._legacy(3), doc="Caffe's name for axis 3 (1 if absent).")

    def reshape(self, *shape: Any) -> None:
        """Give the blob another shape, larger or smaller; whoever shares its memory keeps sharing it.

        Bytes keep their places; memory grows when it is next touched beyond its capacity.
        """
        dims = _checked_shape(_flat(shape), self.dtype.itemsize)
        if dims == self._shape:
            return
        self._shape = dims
        self._count = math.prod(dims)
        for half in (self._data, self._diff):
            if half is not None:
                half.rebind(half.view.memory.view(half.view.offset, self.nbytes))

    def reshape_like(self, other: Blob) -> None:
        """Take the other blob's shape."""
        self.reshape(other.shape)

    # ---------------------------------------------------------------- where the bytes are

    @property
    def device(self) -> Device:
        """Where the device side lives."""
        return self._data.view.memory.device

    @property
    def data_view(self) -> View:
        """The view that `data` is."""
        return self._data.view

    @property
    def has_diff(self) -> bool:
        """Whether anybody has asked for the gradient yet."""
        return self._diff is not None

    @property
    def diff_view(self) -> View:
        """The view that `diff` is."""
        return self._diff_half().view

    def memory_of(self, diff: bool) -> SyncedMemory:
        """What the view of the gradient, or of the data, lies in: planners ask for it millions of times."""
        return (self._diff_half() if diff else self._data).view.memory

    def _diff_half(self) -> _Half:
        if self._diff is None:
            memory = SyncedMemory(0, self.device, name=f"{self.name}.diff" if self.name else "")
            self._diff = _Half(memory.view(0, self.nbytes))
        return self._diff

    def share_data(self, other: Blob) -> None:
        """Use the other blob's memory for `data`. Shapes may differ, and either may be reshaped later.

        ValueError, and nothing has changed, for a blob of another dtype or on another device.
        """
        self._check_dtype(other)
        self._bind(self._data, other.data_view, other.device)
        self._follow(other)

    def share_diff(self, other: Blob) -> None:
        """Use the other blob's memory for `diff`. Shapes may differ, and either may be reshaped later.

        ValueError as for `share_data`.
        """
        self._check_dtype(other)
        self._bind(self._diff_half(), other.diff_view, other.device)
        self._follow(other)

    def _check_dtype(self, other: Blob) -> None:
        """Raise ValueError if the other blob's bytes mean other numbers."""
        if self.dtype != other.dtype:
            raise ValueError(
                f"{self.describe()} is of {self.dtype}, {other.describe()} of {other.dtype}: they cannot share; "
                f"copy the values (blob.data[...] = array), or convert the array with astype(numpy.{self.dtype})"
            )

    def _follow(self, other: Blob) -> None:
        """A blob of nobody's is the other's owner's from now on, so that stale bytes are noticed through it too."""
        if self.owner is None:
            self.owner = other.owner

    def unshare_data(self) -> None:
        """Stop sharing `data`: from now on in a memory of its own, with the bytes it had."""
        self._leave(self._data, self.name)

    def unshare_diff(self) -> None:
        """Stop sharing `diff`: from now on in a memory of its own, with the bytes it had."""
        self._leave(self._diff_half(), f"{self.name}.diff")

    def bind_data(self, memory: SyncedMemory, offset: int = 0) -> None:
        """Put `data` at an offset (bytes, a multiple of 512) of a memory; what a plan does."""
        self._bind(self._data, memory.view(offset, self.nbytes), memory.device)

    def bind_diff(self, memory: SyncedMemory, offset: int = 0) -> None:
        """Put `diff` at an offset (bytes, a multiple of 512) of a memory; what a plan does."""
        self._bind(self._diff_half(), memory.view(offset, self.nbytes), memory.device)

    def _bind(self, half: _Half, view: View, device: Device) -> None:
        if device is not self.device:
            raise ValueError(f"{self.describe()} lives on {self.device.name}, not on {device.name}: they cannot share")
        old = half.view
        # the same place keeps the same view, which is what bound schedules recognise
        if (old.memory, old.offset, old.nbytes) != (view.memory, view.offset, self.nbytes):
            half.rebind(view.memory.view(view.offset, self.nbytes))

    def _leave(self, half: _Half, name: str) -> None:
        old = half.view
        self._check_owner(old)
        half.rebind(SyncedMemory(0, self.device, name=name).view(0, self.nbytes))
        if not old.memory.is_zero(old.offset, old.nbytes):
            _copy(old, half.view)

    # ---------------------------------------------------------------- access

    @property
    def data(self) -> np.ndarray:
        """Writable host array over the data, in the blob's shape. Counts as a host write, as in Caffe."""
        half = self._data
        if half.epoch == half.view.memory.epoch:
            return half.array
        return self._writable(half, Intent.WRITE)

    @property
    def diff(self) -> np.ndarray:
        """Writable host array over the gradient, in the blob's shape. Counts as a host write, as in Caffe."""
        half = self._diff
        if half is not None and half.epoch == half.view.memory.epoch:
            return half.array
        return self._writable(self._diff_half(), Intent.WRITE)

    def cpu_data(self) -> np.ndarray:
        """Read-only host array of the data; leaves a copy on the device valid."""
        return self._frozen(self._data)

    def cpu_diff(self) -> np.ndarray:
        """Read-only host array of the gradient; leaves a copy on the device valid."""
        return self._frozen(self._diff_half())

    def mutable_cpu_data(self) -> np.ndarray:
        """Writable host array of the data; the same as `data`."""
        return self.data

    def mutable_cpu_diff(self) -> np.ndarray:
        """Writable host array of the gradient; the same as `diff`."""
        return self.diff

    def gpu_data(self) -> int:
        """Device address of the data, for reading. Raises DeviceError without a device."""
        return self._address(self._data, Intent.READ)

    def gpu_diff(self) -> int:
        """Device address of the gradient, for reading. Raises DeviceError without a device."""
        return self._address(self._diff_half(), Intent.READ)

    def mutable_gpu_data(self) -> int:
        """Device address of the data, for reading and writing; the host side is stale afterwards."""
        return self._address(self._data, Intent.WRITE)

    def mutable_gpu_diff(self) -> int:
        """Device address of the gradient, for reading and writing; the host side is stale afterwards."""
        return self._address(self._diff_half(), Intent.WRITE)

    def _check_owner(self, view: View, writes: bool = False) -> None:
        """Raise SharedBlobError if another net wrote the memory last; else it counts as this net's if it `writes`."""
        writer = view.memory.writer
        if writer is self.owner or self.owner is None:
            return
        if writer is None:
            if writes and view.memory.shared:
                view.memory.set_writer(self.owner)
        elif not view.memory.away:
            raise SharedBlobError(writer.about_blob(self.name, self.owner, view.memory.name))

    def _writable(self, half: _Half, intent: Intent) -> np.ndarray:
        view = half.view
        self._check_owner(view, writes=True)
        memory = view.memory
        memory.announce(intent)
        memory.access(Side.HOST, view.offset, view.nbytes, intent)
        if half.array is None or half.version != memory.version:
            half.array = memory.host_array(view.offset, self._shape, self.dtype)
            half.version = memory.version
        half.epoch = memory.epoch
        memory.watched = True
        return half.array

    def touch_if_held(self) -> None:
        """Count a host write of the data if somebody still holds a writable array over it."""
        half, view = self._data, self._data.view
        if half.is_held(writeable=True):
            view.memory.allow_late(view.offset, view.nbytes)
            self._writable(half, Intent.WRITE)

    def diff_is_held(self) -> bool:
        """Whether somebody still holds an array over the gradient."""
        return self._diff is not None and self._diff.is_held()

    def clear_diff(self) -> None:
        """Set the gradient to zero, at once in arrays that somebody still holds; otherwise no byte is touched."""
        half = self._diff or self._diff_half()
        view = half.view
        memory = view.memory
        self._check_owner(view, writes=True)
        # where the host has no bytes there are no arrays over them
        if memory.cpu_capacity and half.is_held() and memory.device.compute:
            self._writable(half, Intent.OVERWRITE).fill(0)
        else:
            memory.clear(view.offset, view.nbytes)

    def _frozen(self, half: _Half) -> np.ndarray:
        view = half.view
        memory = view.memory
        if half.frozen_epoch != memory.epoch:
            self._check_owner(view)
            memory.access(Side.HOST, view.offset, view.nbytes, Intent.READ)
            half.frozen = memory.host_array(view.offset, self._shape, self.dtype, writeable=False)
            half.frozen_epoch = memory.epoch
            memory.watched = True
        return half.frozen

    def _address(self, half: _Half, intent: Intent) -> int:
        view = half.view
        self._check_owner(view, intent is not Intent.READ)
        return view.gpu_data(intent)

    # ---------------------------------------------------------------- the standard doors

    @classmethod
    def adopt(cls, array: np.ndarray, device: Device | None = None, name: str = "") -> Blob:
        """A blob whose data is `array` itself, which has to be C-contiguous and writable (else ValueError).

        A reshape to more bytes detaches it into memory of its own, with a warning.
        """
        blob = cls(array.shape, dtype=array.dtype, device=device, name=name)
        blob.data_view.memory.set_host_array(array)
        return blob

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """`data` for `numpy.asarray(blob)`, which shares memory; counts as a host write."""
        array = self.data
        # the array itself in place of its address, so that whoever uses it keeps it alive
        return {**array.__array_interface__, "data": array}

    def __dlpack__(self, **options: Any) -> Any:
        """The data for `from_dlpack` of NumPy, PyTorch and others, which share memory; counts as a write.

        It is the side where the device computes, a GPU's memory or the host's; for the host's in any case give `data`.
        """
        if self.device.family == "host" or tuple(options.get("dl_device") or ()) == (_DLPACK_HOST, 0):
            return self.data.__dlpack__(**options)
        from blobmem.devices.cuda import exchange

        source = exchange.exporter(*self._exported(self.data_view))
        # nothing is in flight over the bytes, whatever stream the other side will use
        return source.__dlpack__(stream=-1, **{k: v for k, v in options.items() if k == "max_version"})

    def __dlpack_device__(self) -> tuple[int, int]:
        if self.device.family == "host":
            return self.data.__dlpack_device__()
        return _DLPACK_CUDA, self.device.ordinal  # type: ignore[attr-defined]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The data on a GPU for CuPy, PyTorch, Numba and others, which share memory; counts as a device write.

        AttributeError where the blob does not live on one.
        """
        if self.device.family == "host":
            raise AttributeError(f"{self.describe()} lives on {self.device.name}, which is no GPU")
        from blobmem.devices.cuda import exchange

        address, shape, dtype, hold = self._exported(self.data_view)
        self._data.lent = hold  # who uses it keeps the blob, and nothing more
        return exchange.interface(address, shape, dtype)

    def gpu_array(self, diff: bool = False) -> Any:
        """The data, or with `diff` the gradient, as a PyCUDA GPUArray that shares memory; counts as a device write.

        It stays valid memory after any growth. DeviceError where the blob does not live on a GPU.
        """
        if self.device.family == "host":
            raise DeviceError(f"{self.describe()} lives on {self.device.name}: a GPUArray needs device='cuda'")
        from blobmem.devices.cuda import exchange

        context = self.device.context  # type: ignore[attr-defined]
        return exchange.gpu_array(context, *self._exported(self.diff_view if diff else self.data_view))

    def _exported(self, view: View) -> tuple[int, tuple[int, ...], np.dtype, Any]:
        self._check_owner(view, True)
        address = view.gpu_data(Intent.WRITE)
        return address, self._shape, self.dtype, view.memory.hold_device()

    # ---------------------------------------------------------------- arithmetic, where the bytes are

    def _resident(self, view: View, intent: Intent, side: Side | None = None) -> Any:
        """An array over the view on the side that holds it, so that arithmetic moves no byte, or on the side given."""
        self._check_owner(view, intent is not Intent.READ)
        memory = view.memory
        side = side or self._computing_side(view)
        memory.announce(intent)
        address = memory.access(side, view.offset, view.nbytes, intent)
        if side is Side.DEVICE:
            return self.device.as_array(address, self._shape, self.dtype)
        return memory.host_array(view.offset, self._shape, self.dtype, lend=False)

    def _computing_side(self, view: View) -> Side:
        """Where NumPy computes on these bytes: where they are, if that is memory of the host."""
        in_reach = self.device.family == "host"
        return view.memory.resident_side(view.offset, view.nbytes) if in_reach else Side.HOST

    def asum_data(self) -> float:
        """Sum of the absolute values of the data."""
        return float(np.abs(self._resident(self.data_view, Intent.READ)).sum(dtype=np.float64))

    def asum_diff(self) -> float:
        """Sum of the absolute values of the gradient."""
        return float(np.abs(self._resident(self.diff_view, Intent.READ)).sum(dtype=np.float64))

    def sumsq_data(self) -> float:
        """Sum of the squares of the data."""
        return _sumsq(self._resident(self.data_view, Intent.READ))

    def sumsq_diff(self) -> float:
        """Sum of the squares of the gradient."""
        return _sumsq(self._resident(self.diff_view, Intent.READ))

    def scale_data(self, factor: float) -> None:
        """Multiply the data by a factor."""
        array = self._resident(self.data_view, Intent.WRITE)
        np.multiply(array, factor, out=array, casting="unsafe")

    def scale_diff(self, factor: float) -> None:
        """Multiply the gradient by a factor."""
        array = self._resident(self.diff_view, Intent.WRITE)
        np.multiply(array, factor, out=array, casting="unsafe")

    def update(self) -> None:
        """data -= diff."""
        side = self._computing_side(self.data_view)
        array = self._resident(self.data_view, Intent.WRITE, side)
        np.subtract(array, self._resident(self.diff_view, Intent.READ, side), out=array)

    def copy_from(self, source: Blob, copy_diff: bool = False, reshape: bool = False) -> None:
        """Copy the source's data, or with copy_diff its gradient. ValueError if shapes differ, unless reshape."""
        if source.shape != self._shape:
            if not reshape:
                raise ValueError(f"cannot copy {source.describe()} into {self.describe()}: pass reshape=True to resize")
            self.reshape(source.shape)
        if source.dtype != self.dtype:
            target = self.diff if copy_diff else self.data
            target[...] = source.cpu_diff() if copy_diff else source.cpu_data()
            return
        here, there = (self.diff_view, source.diff_view) if copy_diff else (self.data_view, source.data_view)
        source._check_owner(there)
        self._check_owner(here, writes=True)
        _copy(there, here)

    # ---------------------------------------------------------------- files

    def from_proto(self, proto: Any, reshape: bool = True) -> None:
        """Take shape, data and (if present) gradient from a BlobProto, in float or double, legacy shapes included.

        Raises NetError (a ValueError) if the message's values do not fill its shape or, without reshape, its shape is
        another one. Nothing changes then.
        """
        data, diff = blob_array(proto), blob_array(proto, diff=True)
        shape = blob_shape(proto)
        if data is None and 0 not in shape:
            raise NetError(f"an array of shape {shape} without values")
        if reshape:
            self.reshape(shape)
        elif not shape_matches(proto, self._shape):
            raise NetError(f"{self.describe()} cannot take values of shape {shape}")
        if data is not None:
            self._replace(self._data, data)
        if diff is not None:
            self._replace(self._diff_half(), diff)

    def _replace(self, half: _Half, values: np.ndarray) -> None:
        self._writable(half, Intent.OVERWRITE)[...] = values.reshape(self._shape)

    def to_proto(self, write_diff: bool = False) -> Any:
        """A BlobProto with the shape and the values (double for float64, float otherwise), the gradient if asked."""
        proto = caffe_pb2.BlobProto()
        fill_blob(proto, self.cpu_data())
        if write_diff:
            fill_blob(proto, self.cpu_diff(), diff=True)
        return proto

    # ---------------------------------------------------------------- for people

    def describe(self) -> str:
        """Name and shape, as messages have them."""
        dims = " x ".join(map(str, self._shape)) or "scalar"
        return f"blob '{self.name}' ({dims})" if self.name else f"a blob ({dims})"

    def __repr__(self) -> str:
        return f"Blob({', '.join(map(str, self._shape))}, dtype={self.dtype}, name={self.name!r})"


def from_dlpack(source: Any, device: Device | None = None, name: str = "") -> Blob:
    """A blob over the memory of another library's array (a PyTorch tensor, say), on the host or a GPU, without a copy.

    `net.blobs[name].share_data(from_dlpack(tensor))` makes it a net's input. An array on a GPU lives on that GPU's
    device, unless another of the same GPU is given. Raises what `numpy.from_dlpack` raises for arrays that NumPy cannot
    have, ValueError or DeviceError for one that is not C-contiguous or not writable.
    """
    if source.__dlpack_device__()[0] != _DLPACK_CUDA:
        return Blob.adopt(np.from_dlpack(source), device, name)
    from blobmem.devices.cuda import exchange

    other = exchange.foreign(source)
    device = devices.get(f"cuda:{other.ordinal}") if device is None else device
    if getattr(device, "ordinal", None) != other.ordinal:
        raise DeviceError(
            f"the array is on GPU {other.ordinal}, and the blob was to be on {device.name}: copy it there"
        )
    device.synchronize()  # whatever its owner queued
    blob = Blob(other.shape, dtype=other.dtype, device=device, name=name)
    blob.data_view.memory.set_device_array(other.address, blob.nbytes, other.owner)
    return blob


def _flat(shape: Sequence[Any]) -> Sequence[Any]:
    """The dimensions, whether given one by one or as one sequence."""
    if len(shape) == 1 and not np.isscalar(shape[0]) and np.ndim(shape[0]) == 1:
        return tuple(shape[0])
    return shape


def _sumsq(array: np.ndarray) -> float:
    return float(np.square(array, dtype=np.float64).sum())


def _copy(source: View, target: View) -> None:
    """Copy bytes on the side that holds the source's; every byte of the target is replaced."""
    if source.memory is target.memory and source.offset == target.offset:
        return
    side = source.memory.resident_side(source.offset, source.nbytes)
    if target.memory.device is not source.memory.device:
        side = Side.HOST
    if side is Side.DEVICE:
        address = source.gpu_data()
        target.memory.device.memcpy_dtod(target.gpu_data(Intent.OVERWRITE), address, source.nbytes)
    else:
        values = source.cpu_data()
        target.cpu_data(Intent.OVERWRITE)[...] = values
