"""What CUDA ops compute on: an address on a device, with a shape and a dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


class CudaArray:
    """C-contiguous elements at an address. Ops get these; they never allocate, and never wait.

    Attributes:
        address: of the first element; a multiple of 512 for a whole operand (of 256 from RMM).
        shape, dtype, size, nbytes, ndim: as NumPy's.
        device: where it is.
    """

    __slots__ = ("address", "device", "dtype", "nbytes", "ndim", "shape", "size")

    def __init__(self, address: int, shape: Sequence[int], dtype: Any, device: Any) -> None:
        self.address = address
        self.shape = shape = tuple(shape)
        self.dtype = dtype = dtype if isinstance(dtype, np.dtype) else np.dtype(dtype)
        self.device = device
        self.ndim = len(shape)
        self.size = size = math.prod(shape)
        self.nbytes = size * dtype.itemsize

    def reshape(self, *shape: int) -> CudaArray:
        """The same elements in another shape; one -1 stands for what is left."""
        if -1 in shape:
            known = -math.prod(shape)
            shape = tuple(self.size // known if dim == -1 and known else max(dim, 0) for dim in shape)
        if math.prod(shape) != self.size:
            raise ValueError(f"{self.size} elements of shape {self.shape} do not make the shape {shape}")
        return CudaArray(self.address, shape, self.dtype, self.device)

    def part(self, offset: int, shape: Sequence[int], dtype: Any = None) -> CudaArray:
        """An array of another shape, and dtype, from `offset` bytes on. ValueError if it reaches beyond this one."""
        part = CudaArray(self.address + offset, shape, self.dtype if dtype is None else dtype, self.device)
        if offset < 0 or offset + part.nbytes > self.nbytes:
            raise ValueError(f"{part.nbytes} bytes at {offset} are not inside an array of {self.nbytes} bytes")
        return part

    def copy_from(self, other: CudaArray) -> None:
        """Take the bytes of another array of as many bytes."""
        if self.nbytes and self.address != other.address:
            self.device.copy_bytes(self.address, other.address, self.nbytes)

    def zero(self) -> None:
        """Set every byte to zero."""
        if self.nbytes:
            self.device.set_bytes(self.address, 0, self.nbytes)

    def __repr__(self) -> str:
        return f"CudaArray({self.address:#x}, {self.shape}, {self.dtype})"
