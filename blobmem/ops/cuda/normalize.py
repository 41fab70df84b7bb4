"""Division by L2 norms, and a learned scale (ParseNet, Liu et al. 2015; SSD).

x, y and their gradients are (images, channels, positions). `norms` has one norm for each image, (images,), or one for
each of its positions, (images, positions): its shape says over what they are taken. `scale` has one value for all
channels or one for each.
"""

from __future__ import annotations

from typing import Any

from blobmem.devices.cuda.array import CudaArray
from blobmem.dtypes import exact
from blobmem.ops.cuda import channels
from blobmem.ops.cuda.launch import THREADS, Kernels
from blobmem.ops.registry import op

_KERNELS = Kernels("normalize")


def _up(nbytes: int) -> int:
    """The next multiple of 64, where another array may begin."""
    return -(-nbytes // 64) * 64


def _image(x: Any) -> channels.Folded:
    """Images as the channels of an array, for sums over all of each."""
    images, count, inner = x.shape
    return 1, images, count * inner


def _planes(x: Any) -> channels.Folded:
    images, count, inner = x.shape
    return 1, images * count, inner


def _forward_workspace(x: Any, *_: Any, each: bool, **attributes: Any) -> int:
    """Sums of squares, and of parts of images."""
    return 0 if each else _up(x.shape[0] * exact(x.dtype).itemsize) + channels.workspace_bytes(_image(x))


@op(family="cuda", workspace=_forward_workspace)
def l2_normalize_forward(x: CudaArray, scale: CudaArray, y: CudaArray, norms: CudaArray | None, *, each: bool,
                         eps: float, ws: CudaArray) -> None:  # fmt: skip
    """norm = sqrt(the sum of x ** 2 + eps), over an image, or with `each` over the channels of each position.

    y = scale * x / norm, which may be x's memory. norms None: not wanted.
    """
    images, count, inner = x.shape
    one = scale.size == 1
    if each:
        blocks = images * -(-inner // 32)
        _KERNELS.run(x, "normalize_positions", blocks, THREADS, x, scale, y, norms, count, inner, one, eps)
        return
    squares = ws.part(0, (images,), exact(x.dtype))
    sums = ws.part(_up(squares.nbytes), (channels.workspace_bytes(_image(x)),))
    channels.sum_per_channel(_image(x), x, None, squares, sums, accumulate=False, kind=channels.SQUARE)
    sizes = images, count, inner, one
    _KERNELS.over(x, "normalize_images", max(x.size, images), x, scale, y, norms, squares, *sizes, eps)


def _backward_workspace(x: Any, scale: Any, norms: Any, *_: Any, **attributes: Any) -> int:
    """Sums over planes, over images, and over parts of planes."""
    if len(norms.shape) == 2:
        return 0
    images, planes = (_up(n * exact(x.dtype).itemsize) for n in (x.shape[0], x.shape[0] * x.shape[1]))
    return images + planes + channels.workspace_bytes(_planes(x))


@op(family="cuda", workspace=_backward_workspace)
def l2_normalize_backward(x: CudaArray, scale: CudaArray, norms: CudaArray, dy: CudaArray, dx: CudaArray, *,
                          ws: CudaArray) -> None:  # fmt: skip
    """dx = (scale * dy - x * the sum of x * scale * dy / norm ** 2) / norm, the sum being taken as the norm was."""
    images, count, inner = x.shape
    one = scale.size == 1
    arrays = x, scale, norms, dy, dx
    if norms.ndim == 2:
        blocks = images * -(-inner // 32)
        _KERNELS.run(x, "normalize_positions_gradient", blocks, THREADS, *arrays, count, inner, one)
        return
    if x.size == 0:
        return
    along = ws.part(0, (images,), exact(x.dtype))
    planes = ws.part(_up(along.nbytes), (images * count,), exact(x.dtype))
    sums = ws.part(_up(along.nbytes) + _up(planes.nbytes), (channels.workspace_bytes(_planes(x)),))
    channels.sum_per_channel(_planes(x), x, dy, planes, sums, accumulate=False, kind=channels.PRODUCT)
    _KERNELS.run(x, "sum_planes", images, THREADS, planes, scale, norms, along, count, one)
    _KERNELS.over(x, "normalize_images_gradient", x.size, *arrays, along, images, count, inner, one)


def _scale_workspace(x: Any, *_: Any, **attributes: Any) -> int:
    """A double for each part of each channel."""
    return 8 * x.shape[1] * channels.splits(x.shape)


@op(family="cuda", workspace=_scale_workspace)
def l2_normalize_backward_scale(x: CudaArray, norms: CudaArray, dy: CudaArray, dscale: CudaArray, *, accumulate: bool,
                                ws: CudaArray) -> None:  # fmt: skip
    """dscale (+)= the sum of x * dy / norm, of each channel or of all."""
    images, count, inner = x.shape
    if x.size == 0:
        if not accumulate:
            dscale.zero()
        return
    parts = channels.splits((images, count, inner))
    sizes = images, count, inner, parts, norms.ndim == 2
    _KERNELS.run(x, "scale_gradient_parts", count * parts, THREADS, x, norms, dy, ws, *sizes)
    channels.add_parts(ws, dscale, count * parts // dscale.size, accumulate=accumulate)
