"""Products of matrices, row by row as everywhere else, through cuBLAS.

What makes products hands on its whole workspace, of which cuBLAS gets the first WORKSPACE bytes; scratch of its own
comes after them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from blobmem.devices.cuda.array import CudaArray
from blobmem.dtypes import is_half
from blobmem.ops.cuda.cublas import WORKSPACE, Cublas

Run = Callable[[int, int], None]

LARGE = 256 << 20
"""Bytes of a matrix for which another kernel or two take no time. At a fourth of them little is gained, or nothing."""

_TAKEN_BY_ROWS = {(False, True): 2, (False, False): 0, (True, False): 0}
"""Whether a and b are transposed -> which of a, b and c may be taken by rows that begin alike: its rows are rows of the
others or in none, and its columns are rows of another."""


class Part(NamedTuple):
    """A product of parts of the matrices.

    places: of a, b and c, the bytes that come before, and the elements from one row to the next.
    """

    m: int
    n: int
    k: int
    places: list[tuple[int, int]]
    beta: float


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
    parts = _by_rows((a, b, c), (m, n, k), transpose_a, transpose_b, beta)

    # rows taken for columns are the transposed matrices: c^T = op(b)^T op(a)^T
    def run(at_a: int, at_c: int) -> None:
        for m, n, k, ((in_a, lda), (in_b, ldb), (in_c, ldc)), beta in parts:
            gemm(kind, transpose_b, transpose_a, n, m, k, alpha, at_b + in_b, ldb, at_a + in_a, lda, beta, at_c + in_c,
                 ldc)  # fmt: skip

    return run


def _by_rows(arrays: tuple[CudaArray, CudaArray, CudaArray], sizes: tuple[int, int, int], transpose_a: bool,
             transpose_b: bool, beta: float) -> list[Part]:  # fmt: skip
    """What a product is made of, one part unless a matrix is worth being taken by rows that begin alike."""
    taken = _TAKEN_BY_ROWS.get((transpose_a, transpose_b))
    if taken is None or not _pays(arrays, taken):
        return [Part(*sizes, [(0, array.shape[1]) for array in arrays], beta)]
    # m, n and k by number: those that are the rows and columns of each
    axes = (((2, 0) if transpose_a else (0, 2)), ((1, 2) if transpose_b else (2, 1)), (0, 1))
    (row, column), itemsize = axes[taken], arrays[taken].dtype.itemsize
    parts = []
    for first, step, begin, width in _alike(arrays[taken].shape[1], 16 // itemsize):
        size, start = list(sizes), [0, 0, 0]
        size[row], size[column] = len(range(first, sizes[row], step)), width
        start[row], start[column] = first, begin
        places = [
            ((start[down] * line + start[along]) * itemsize, line * step if down == row else line)
            for (down, along), (_, line) in zip(axes, (array.shape for array in arrays), strict=True)
        ]
        if size[row]:  # later terms of the same sums are added
            parts.append(Part(size[0], size[1], size[2], places, beta if start[2] == 0 else 1.0))
    return parts


def _pays(arrays: tuple[CudaArray, ...], taken: int) -> bool:
    """Whether a large matrix keeps tensor cores waiting, which get numbers by 16 bytes, and no other does.

    Of halves only a result: parts of one sum would meet in a half, rounded each time.
    """
    matrix, pack = arrays[taken], 16 // arrays[taken].dtype.itemsize
    apart = [array.shape[1] % pack for index, array in enumerate(arrays) if index != taken]
    cores = taken == 2 if is_half(matrix.dtype) else matrix.dtype.char == "f" and matrix.device.math == "tf32"
    wide = matrix.nbytes >= LARGE and matrix.shape[1] >= 64 * pack
    return cores and wide and matrix.shape[1] % pack > 0 and not any(apart)


def _alike(columns: int, pack: int) -> Iterator[tuple[int, int, int, int]]:
    """(First row, rows from one to the next, first column, columns) of parts of a matrix of whole rows.

    Of each row most is aligned to `pack` elements; the few columns before and behind are parts of their own.
    """
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
