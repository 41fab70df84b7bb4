"""What recurrent layers compute of their inputs: products of all steps of a run at once, none of them recurrent.

Rows are (steps, streams, ...); "sums" is what the units' functions are of: the gates' of an LSTM.
"""

from __future__ import annotations

import numpy as np

from blobmem.ops.host.linear import (
    inner_product_backward_bias,
    inner_product_backward_data,
    inner_product_backward_weights,
    inner_product_forward,
)


def rows(array: np.ndarray) -> np.ndarray:
    """(steps, streams, elements) as (steps * streams, elements)."""
    return array.reshape(-1, array.shape[-1])


def static_sums(static: np.ndarray | None, w_static: np.ndarray | None, fixed: np.ndarray) -> None:
    """fixed (streams, sums) = static w_static^T; nothing without a static input."""
    if static is not None and w_static is not None:
        inner_product_forward(static, w_static, None, fixed, transpose=False)


def input_sums(x: np.ndarray, w_x: np.ndarray, b: np.ndarray, fixed: np.ndarray, sums: np.ndarray) -> None:
    """sums = x w_x^T + b + fixed, which is (streams, sums), or empty."""
    inner_product_forward(rows(x), w_x, b, rows(sums), transpose=False)
    if fixed.size:
        np.add(sums, fixed, out=sums)


def input_gradients(x: np.ndarray, w_x: np.ndarray, dsums: np.ndarray, dx: np.ndarray | None, dw_x: np.ndarray | None,
                    db: np.ndarray | None, accumulate: bool) -> None:  # fmt: skip
    """The gradients of a run's inputs and, added to with `accumulate`, of their weights; None where not wanted."""
    if dw_x is not None:
        inner_product_backward_weights(rows(x), rows(dsums), dw_x, transpose=False, accumulate=accumulate)
    if db is not None:
        inner_product_backward_bias(rows(dsums), db, accumulate=accumulate)
    if dx is not None:
        inner_product_backward_data(rows(dsums), w_x, rows(dx), transpose=False)


def add_over_steps(dsums: np.ndarray, dfixed: np.ndarray, accumulate: bool) -> None:
    """dfixed (+)= dsums, summed over the steps of a run; nothing if it is empty."""
    if dfixed.size:
        inner_product_backward_bias(dsums.reshape(dsums.shape[0], -1), dfixed.reshape(-1), accumulate=accumulate)


def static_gradients(static: np.ndarray | None, w_static: np.ndarray | None, dfixed: np.ndarray,
                     dstatic: np.ndarray | None, dw_static: np.ndarray | None, accumulate: bool) -> None:  # fmt: skip
    """The gradients of the static input and of its weights; None where not wanted."""
    if static is not None and dw_static is not None:
        inner_product_backward_weights(static, dfixed, dw_static, transpose=False, accumulate=accumulate)
    if w_static is not None and dstatic is not None:
        inner_product_backward_data(dfixed, w_static, dstatic, transpose=False)


def scale_rows(source: np.ndarray, factors: np.ndarray, to: np.ndarray) -> None:
    """to[..., :] = factors[...] * source[..., :]."""
    with np.errstate(invalid="ignore"):  # 0 times infinity is NaN, as anywhere else
        np.multiply(source, factors[..., np.newaxis], out=to)


def fill_or_copy(to: np.ndarray, source: np.ndarray | None) -> None:
    """to = source; zero if there is none."""
    if source is None:
        to.fill(0)
    else:
        np.copyto(to, source)


def clear(accumulate: bool, *gradients: np.ndarray | None) -> None:
    """What becomes of parameters' gradients when there is nothing to add up."""
    for gradient in gradients:
        if gradient is not None and not accumulate:
            gradient.fill(0)
