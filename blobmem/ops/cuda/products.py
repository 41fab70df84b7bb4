"""Products of matrices, row by row as everywhere else, through cuBLAS.

What makes products hands on its whole workspace, of which cuBLAS gets the first WORKSPACE bytes; scratch of its own
comes after them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from blobmem.devices.cuda.array import CudaArray
from blobmem.ops.cuda.cublas import WORKSPACE, Cublas

Run = Callable[[int, int], None]
Place = tuple[int, int]  # bytes from where a matrix begins, and elements from one row to the next

LARGE = 64 << 20
"""Bytes of a matrix beyond any card's cache, for which another kernel or two take no time."""

_TAKEN_BY_ROWS = {(False, True): 2, (False, False): 0, (True, False): 0}
"""Whether a and b are transposed -> which of a, b and c may be taken by rows that begin alike: that of which the rows are
no other's columns, and the columns may be rows of another."""


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
    gemm, at_b = cublas.gemm, b.address
    parts = [*_parts((a, b, c), (m, n, k), transpose_a, transpose_b, beta)]

    # rows taken for columns are the transposed matrices: c^T = op(b)^T op(a)^T
    def run(at_a: int, at_c: int) -> None:
        for (m, n, k), (in_a, lda), (in_b, ldb), (in_c, ldc), beta in parts:
            gemm(kind, transpose_b, transpose_a, n, m, k, alpha, at_b + in_b, ldb, at_a + in_a, lda, beta, at_c + in_c,
                 ldc)  # fmt: skip

    return run


def _parts(arrays: tuple[CudaArray, ...], sizes: tuple[int, ...], transpose_a: bool, transpose_b: bool,
           beta: float) -> Iterator[tuple[tuple[int, ...], Place, Place, Place, float]]:  # fmt: skip
    """The products that a product is made of, one unless a matrix is taken by rows that begin alike: m, n and k, where
    in a, b and c they begin, and beta."""
    axes = ("km" if transpose_a else "mk", "nk" if transpose_b else "kn", "mn")
    taken = _TAKEN_BY_ROWS.get((transpose_a, transpose_b))
    by_rows = taken is not None and _pays(arrays, taken)
    (row, column), (rows, columns) = axes[taken or 0], arrays[taken or 0].shape
    itemsize = arrays[0].dtype.itemsize
    parts = _alike(columns, 16 // itemsize) if by_rows else [(0, 1, 0, columns)]
    for first, step, begin, width in parts:
        start = {"m": 0, "n": 0, "k": 0, row: first, column: begin}
        size = dict(zip("mnk", sizes, strict=True)) | {row: len(range(first, rows, step)), column: width}
        places = [
            ((start[down] * array.shape[1] + start[along]) * itemsize, array.shape[1] * (step if down == row else 1))
            for array, (down, along) in zip(arrays, axes, strict=True)
        ]
        if size[row]:
            yield (size["m"], size["n"], size["k"]), *places, beta if start["k"] == 0 else 1.0


def _pays(arrays: tuple[CudaArray, ...], taken: int) -> bool:
    """Whether a matrix keeps tensor cores, which get numbers by 16 bytes, waiting two to three times as long as need be."""
    matrix, pack = arrays[taken], 16 // arrays[taken].dtype.itemsize
    apart = [array.shape[1] % pack for index, array in enumerate(arrays) if index != taken]
    cores = matrix.dtype.char == "f" and matrix.device.math == "tf32"
    wide = matrix.nbytes >= LARGE and matrix.shape[1] >= 64 * pack
    return cores and wide and matrix.shape[1] % pack > 0 and not any(apart)


def _alike(columns: int, pack: int) -> Iterator[tuple[int, int, int, int]]:
    """(First row, rows from one to the next, first column, columns) of parts of a matrix of whole rows. Of each most are
    aligned to `pack` elements in all its rows; the few columns before and behind are parts of their own."""
    step = pack // math.gcd(columns, pack)
    for first in range(step):
        head = -first * columns % pack
        aligned = (columns - head) // pack * pack
        for begin, end in ((0, head), (head, head + aligned), (head + aligned, columns)):
            if begin < end:
                yield first, step, begin, end - begin


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
