"""More functions of one element at a time.

x and y (dy and dx) may be the same memory, and have one size; shapes do not matter. What is not a number stays so,
except where y is a comparison.
"""

from __future__ import annotations

from blobmem.devices.cuda.array import CudaArray
from blobmem.ops.cuda.launch import Kernels
from blobmem.ops.registry import op

_KERNELS = Kernels("activation")


@op(family="cuda")
def absval_forward(x: CudaArray, y: CudaArray) -> None:
    """y = |x|."""
    _KERNELS.map("absval", (x, y))


@op(family="cuda")
def absval_backward(x: CudaArray, dy: CudaArray, dx: CudaArray) -> None:
    """dx = dy times the sign of x, which is 0 for 0."""
    _KERNELS.map("absval_gradient", (x, dy, dx))


@op(family="cuda")
def bnll_forward(x: CudaArray, y: CudaArray) -> None:
    """y = log(1 + exp(x)), computed as max(x, 0) + log(1 + exp(-|x|)), which cannot overflow."""
    _KERNELS.map("bnll", (x, y))


@op(family="cuda")
def bnll_backward(y: CudaArray, dy: CudaArray, dx: CudaArray) -> None:
    """dx = dy * (1 - exp(-y)), the slope being the sigmoid of x."""
    _KERNELS.map("bnll_gradient", (y, dy, dx))


@op(family="cuda")
def clip_forward(x: CudaArray, y: CudaArray, *, low: float, high: float) -> None:
    """y = x where that lies in [low, high], else the nearer bound."""
    _KERNELS.map("clip", (x, y), low, high)


@op(family="cuda")
def clip_backward(x: CudaArray, dy: CudaArray, dx: CudaArray, *, low: float, high: float) -> None:
    """dx = dy where x lies in [low, high], bounds included, else 0."""
    _KERNELS.map("clip_gradient", (x, dy, dx), low, high)


@op(family="cuda")
def elu_forward(x: CudaArray, y: CudaArray, *, alpha: float) -> None:
    """y = x where positive, alpha * (exp(x) - 1) elsewhere; Clevert, Unterthiner and Hochreiter 2016."""
    _KERNELS.map("elu", (x, y), alpha)


@op(family="cuda")
def elu_backward(x: CudaArray, y: CudaArray, dy: CudaArray, dx: CudaArray, *, alpha: float) -> None:
    """dx = dy where x is positive, dy * (alpha + y) elsewhere; y serves as x when alpha is not negative."""
    _KERNELS.map("elu_gradient", (x, y, dy, dx), alpha)


@op(family="cuda")
def exp_forward(x: CudaArray, y: CudaArray, *, rate: float, offset: float) -> None:
    """y = exp(rate * x + offset)."""
    _KERNELS.map("exponential", (x, y), rate, offset)


@op(family="cuda")
def exp_backward(y: CudaArray, dy: CudaArray, dx: CudaArray, *, rate: float, offset: float) -> None:
    """dx = dy * rate * y; the offset is in y."""
    _KERNELS.map("exponential_gradient", (y, dy, dx), rate)


@op(family="cuda")
def log_forward(x: CudaArray, y: CudaArray, *, scale: float, shift: float, factor: float) -> None:
    """y = factor * log(scale * x + shift), the logarithm being the natural one."""
    _KERNELS.map("logarithm", (x, y), scale, shift, factor)


@op(family="cuda")
def log_backward(x: CudaArray, dy: CudaArray, dx: CudaArray, *, scale: float, shift: float, factor: float) -> None:
    """dx = dy * factor * scale / (scale * x + shift)."""
    _KERNELS.map("logarithm_gradient", (x, dy, dx), scale, shift, factor * scale)


@op(family="cuda")
def relu6_forward(x: CudaArray, y: CudaArray, *, slope: float) -> None:
    """y = min(x, 6) where x is positive, slope * x elsewhere; the slope is not negative."""
    _KERNELS.map("relu6", (x, y), slope)


@op(family="cuda")
def relu6_backward(x: CudaArray, dy: CudaArray, dx: CudaArray, *, slope: float) -> None:
    """dx = dy where x lies between 0 and 6, 0 where it is 6 or more, slope * dy elsewhere; y serves as x.

    The slope is not negative.
    """
    _KERNELS.map("relu6_gradient", (x, dy, dx), slope)


@op(family="cuda")
def swish_forward(x: CudaArray, y: CudaArray, *, beta: float) -> None:
    """y = x * sigmoid(beta * x); Ramachandran, Zoph and Le 2017."""
    _KERNELS.map("swish", (x, y), beta)


@op(family="cuda")
def swish_backward(x: CudaArray, dy: CudaArray, dx: CudaArray, *, beta: float) -> None:
    """dx = dy * s * (1 + beta * x * (1 - s)) with s = sigmoid(beta * x)."""
    _KERNELS.map("swish_gradient", (x, dy, dx), beta)


@op(family="cuda")
def threshold_forward(x: CudaArray, y: CudaArray, *, threshold: float) -> None:
    """y = 1 where x is above the threshold, else 0."""
    _KERNELS.map("above", (x, y), threshold)
