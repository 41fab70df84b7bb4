"""What each place of a window sees, written out: a convolution's columns, and back. Arrays are as on the host."""

from __future__ import annotations

from math import prod

from blobmem.devices.cuda.array import CudaArray
from blobmem.ops.cuda import planes
from blobmem.ops.cuda.launch import Kernels
from blobmem.ops.registry import op

Shape = tuple[int, ...]

_KERNELS = Kernels("im2col")
_AXES = 8  # of Dims


def _run(name: str, x: CudaArray, y: CudaArray, places: int, operands: tuple, kernel: Shape, stride: Shape, pad: Shape,
         dilation: Shape) -> None:  # fmt: skip
    """Raises ValueError for more than 8 spatial axes."""
    axes = len(kernel)
    if axes > _AXES:
        raise ValueError(f"columns of {axes} spatial axes: on a CUDA device there are at most {_AXES}")
    most = 2 if axes <= 2 else _AXES
    ones, zeros = (most - axes) * (1,), (most - axes) * (0,)
    dims = (ones + x.shape[2:], ones + y.shape[2:], ones + kernel, ones + stride, zeros + pad, ones + dilation)
    planes.run(_KERNELS, x, f"{name}_{most}", x.shape[0] * x.shape[1], places, *operands, *dims)


@op(family="cuda")
def im2col_forward(x: CudaArray, y: CudaArray, *, kernel: Shape, stride: Shape, pad: Shape, dilation: Shape) -> None:
    """y[:, (c, tap), place] = the element of channel c that the tap sees from there, 0 outside x."""
    places = prod(kernel) * prod(y.shape[2:])
    _run("unroll", x, y, places, (x, y, prod(x.shape[2:])), kernel, stride, pad, dilation)


@op(family="cuda")
def im2col_backward(dy: CudaArray, dx: CudaArray, *, kernel: Shape, stride: Shape, pad: Shape,
                    dilation: Shape) -> None:  # fmt: skip
    """dx = the sum of dy over the taps and places that see an element."""
    taps = prod(kernel)
    operands = dy, dx, taps * prod(dy.shape[2:]), taps
    _run("roll", dx, dy, prod(dx.shape[2:]), operands, kernel, stride, pad, dilation)
