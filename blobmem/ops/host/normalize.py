"""Division by L2 norms, and a learned scale (ParseNet, Liu et al. 2015; SSD).

x, y and their gradients are (images, channels, positions). `norms` has one norm for each image, (images,), or one for
each of its positions, (images, positions): its shape says over what they are taken. `scale` has one value for all
channels or one for each.
"""

from __future__ import annotations

import numpy as np

from blobmem.ops.host.normalize_kernels import (
    give_scale,
    places,
    places_backward,
    scale_gradient,
    whole,
    whole_backward,
)
from blobmem.ops.host.parallel import parallel_for
from blobmem.ops.registry import op

_CHUNK = 256
_GRAIN = 32768


def _grain(elements: int) -> int:
    return 1 + _GRAIN // max(1, elements)


@op
def l2_normalize_forward(x: np.ndarray, scale: np.ndarray, y: np.ndarray, norms: np.ndarray | None, *, each: bool,
                         eps: float) -> None:  # fmt: skip
    """norm = sqrt(the sum of x ** 2 + eps), over an image, or with `each` over the channels of each position.

    y = scale * x / norm, which may be x's memory. norms None: not wanted.
    """
    images, channels, inner = x.shape
    arrays = (x.reshape(-1), y.reshape(-1), (y if norms is None else norms).reshape(-1), norms is not None)
    scales = (scale.reshape(-1), scale.size == 1)
    if each:
        items = images * -(-inner // _CHUNK)
        parallel_for(places, items, *arrays, *scales, channels, inner, _CHUNK, float(eps),
                     grain=_grain(channels * min(inner, _CHUNK)), scratch_of=(_CHUNK, np.float64))  # fmt: skip
    else:
        parallel_for(whole, images, *arrays, *scales, channels, inner, float(eps), grain=_grain(channels * inner))


@op
def l2_normalize_backward(x: np.ndarray, scale: np.ndarray, norms: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
    """dx = (scale * dy - x * the sum of x * scale * dy / norm ** 2) / norm, the sum being taken as the norm was."""
    images, channels, inner = x.shape
    arrays = (x.reshape(-1), norms.reshape(-1), scale.reshape(-1), scale.size == 1, dy.reshape(-1), dx.reshape(-1))
    if norms.ndim == 2:
        items = images * -(-inner // _CHUNK)
        parallel_for(places_backward, items, *arrays, channels, inner, _CHUNK,
                     grain=_grain(channels * min(inner, _CHUNK)), scratch_of=(_CHUNK, np.float64))  # fmt: skip
    else:
        parallel_for(whole_backward, images, *arrays, channels, inner, grain=_grain(channels * inner))


@op(workspace=lambda x, *_, **attributes: 8 * x.shape[1])
def l2_normalize_backward_scale(x: np.ndarray, norms: np.ndarray, dy: np.ndarray, dscale: np.ndarray, *,
                                accumulate: bool, ws: np.ndarray) -> None:  # fmt: skip
    """dscale (+)= the sum of x * dy / norm, of each channel or of all."""
    images, channels, inner = x.shape
    total = ws[: 8 * channels].view(np.float64)
    parallel_for(scale_gradient, channels, x.reshape(-1), norms.reshape(-1), norms.ndim == 2, dy.reshape(-1), images,
                 channels, inner, total, grain=_grain(images * inner))  # fmt: skip
    give_scale(total, dscale.reshape(-1), accumulate)
