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

    `kind`, NumPy's code of a dtype, says what they are made of: "f", "d", or of halves, whose sums are of float32, "e"
    or "E" (bfloat16). Nothing waits. What cuBLAS refuses, a DeviceError says.
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
        self._gemm: dict[str, Callable[..., None]] = {"f": cublas.sgemm, "d": cublas.dgemm}
        self._batched: dict[str, Callable[..., None]] = {
            "f": cublas.sgemm_strided_batched, "d": cublas.dgemm_strided_batched,
        }  # fmt: skip
        self._scal: dict[str, Callable[..., None]] = {"f": cublas.sscal, "d": cublas.dscal}
        for kind in "eE":
            self._gemm[kind], self._batched[kind], self._scal[kind] = _of_halves(cublas, kind)
        # alpha and beta: cuBLAS has read them when a call returns, so that the next one may use the same memory
        single, double = (ctypes.c_float * 2)(), (ctypes.c_double * 2)()
        self._scalars: dict[str, Any] = {"f": single, "e": single, "E": single, "d": double}
        self._alpha = {kind: ctypes.addressof(pair) for kind, pair in self._scalars.items()}
        self._beta = {kind: self._alpha[kind] + ctypes.sizeof(pair) // 2 for kind, pair in self._scalars.items()}
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

    def gemm(self, kind: str, transpose_a: bool, transpose_b: bool, m: int, n: int, k: int, alpha: float, a: int,
             lda: int, b: int, ldb: int, beta: float, c: int, ldc: int) -> None:  # fmt: skip
        """c (m, n) = alpha op(a) op(b) + beta c, of which op(a) is (m, k)."""
        scalars, at = self._scalars[kind], self._alpha[kind]
        scalars[0], scalars[1] = alpha, beta
        beta_at = self._beta[kind]
        self._call(self._gemm[kind], transpose_a, transpose_b, m, n, k, at, a, lda, b, ldb, beta_at, c, ldc)

    def gemm_strided_batched(self, kind: str, transpose_a: bool, transpose_b: bool, m: int, n: int, k: int,
                             alpha: float, a: int, lda: int, stride_a: int, b: int, ldb: int, stride_b: int,
                             beta: float, c: int, ldc: int, stride_c: int, count: int) -> None:  # fmt: skip
        """`gemm` of `count` matrices each, which are `stride` elements apart."""
        scalars, at = self._scalars[kind], self._alpha[kind]
        scalars[0], scalars[1] = alpha, beta
        self._call(
            self._batched[kind], transpose_a, transpose_b, m, n, k, at, a, lda, stride_a, b, ldb, stride_b,
            self._beta[kind], c, ldc, stride_c, count,
        )  # fmt: skip

    def scal(self, kind: str, n: int, alpha: float, x: int) -> None:
        """x = alpha x, n elements one after the other."""
        self._scalars[kind][0] = alpha
        self._call(self._scal[kind], n, self._alpha[kind], x, 1)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._pool.append(self._handle)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            function(self._handle, *arguments)
        except self._error as error:
            self.device.synchronize()  # a GPU that is lost says so
            raise DeviceError(f"cuBLAS: {function.__name__} failed: {error}") from error


# cuBLAS's own numbers
_HALVES = {"e": 2, "E": 14}  # CUDA_R_16F, CUDA_R_16BF
_R_32F, _COMPUTE_32F, _DEFAULT_ALGORITHM = 0, 68, -1


def _of_halves(cublas: Any, kind: str) -> tuple[Callable[..., None], Callable[..., None], Callable[..., None]]:
    """gemm, gemm_strided_batched and scal of arrays of halves, called as those of float32 are."""
    half, how = _HALVES[kind], (_COMPUTE_32F, _DEFAULT_ALGORITHM)

    def gemm(handle: int, transpose_a: bool, transpose_b: bool, m: int, n: int, k: int, alpha: int, a: int, lda: int,
             b: int, ldb: int, beta: int, c: int, ldc: int) -> None:  # fmt: skip
        size = transpose_a, transpose_b, m, n, k
        cublas.gemm_ex(handle, *size, alpha, a, half, lda, b, half, ldb, beta, c, half, ldc, *how)

    def gemm_strided_batched(handle: int, transpose_a: bool, transpose_b: bool, m: int, n: int, k: int, alpha: int,
                             a: int, lda: int, stride_a: int, b: int, ldb: int, stride_b: int, beta: int, c: int,
                             ldc: int, stride_c: int, count: int) -> None:  # fmt: skip
        size = transpose_a, transpose_b, m, n, k
        cublas.gemm_strided_batched_ex(
            handle, *size, alpha, a, half, lda, stride_a, b, half, ldb, stride_b, beta, c, half, ldc, stride_c, count,
            *how,
        )  # fmt: skip

    def scal(handle: int, n: int, alpha: int, x: int, step: int) -> None:
        cublas.scal_ex(handle, n, alpha, _R_32F, x, half, step, _R_32F)

    return gemm, gemm_strided_batched, scal
