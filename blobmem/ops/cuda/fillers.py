"""How parameters and dummy data start: the numbers of `blobmem.ops.host.fillers`, to rounding."""

from __future__ import annotations

from blobmem.devices.cuda.array import CudaArray
from blobmem.ops.cuda.launch import THREADS, Kernels
from blobmem.ops.cuda.neuron import fill
from blobmem.ops.host.fillers import Filler, bilinear_scale
from blobmem.ops.host.random import Draws
from blobmem.ops.registry import op

_KERNELS = Kernels("fillers")


@op(family="cuda")
def fill_random(y: CudaArray, *, filler: Filler, draws: Draws) -> None:
    """Fill an array as the host's op of this name does; the same numbers for the same `draws`.

    Raises NetError where "bilinear" gets planes that are not square.
    """
    if y.size == 0:
        return
    if filler.kind == "constant":
        fill(y, value=filler.value)
    elif filler.kind == "bilinear":
        width = filler.bilinear_width(y.shape)
        _KERNELS.map("bilinear", (y,), width, *bilinear_scale(width))
    elif filler.kind in ("gaussian", "msra"):
        _KERNELS.map("gauss", (y,), *filler.normal(y.shape), *draws.key().tolist())
        if filler.kind == "gaussian" and filler.sparse >= 0:
            _KERNELS.map("clear_some", (y,), filler.sparse / y.shape[0], *draws.key(1).tolist())
    else:
        low, high = filler.bounds(y.shape)
        _KERNELS.map("uniform", (y,), low, high - low, *draws.key().tolist())
        if filler.kind == "positive_unitball":
            _KERNELS.run(y, "normalize_rows", y.shape[0], THREADS, y, y.size // y.shape[0])
