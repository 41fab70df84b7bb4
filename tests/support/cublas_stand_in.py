"""What stands for `Cublas` on the emulated device: the same methods, on host memory, in NumPy."""

from __future__ import annotations

import ctypes

import numpy as np

from blobmem import dtypes
from blobmem.ops.cuda.cublas import WORKSPACE

_SPOILT = 1 << 16  # bytes at either end
_TYPES = {char: dtypes.of(name) for char, name in zip("fdeE", dtypes.NAMES, strict=True)}


class CublasStandIn:
    """Adds up in double precision, and rounds before it adds to c: opposite products leave nothing.

    A product leaves rubbish in its workspace, so that an op which has something of its own there gives wrong results.
    """

    def __init__(self, device):
        self.device = device
        self._workspace = 0

    def prepare(self, workspace):
        assert workspace % 256 == 0, "cuBLAS wants its workspace at a multiple of 256"
        assert self.device.math in ("fp32", "tf32")
        self._workspace = workspace

    def gemm(self, kind, transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
        self.gemm_strided_batched(
            kind, transpose_a, transpose_b, m, n, k, alpha, a, lda, 0, b, ldb, 0, beta, c, ldc, 0, 1
        )

    def gemm_strided_batched(self, kind, transpose_a, transpose_b, m, n, k, alpha, a, lda, stride_a, b, ldb,
                             stride_b, beta, c, ldc, stride_c, count):  # fmt: skip
        assert min(m, n, k, count) > 0
        assert self._workspace, "a product before prepare"
        workspace, width, sums = self._workspace, _TYPES[kind].itemsize, dtypes.exact(_TYPES[kind])

        def work():
            for at in (0, WORKSPACE - _SPOILT):
                ctypes.memset(workspace + at, 0xFF, _SPOILT)
            a_shape, b_shape = (k, m) if transpose_a else (m, k), (n, k) if transpose_b else (k, n)
            for i in range(count):
                left = _matrix(kind, a + i * stride_a * width, *a_shape, lda)
                right = _matrix(kind, b + i * stride_b * width, *b_shape, ldb)
                result = _matrix(kind, c + i * stride_c * width, m, n, ldc)
                left, right = (left.T if transpose_a else left), (right.T if transpose_b else right)
                value = (alpha * (left.astype(np.float64) @ right.astype(np.float64))).astype(sums)
                result[...] = value if beta == 0 else value + sums.type(beta) * result

        self.device.do(work)

    def scal(self, kind, n, alpha, x):
        def work():
            _matrix(kind, x, n, 1, n)[...] *= alpha

        self.device.do(work)


def _matrix(kind, address, rows, columns, ld):
    """A view of memory: rows by columns, each column `ld` elements after the one before."""
    assert ld >= rows
    size, dtype = ld * (columns - 1) + rows, _TYPES[kind]
    flat = np.frombuffer((ctypes.c_char * (size * dtype.itemsize)).from_address(address), dtype)
    return np.lib.stride_tricks.as_strided(flat, (rows, columns), (dtype.itemsize, ld * dtype.itemsize))
