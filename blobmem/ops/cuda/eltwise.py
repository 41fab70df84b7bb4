"""Element by element over several arrays of one shape. y may be the same memory as one of the inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from blobmem.devices.cuda.array import CudaArray
from blobmem.ops.cuda.launch import Kernels
from blobmem.ops.registry import op

_KERNELS = Kernels("eltwise")
_MOST = 8  # inputs of a launch: the addresses in a Dims
_SO_FAR = -1


def _turns(xs: Sequence[CudaArray], y: CudaArray) -> Iterator[tuple[list[CudaArray], list[int]]]:
    """The inputs of each launch, and their indices; a later launch begins with y, whose index is _SO_FAR."""
    indices = list(range(len(xs)))
    if len(xs) > _MOST and y.size:  # inputs that are y itself have to be in the first launch
        indices.sort(key=lambda index: xs[index].address != y.address)
        if xs[indices[_MOST]].address == y.address:
            raise ValueError(f"at most {_MOST} of {len(xs)} inputs can be the output itself")
    yield [xs[index] for index in indices[:_MOST]], indices[:_MOST]
    for first in range(_MOST, len(xs), _MOST - 1):
        more = indices[first : first + _MOST - 1]
        yield [y, *(xs[index] for index in more)], [_SO_FAR, *more]


def weighted_sum(xs: Sequence[CudaArray], coeffs: Sequence[float], y: CudaArray) -> None:
    """y = the sum of coeffs[i] * x[i]; any x may be y."""
    if len(xs) == 2:
        _KERNELS.map("sum_two", (*xs, y), *coeffs)
        return
    if len(xs) <= _MOST:
        factors = [*coeffs, *[0.0] * (_MOST - len(xs))]
        _KERNELS.over(y, "sum", y.size, [x.address for x in xs], len(xs), y, y.size, *factors)
        return
    for arrays, indices in _turns(xs, y):
        factors = [1.0 if index == _SO_FAR else coeffs[index] for index in indices] + [0.0] * (_MOST - len(indices))
        _KERNELS.over(y, "sum", y.size, [x.address for x in arrays], len(arrays), y, y.size, *factors)


def _product(xs: Sequence[CudaArray], y: CudaArray) -> None:
    """y = the product of all x; any x may be y."""
    if len(xs) == 2:
        _KERNELS.map("product_two", (*xs, y))
        return
    for arrays, _ in _turns(xs, y):
        _KERNELS.over(y, "product", y.size, [x.address for x in arrays], len(arrays), y, y.size)


@op(family="cuda")
def eltwise_sum(*arrays: CudaArray, coeffs: tuple[float, ...]) -> None:
    """y = the sum of coeffs[i] * x[i]; y is the last array."""
    *xs, y = arrays
    weighted_sum(xs, coeffs, y)


@op(family="cuda")
def eltwise_sum_backward(dy: CudaArray, dx: CudaArray, *, coeff: float) -> None:
    """dx = coeff * dy."""
    if coeff == 1:
        dx.copy_from(dy)
    else:
        _KERNELS.map("scaled", (dy, dx), coeff)


@op(family="cuda")
def multiply(x: CudaArray, number: CudaArray, y: CudaArray, *, accumulate: bool = False) -> None:
    """y (+)= x times a number, an array of one, of float32 where the others are halves."""
    _KERNELS.map("multiply", (x, y), number, accumulate)


@op(family="cuda")
def eltwise_prod(*arrays: CudaArray) -> None:
    """y = the product of all x; y is the last array."""
    *xs, y = arrays
    _product(xs, y)


@op(family="cuda")
def eltwise_prod_backward(dy: CudaArray, dx: CudaArray, *others: CudaArray) -> None:
    """dx = dy times the other inputs, right where an input is zero too."""
    _product((dy, *others), dx)


@op(family="cuda")
def eltwise_prod_backward_unstable(dy: CudaArray, dx: CudaArray, x: CudaArray, y: CudaArray) -> None:
    """dx = dy * y / x: fewer reads for many inputs, not a number where x is zero."""
    _KERNELS.map("quotient_gradient", (dy, x, y, dx))


@op(family="cuda")
def eltwise_max(*arrays: CudaArray) -> None:
    """y = the largest x, and mask (int32) = which that is; y and mask are the last two arrays.

    Of equal ones it is the first, except that the second wins against the first, as in Caffe.
    """
    *xs, y, mask = arrays
    for inputs, indices in _turns(xs, y):
        addresses = [x.address for x in inputs]
        _KERNELS.over(y, "maximum", y.size, addresses, indices, len(inputs), y, mask, y.size)


@op(family="cuda")
def eltwise_max_backward(dy: CudaArray, mask: CudaArray, dx: CudaArray, *, index: int) -> None:
    """dx = dy where input `index` was the largest, else 0."""
    _KERNELS.map("maximum_gradient", (dy, mask, dx), index)
