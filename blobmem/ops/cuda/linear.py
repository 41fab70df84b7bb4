"""Inner products: y (M, N) from x (M, K) and weights w (N, K), or (K, N) with `transpose`."""

from __future__ import annotations

from typing import Any

from blobmem.devices.cuda.array import CudaArray
from blobmem.ops.cuda import channels
from blobmem.ops.cuda.launch import THREADS, Kernels
from blobmem.ops.cuda.neuron import relu_forward
from blobmem.ops.cuda.products import LARGE, only_products, product
from blobmem.ops.registry import op

_KERNELS = Kernels("linear")
_FEW, _LONG, _MOST_PRODUCTS = 2048, 32, 1 << 20
"""Numbers of a result, and products in the sum of each and in all, for which cuBLAS has no tiles that fill a card: a
warp for each number is sooner ready."""


def forward(x: CudaArray, w: CudaArray, b: CudaArray | None, y: CudaArray, ws: CudaArray, *, transpose: bool,
            relu: bool = False) -> None:  # fmt: skip
    """`inner_product_forward`, and with `relu` max(0, .) of that."""
    if not transpose and y.size <= _FEW and _LONG <= x.shape[1] <= _MOST_PRODUCTS // max(1, y.size):
        _KERNELS.run(y, "few_products", -(-y.size // 8), THREADS, x, w, b, y, y.size, *w.shape, relu)
        return
    if b is not None and not relu and y.nbytes >= LARGE:
        # The bias first: reading and writing y once more takes longer. cublasLt would add it in no time, if each part
        # of a product by rows that begin alike finds its own at a whole 16 bytes.
        _KERNELS.over(y, "spread", y.size, b, y, y.size, b.size)
        product(x, w, y, ws, transpose_b=not transpose, beta=1.0)
        return
    product(x, w, y, ws, transpose_b=not transpose)
    if b is not None:
        _KERNELS.over(y, "add_bias", y.size, y, b, y.size, b.size, relu)
    elif relu:
        relu_forward(y, y, slope=0.0)


@op(family="cuda", workspace=only_products)
def inner_product_forward(x: CudaArray, w: CudaArray, b: CudaArray | None, y: CudaArray, *, transpose: bool,
                          ws: CudaArray) -> None:  # fmt: skip
    """y = x w^T + b (x w + b with `transpose`); b (N,) or None."""
    forward(x, w, b, y, ws, transpose=transpose)


@op(family="cuda", workspace=only_products)
def inner_product_backward_data(dy: CudaArray, w: CudaArray, dx: CudaArray, *, transpose: bool, ws: CudaArray,
                                add: bool = False) -> None:  # fmt: skip
    """dx = dy w (dy w^T with `transpose`), added to it with `add`."""
    product(dy, w, dx, ws, transpose_b=transpose, beta=float(add))


@op(family="cuda", workspace=only_products)
def inner_product_backward_weights(x: CudaArray, dy: CudaArray, dw: CudaArray, *, transpose: bool, accumulate: bool,
                                   ws: CudaArray) -> None:  # fmt: skip
    """dw (+)= dy^T x (x^T dy with `transpose`)."""
    rows, other = (x, dy) if transpose else (dy, x)
    product(rows, other, dw, ws, transpose_a=True, beta=float(accumulate))


def _bias_room(dy: Any, db: Any, **_: Any) -> int:
    return channels.workspace_bytes((dy.shape[0], dy.shape[1], 1))


@op(family="cuda", workspace=_bias_room)
def inner_product_backward_bias(dy: CudaArray, db: CudaArray, *, accumulate: bool, ws: CudaArray | None = None) -> None:
    """db (+)= dy summed over its rows."""
    channels.sum_per_channel((dy.shape[0], dy.shape[1], 1), dy, None, db, ws, accumulate=accumulate)
