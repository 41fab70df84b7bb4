"""What stands for `Cublas` on the emulated device: the same methods, on host memory, in NumPy."""

from __future__ import annotations

import ctypes

import numpy as np

from blobmem.ops.cuda.cublas import WORKSPACE

_SPOILT = 1 << 16  # bytes at either end
_TYPES = {4: np.float32, 8: np.float64}


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

    def gemm(self, itemsize, transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
        self.gemm_strided_batched(
            itemsize, transpose_a, transpose_b, m, n, k, alpha, a, lda, 0, b, ldb, 0, beta, c, ldc, 0, 1
        )

    def gemm_strided_batched(self, itemsize, transpose_a, transpose_b, m, n, k, alpha, a, lda, stride_a, b, ldb,
                             stride_b, beta, c, ldc, stride_c, count):  # fmt: skip
        assert min(m, n, k, count) > 0
        assert self._workspace, "a product before prepare"
        workspace = self._workspace

        def work():
            for at in (0, WORKSPACE - _SPOILT):
                ctypes.memset(workspace + at, 0xFF, _SPOILT)
            a_shape, b_shape = (k, m) if transpose_a else (m, k), (n, k) if transpose_b else (k, n)
            for i in range(count):
                left = _matrix(itemsize, a + i * stride_a * itemsize, *a_shape, lda)
                right = _matrix(itemsize, b + i * stride_b * itemsize, *b_shape, ldb)
                result = _matrix(itemsize, c + i * stride_c * itemsize, m, n, ldc)
                left, right = (left.T if transpose_a else left), (right.T if transpose_b else right)
                value = (alpha * (left.astype(np.float64) @ right.astype(np.float64))).astype(_TYPES[itemsize])
                result[...] = value if beta == 0 else value + _TYPES[itemsize](beta) * result

        self.device.do(work)

    def scal(self, itemsize, n, alpha, x):
        def work():
            _matrix(itemsize, x, n, 1, n)[...] *= alpha

        self.device.do(work)


def _matrix(itemsize, address, rows, columns, ld):
    """A view of memory: rows by columns, each column `ld` elements after the one before."""
    assert ld >= rows
    size = ld * (columns - 1) + rows
    flat = np.frombuffer((ctypes.c_char * (size * itemsize)).from_address(address), _TYPES[itemsize])
    return np.lib.stride_tricks.as_strided(flat, (rows, columns), (itemsize, ld * itemsize))
