"""cuBLAS for one device and thread: what its products depend on, set when it changes, and the calls themselves."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

from blobmem.errors import DeviceError

WORKSPACE = 8 << 20
"""Bytes at the start of the workspace of every op that makes products. Always as many, however large the workspace
itself is: which kernel cuBLAS takes, and so the last digits, depends on it."""

_spare: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
"""Handles of threads that have ended, by CUDA context: they may only be destroyed where it is current, and a new one
takes memory of the GPU and milliseconds."""


class Cublas:
    """A handle. Matrices lie column by column, as Fortran's, and are given by their address.

    `itemsize`, 4 or 8, chooses the precision. Nothing waits. What cuBLAS refuses, a DeviceError says.
    """

    def __init__(self, device: Any) -> None:
        try:
            from nvmath.bindings import cublas
        except ImportError as error:
            remedy = "pip install 'blobmem[cuda]' installs it"
            raise DeviceError(f"products on a CUDA device need nvmath-python ({error}): {remedy}") from error
        self.device = device
        self._library = cublas
        self._error = cublas.cuBLASError
        self._pool = _spare.setdefault(device.context, [])
        try:
            self._handle: int = self._pool.pop() if self._pool else cublas.create()
        except (self._error, RuntimeError) as error:  # RuntimeError: the library itself is missing
            raise DeviceError(f"cuBLAS does not start: {error}") from error
        self._modes = {"fp32": int(cublas.Math.DEFAULT_MATH), "tf32": int(cublas.Math.TF32_TENSOR_OP_MATH)}
        self._gemm = {4: cublas.sgemm, 8: cublas.dgemm}
        self._batched = {4: cublas.sgemm_strided_batched, 8: cublas.dgemm_strided_batched}
        self._scal = {4: cublas.sscal, 8: cublas.dscal}
        # alpha and beta: cuBLAS has read them when a call returns, so that the next one may use the same memory
        self._scalars: dict[int, Any] = {4: (ctypes.c_float * 2)(), 8: (ctypes.c_double * 2)()}
        self._alpha = {itemsize: ctypes.addressof(pair) for itemsize, pair in self._scalars.items()}
        self._stream: int | None = None
        self._workspace: int | None = None
        self._math: str | None = None

    def prepare(self, workspace: int) -> None:
        """What the calls that follow use: WORKSPACE bytes at that address, the device's compute stream and `math`."""
        stream, math = self.device.compute_stream().handle, self.device.math
        if stream != self._stream:
            self._call(self._library.set_stream, stream)
            self._stream, self._workspace = stream, None  # cuBLAS forgets its workspace with the stream
        if workspace != self._workspace:
            self._call(self._library.set_workspace, workspace, WORKSPACE)
            self._workspace = workspace
        if math != self._math:
            self._call(self._library.set_math_mode, self._modes[math])
            self._math = math

    def gemm(self, itemsize: int, transpose_a: bool, transpose_b: bool, m: int, n: int, k: int, alpha: float, a: int,
             lda: int, b: int, ldb: int, beta: float, c: int, ldc: int) -> None:  # fmt: skip
        """c (m, n) = alpha op(a) op(b) + beta c, of which op(a) is (m, k)."""
        scalars, at = self._scalars[itemsize], self._alpha[itemsize]
        scalars[0], scalars[1] = alpha, beta
        self._call(self._gemm[itemsize], transpose_a, transpose_b, m, n, k, at, a, lda, b, ldb, at + itemsize, c, ldc)

    def gemm_strided_batched(self, itemsize: int, transpose_a: bool, transpose_b: bool, m: int, n: int, k: int,
                             alpha: float, a: int, lda: int, stride_a: int, b: int, ldb: int, stride_b: int,
                             beta: float, c: int, ldc: int, stride_c: int, count: int) -> None:  # fmt: skip
        """`gemm` of `count` matrices each, which are `stride` elements apart."""
        scalars, at = self._scalars[itemsize], self._alpha[itemsize]
        scalars[0], scalars[1] = alpha, beta
        self._call(
            self._batched[itemsize], transpose_a, transpose_b, m, n, k, at, a, lda, stride_a, b, ldb, stride_b,
            at + itemsize, c, ldc, stride_c, count,
        )  # fmt: skip

    def scal(self, itemsize: int, n: int, alpha: float, x: int) -> None:
        """x = alpha x, n elements one after the other."""
        self._scalars[itemsize][0] = alpha
        self._call(self._scal[itemsize], n, self._alpha[itemsize], x, 1)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._pool.append(self._handle)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            function(self._handle, *arguments)
        except self._error as error:
            self.device.synchronize()  # a GPU that is lost says so
            raise DeviceError(f"cuBLAS: {function.__name__} failed: {error}") from error
