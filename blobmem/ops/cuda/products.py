"""Products of matrices, row by row as everywhere else, through cuBLAS.

What makes products hands on its whole workspace, of which cuBLAS gets the first WORKSPACE bytes; scratch of its own
comes after them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blobmem.devices.cuda.array import CudaArray
from blobmem.ops.cuda.cublas import WORKSPACE, Cublas

Run = Callable[[int, int], None]


def only_products(*_: Any, **__: Any) -> int:
    """The workspace rule of ops with no scratch but cuBLAS's."""
    return WORKSPACE


def product(a: CudaArray, b: CudaArray, c: CudaArray, ws: CudaArray, *, transpose_a: bool = False,
            transpose_b: bool = False, alpha: float = 1.0, beta: float = 0.0) -> None:  # fmt: skip
    """c (m, n) = alpha op(a) op(b) + beta c, where op(a) is (m, k) and op(b) (k, n). With beta 0 the old c is not read.

    ValueError if the shapes do not fit.
    """
    run = prepare(a, b, c, ws, transpose_a=transpose_a, transpose_b=transpose_b, alpha=alpha, beta=beta)
    run(a.address, c.address)


def prepare(a: CudaArray, b: CudaArray, c: CudaArray, ws: CudaArray, *, transpose_a: bool = False,
            transpose_b: bool = False, alpha: float = 1.0, beta: float = 0.0) -> Run:  # fmt: skip
    """`product`, to be called with the addresses of an a and of a c, again and again, while the op runs."""
    (m, k), (same, n) = _shape(a, transpose_a), _shape(b, transpose_b)
    _check(a, b, c, (m, k) == (c.shape[0], same) and n == c.shape[1])
    cublas, kind = _cublas(c, ws), c.dtype.char
    if not c.size or not k:
        return lambda _, at: _scale(cublas, CudaArray(at, c.shape, c.dtype, c.device), beta)
    gemm, at_b, lda, ldb = cublas.gemm, b.address, a.shape[1], b.shape[1]

    # rows taken for columns are the transposed matrices: c^T = op(b)^T op(a)^T
    def run(at_a: int, at_c: int) -> None:
        gemm(kind, transpose_b, transpose_a, n, m, k, alpha, at_b, ldb, at_a, lda, beta, at_c, n)

    return run


def batched_product(a: CudaArray, b: CudaArray, c: CudaArray, ws: CudaArray, *, transpose_a: bool = False,
                    transpose_b: bool = False, alpha: float = 1.0, beta: float = 0.0) -> None:  # fmt: skip
    """`product` of each matrix in c (count, m, n), a and b; an a or b of two axes is the same for all of them."""
    (m, k), (same, n) = _shape(a, transpose_a), _shape(b, transpose_b)
    count = c.shape[0]
    counts = {array.shape[0] for array in (a, b) if array.ndim == 3}
    _check(a, b, c, same == k and c.shape[1:] == (m, n) and counts <= {count})
    cublas = _cublas(c, ws)
    if not c.size or not k:
        _scale(cublas, c, beta)
        return
    stride_a, stride_b = (array.shape[1] * array.shape[2] if array.ndim == 3 else 0 for array in (a, b))
    cublas.gemm_strided_batched(c.dtype.char, transpose_b, transpose_a, n, m, k, alpha, b.address, b.shape[-1],
                                stride_b, a.address, a.shape[-1], stride_a, beta, c.address, n, m * n,
                                count)  # fmt: skip


def _shape(array: CudaArray, transpose: bool) -> tuple[int, ...]:
    shape = array.shape[-2:]
    return shape[::-1] if transpose else shape


def _check(a: CudaArray, b: CudaArray, c: CudaArray, fits: bool) -> None:
    if not fits:
        raise ValueError(f"matrices {a.shape} and {b.shape} have no product of shape {c.shape}")


def _cublas(c: CudaArray, ws: CudaArray) -> Cublas:
    assert ws.nbytes >= WORKSPACE, "the op's workspace rule leaves out WORKSPACE"
    cublas: Cublas = c.device.library("cublas", Cublas)
    cublas.prepare(ws.address)
    return cublas


def _scale(cublas: Cublas, c: CudaArray, beta: float) -> None:
    """c = beta c: what a product of no terms leaves."""
    if beta == 0:
        c.zero()
    elif c.size and beta != 1:
        cublas.scal(c.dtype.char, c.size, beta, c.address)
