"""What recurrent layers compute of their inputs: products of all steps of a run at once, none of them recurrent.

Rows are (steps, streams, ...); "sums" is what the units' functions are of: the gates' of an LSTM. `ws` is the op's
whole workspace; sums of columns, too, take theirs from the bytes that products use, which are far more than they need.
"""

from __future__ import annotations

from blobmem.devices.cuda.array import CudaArray
from blobmem.ops.cuda.linear import (
    inner_product_backward_bias,
    inner_product_backward_data,
    inner_product_backward_weights,
    inner_product_forward,
)
from blobmem.ops.cuda.recurrent_plan import over_units, rows


def static_sums(static: CudaArray | None, w_static: CudaArray | None, fixed: CudaArray,
                ws: CudaArray) -> CudaArray | None:  # fmt: skip
    """fixed (streams, sums) = static w_static^T; None without a static input."""
    if static is None or w_static is None:
        return None
    inner_product_forward(static, w_static, None, fixed, transpose=False, ws=ws)
    return fixed


def input_sums(x: CudaArray, w_x: CudaArray, sums: CudaArray, ws: CudaArray) -> None:
    """sums = x w_x^T: the steps themselves add biases, and what is static."""
    inner_product_forward(rows(x), w_x, None, rows(sums), transpose=False, ws=ws)


def input_gradients(x: CudaArray, w_x: CudaArray, dsums: CudaArray, dx: CudaArray | None, dw_x: CudaArray | None,
                    db: CudaArray | None, accumulate: bool, ws: CudaArray) -> None:  # fmt: skip
    """The gradients of a run's inputs and, added to with `accumulate`, of their weights; None where not wanted."""
    if dw_x is not None:
        inner_product_backward_weights(rows(x), rows(dsums), dw_x, transpose=False, accumulate=accumulate, ws=ws)
    if db is not None:
        inner_product_backward_bias(rows(dsums), db, accumulate=accumulate, ws=ws)
    if dx is not None:
        inner_product_backward_data(rows(dsums), w_x, rows(dx), transpose=False, ws=ws)


def state_weights_gradient(received: CudaArray, dsums: CudaArray, dw_h: CudaArray, accumulate: bool,
                           ws: CudaArray) -> None:  # fmt: skip
    """dw_h (+)= dsums^T received, which is what the steps of a run multiplied with w_h."""
    inner_product_backward_weights(rows(received), rows(dsums), dw_h, transpose=False, accumulate=accumulate, ws=ws)


def add_over_steps(dsums: CudaArray, dfixed: CudaArray, accumulate: bool, ws: CudaArray) -> None:
    """dfixed (+)= dsums, summed over the steps of a run; nothing if it is empty."""
    if dfixed.size:
        each = dsums.reshape(dsums.shape[0], -1)
        inner_product_backward_bias(each, dfixed.reshape(-1), accumulate=accumulate, ws=ws)


def static_gradients(static: CudaArray | None, w_static: CudaArray | None, dfixed: CudaArray,
                     dstatic: CudaArray | None, dw_static: CudaArray | None, accumulate: bool,
                     ws: CudaArray) -> None:  # fmt: skip
    """The gradients of the static input and of its weights; None where not wanted."""
    if static is not None and dw_static is not None:
        inner_product_backward_weights(static, dfixed, dw_static, transpose=False, accumulate=accumulate, ws=ws)
    if w_static is not None and dstatic is not None:
        inner_product_backward_data(dfixed, w_static, dstatic, transpose=False, ws=ws)


def state_gradient(dsums: CudaArray, w_h: CudaArray, cont: CudaArray, dh_0: CudaArray | None, ws: CudaArray) -> None:
    """dh_0 = cont[0] * (dsums w_h), where dsums (streams, sums) are the first step's; nothing if it is not wanted."""
    if dh_0 is not None:
        inner_product_backward_data(dsums, w_h, dh_0, transpose=False, ws=ws)
        over_units("scale_rows", dh_0, dh_0, cont, dh_0)


def clear(accumulate: bool, *gradients: CudaArray | None) -> None:
    """What becomes of parameters' gradients when there is nothing to add up."""
    for gradient in gradients:
        if gradient is not None and not accumulate:
            gradient.zero()
