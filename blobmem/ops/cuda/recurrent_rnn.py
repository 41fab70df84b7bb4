"""The plain recurrent layer over all steps; the mathematics are in `blobmem.layers.recurrent`.

T steps of N streams with D units, I inputs and S static ones. x (T, N, I), cont (T, N), static (N, S); w_x (D, I),
b (D,), w_static (D, S), w_h (D, D), w_o (D, D), b_o (D,); o (T, N, D); states (N, D).
A step is one product, of the state with w_h or of the sums' gradients with it, and one kernel.
"""

from __future__ import annotations

from typing import Any

from blobmem.devices.cuda.array import CudaArray
from blobmem.ops.cuda.linear import (
    inner_product_backward_bias,
    inner_product_backward_data,
    inner_product_backward_weights,
    inner_product_forward,
)
from blobmem.ops.cuda.products import prepare
from blobmem.ops.cuda.recurrent_inputs import (
    add_over_steps,
    clear,
    input_gradients,
    input_sums,
    state_gradient,
    state_weights_gradient,
    static_gradients,
    static_sums,
)
from blobmem.ops.cuda.recurrent_plan import (
    KERNELS,
    Shape,
    carve,
    grid_of,
    over_units,
    room,
    rows,
    runs,
    step_bytes,
    steps_at_once,
    steps_of,
)
from blobmem.ops.registry import op


def _forward_shapes(o: Any, static: Any, hiddens: Any) -> list[Shape]:
    """Of the state, the static input's part of the sums, and hidden states that are not kept."""
    steps, streams, units = o.shape
    return [
        (streams, units),
        (0 if static is None else streams, units),
        (0 if hiddens is not None else steps_at_once(steps, streams), streams, units),
    ]


def _forward_room(x: Any, cont: Any, static: Any, w_x: Any, b: Any, w_static: Any, w_h: Any, w_o: Any, b_o: Any,
                  h_0: Any, o: Any, h_last: Any, hiddens: Any, **_: Any) -> int:  # fmt: skip
    return room(o, _forward_shapes(o, static, hiddens))


@op(family="cuda", workspace=_forward_room)
def rnn_forward(x: CudaArray, cont: CudaArray, static: CudaArray | None, w_x: CudaArray, b: CudaArray,
                w_static: CudaArray | None, w_h: CudaArray, w_o: CudaArray, b_o: CudaArray, h_0: CudaArray,
                o: CudaArray, h_last: CudaArray, hiddens: CudaArray | None, *,
                ws: CudaArray) -> None:  # fmt: skip
    """o, and the state after the last step, which may be the memory of h_0, that before the first.

    For backward hiddens (T + 1, N, D), the states from h_0 on; else None.
    """
    if not o.size:
        return
    steps, streams, units = o.shape
    state, room_fixed, some_hiddens = carve(ws, o, _forward_shapes(o, static, hiddens))
    over_units("scale_rows", h_0, h_0, cont, state)
    if hiddens is not None:
        steps_of(hiddens, 0, 1).copy_from(h_0)
    fixed = static_sums(static, w_static, room_fixed, ws)
    grid, block = grid_of(streams, units)
    each = step_bytes(o)
    kept = some_hiddens if hiddens is None else steps_of(hiddens, 1, steps)
    add_state = prepare(state, w_h, steps_of(kept, 0, 1).reshape(streams, units), ws, transpose_b=True, beta=1.0)
    for first, count in runs(steps, kept.shape[0]):
        some, out = steps_of(kept, 0, count), steps_of(o, first, count)
        input_sums(steps_of(x, first, count), w_x, some, ws)
        for step in range(first, first + count):
            here = some.address + (step - first) * each
            add_state(state.address, here)
            KERNELS.run(o, "rnn_step", grid, block, here, b, fixed, state, cont, step, steps, streams, units)
        inner_product_forward(rows(some), w_o, None, rows(out), transpose=False, ws=ws)
        over_units("rnn_output", out, out, b_o)
        if first + count == steps:
            h_last.copy_from(steps_of(some, count - 1, 1))


def _backward_shapes(do: Any, dstatic: Any, dw_static: Any) -> list[Shape]:
    """Of the gradients of a step's state, of a run's outputs' sums and hidden states' sums, and of the gradient of the
    static input's part of the sums, where it is wanted."""
    steps, streams, units = do.shape
    run = steps_at_once(steps, streams)
    return [
        (streams, units),
        (run, streams, units),
        (run, streams, units),
        (0 if dstatic is None and dw_static is None else streams, units),
    ]


def _backward_room(x: Any, cont: Any, static: Any, w_x: Any, w_static: Any, w_h: Any, w_o: Any, b_o: Any, hiddens: Any,
                   do: Any, dh_last: Any, dx: Any, dstatic: Any, dh_0: Any, dw_x: Any, db: Any, dw_static: Any, *_: Any,
                   **__: Any) -> int:  # fmt: skip
    return room(do, _backward_shapes(do, dstatic, dw_static))


@op(family="cuda", workspace=_backward_room)
def rnn_backward(x: CudaArray, cont: CudaArray, static: CudaArray | None, w_x: CudaArray, w_static: CudaArray | None,
                 w_h: CudaArray, w_o: CudaArray, b_o: CudaArray, hiddens: CudaArray, do: CudaArray,
                 dh_last: CudaArray | None, dx: CudaArray | None, dstatic: CudaArray | None, dh_0: CudaArray | None,
                 dw_x: CudaArray | None, db: CudaArray | None, dw_static: CudaArray | None, dw_h: CudaArray | None,
                 dw_o: CudaArray | None, db_o: CudaArray | None, *, ws: CudaArray,
                 accumulate: bool = False) -> None:  # fmt: skip
    """All gradients, None where they are not wanted; of dh_last, None means zero. Those of parameters are added to with
    `accumulate`. hiddens, as `rnn_forward` left them, are not changed; outputs are computed from them anew."""
    if not do.size:
        clear(accumulate, dw_x, db, dw_static, dw_h, dw_o, db_o)
        return
    steps, streams, units = do.shape
    dstate, outs, dsums, dfixed = carve(ws, do, _backward_shapes(do, dstatic, dw_static))
    grid, block = grid_of(streams, units)
    each = step_bytes(do)
    first_sums = steps_of(dsums, 0, 1).reshape(streams, units)
    dnext, added, later = dh_last, accumulate, False
    for first, count in reversed(list(runs(steps, dsums.shape[0]))):
        if first + count < steps:  # before the sums of the later run's first step are overwritten
            inner_product_backward_data(first_sums, w_h, dstate, transpose=False, ws=ws)
            dnext = dstate
        hidden, dhidden, out = steps_of(hiddens, first + 1, count), steps_of(dsums, 0, count), steps_of(outs, 0, count)
        _output_gradients(hidden, steps_of(do, first, count), w_o, b_o, out, dhidden, dw_o, db_o, added, ws)
        hand_back = prepare(first_sums, w_h, dstate, ws)
        for step in range(first + count - 1, first - 1, -1):
            here = dhidden.address + (step - first) * each
            if step + 1 < first + count:
                hand_back(here + each, dstate.address)
                dnext = dstate
            KERNELS.run(do, "rnn_step_gradient", grid, block, hidden.address + (step - first) * each, dnext, here, cont,
                        step, steps, streams, units)  # fmt: skip
        dx_here = None if dx is None else steps_of(dx, first, count)
        input_gradients(steps_of(x, first, count), w_x, dhidden, dx_here, dw_x, db, added, ws)
        add_over_steps(dhidden, dfixed, later, ws)
        if dw_h is not None:
            over_units("scale_rows", out, steps_of(hiddens, first, count), steps_of(cont, first, count), out)
            state_weights_gradient(out, dhidden, dw_h, added, ws)
        added = later = True
    static_gradients(static, w_static, dfixed, dstatic, dw_static, accumulate, ws)
    state_gradient(first_sums, w_h, cont, dh_0, ws)


def _output_gradients(hidden: CudaArray, do: CudaArray, w_o: CudaArray, b_o: CudaArray, out: CudaArray,
                      dhidden: CudaArray, dw_o: CudaArray | None, db_o: CudaArray | None, accumulate: bool,
                      ws: CudaArray) -> None:  # fmt: skip
    """The output layer backward over a run: `out` is scratch, dhidden what reaches the hidden states."""
    inner_product_forward(rows(hidden), w_o, None, rows(out), transpose=False, ws=ws)
    over_units("rnn_output_gradient", out, out, b_o, do)
    if dw_o is not None:
        inner_product_backward_weights(rows(hidden), rows(out), dw_o, transpose=False, accumulate=accumulate, ws=ws)
    if db_o is not None:
        inner_product_backward_bias(rows(out), db_o, accumulate=accumulate, ws=ws)
    inner_product_backward_data(rows(out), w_o, rows(dhidden), transpose=False, ws=ws)
