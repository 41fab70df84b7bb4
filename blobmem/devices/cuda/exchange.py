"""Device arrays of others: handing ours out (PyCUDA, DLPack, `__cuda_array_interface__`), and taking theirs in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blobmem.errors import DeviceError

if TYPE_CHECKING:
    from blobmem.devices.cuda.context import Context


class Foreign(NamedTuple):
    """Somebody else's array on a GPU; `owner` keeps it alive."""

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype
    ordinal: int
    owner: Any


def gpu_array(context: Context, address: int, shape: tuple[int, ...], dtype: np.dtype, owner: Any) -> Any:
    """A PyCUDA GPUArray over bytes that `owner` keeps alive."""
    try:
        from pycuda.gpuarray import GPUArray
    except ImportError as error:
        raise DeviceError(f"a GPUArray needs PyCUDA ({error}): pip install 'blobmem[cuda]'") from error
    context.enter_pycuda()
    return GPUArray(shape, dtype, base=owner, gpudata=address)


def exporter(address: int, shape: tuple[int, ...], dtype: np.dtype, owner: Any) -> Any:
    """What has `__dlpack__` over bytes that `owner` keeps alive."""
    from cuda.core import Buffer
    from cuda.core.utils import StridedMemoryView

    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return StridedMemoryView.from_buffer(Buffer.from_handle(address, nbytes, owner=owner), shape, dtype=dtype)


def interface(address: int, shape: tuple[int, ...], dtype: np.dtype) -> dict[str, Any]:
    """The `__cuda_array_interface__`, version 3, of bytes that nothing is in flight over."""
    return {
        "version": 3,
        "shape": shape,
        "typestr": dtype.str,
        "data": (address, False),
        "strides": None,
        "stream": None,
    }


def foreign(source: Any) -> Foreign:
    """An array of another library on a GPU. DeviceError for one whose elements do not lie one after the other."""
    from cuda.core.utils import StridedMemoryView

    view = StridedMemoryView.from_any_interface(source, stream_ptr=-1)
    dtype, shape = np.dtype(view.dtype), tuple(view.shape)
    steps, strides = 1, []
    for dim in reversed(shape):
        strides.append(steps)
        steps *= dim
    if view.strides is not None and steps and tuple(view.strides) != tuple(reversed(strides)):
        raise DeviceError(f"an array of shape {shape} and strides {view.strides} is not contiguous: copy it first")
    if view.readonly:
        raise DeviceError("a read-only array cannot become a blob: copy it first")
    return Foreign(int(view.ptr), shape, dtype, int(view.device_id), source)
