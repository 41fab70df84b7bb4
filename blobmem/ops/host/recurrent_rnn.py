"""The plain recurrent layer over all steps; the mathematics are in `blobmem.layers.recurrent`.

T steps of N streams with D units, I inputs and S static ones. x (T, N, I), cont (T, N), static (N, S); w_x (D, I),
b (D,), w_static (D, S), w_h (D, D), w_o (D, D), b_o (D,); o (T, N, D); states (N, D).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from blobmem.ops.host.linear import (
    inner_product_backward_bias,
    inner_product_backward_data,
    inner_product_backward_weights,
    inner_product_forward,
)
from blobmem.ops.host.neuron import tanh_backward, tanh_forward
from blobmem.ops.host.recurrent_inputs import (
    add_over_steps,
    clear,
    fill_or_copy,
    input_gradients,
    input_sums,
    rows,
    scale_rows,
    static_gradients,
    static_sums,
)
from blobmem.ops.host.recurrent_kernels import rnn_steps, rnn_steps_backward
from blobmem.ops.host.recurrent_plan import Shape, carve, crew, packed_shape, room, runs, state_shape, steps_at_once
from blobmem.ops.registry import op


def _forward_shapes(o: Any, static: Any, hiddens: Any) -> list[Shape]:
    """Of packed weights, states, the static input's part of the sums, and hidden states that are not kept."""
    steps, streams, units = o.shape
    return [
        packed_shape(units, 1, o.dtype.itemsize),
        state_shape(streams, units, o.dtype.itemsize),
        (0 if static is None else streams, units),
        (0 if hiddens is not None else steps_at_once(steps, streams), streams, units),
    ]


def _forward_room(x: Any, cont: Any, static: Any, w_x: Any, b: Any, w_static: Any, w_h: Any, w_o: Any, b_o: Any,
                  h_0: Any, o: Any, h_last: Any, hiddens: Any) -> int:  # fmt: skip
    return room(o, _forward_shapes(o, static, hiddens)) if o.size else 0


@op(workspace=_forward_room)
def rnn_forward(x: np.ndarray, cont: np.ndarray, static: np.ndarray | None, w_x: np.ndarray, b: np.ndarray,
                w_static: np.ndarray | None, w_h: np.ndarray, w_o: np.ndarray, b_o: np.ndarray, h_0: np.ndarray,
                o: np.ndarray, h_last: np.ndarray, hiddens: np.ndarray | None, *,
                ws: np.ndarray | None = None) -> None:  # fmt: skip
    """o, and the state after the last step, which may be the memory of h_0, that before the first.

    For backward hiddens (T + 1, N, D), the states from h_0 on; else None.
    """
    if not o.size:
        return
    steps, streams, units = o.shape
    turns, packed, state, fixed, some_hiddens = carve(ws, o, _forward_shapes(o, static, hiddens))
    team = crew(streams, units, 1, turns, o.dtype)
    team.pack(w_h, packed, 1, transposed=True)
    state.fill(0)
    scale_rows(h_0, cont[0], state[0, :streams, :units])
    if hiddens is not None:
        np.copyto(hiddens[0], h_0)
    static_sums(static, w_static, fixed)
    for run, first, count in runs(steps, streams):
        some = some_hiddens[:count] if hiddens is None else hiddens[first + 1 : first + 1 + count]
        input_sums(x[run], w_x, b, fixed, some)
        team.run(rnn_steps, packed, team.blocks, state.reshape(-1), state.shape[2], some.reshape(-1), cont.reshape(-1),
                 first, count, steps, streams, units)  # fmt: skip
        inner_product_forward(rows(some), w_o, b_o, rows(o[run]), transpose=False)
        tanh_forward(o[run], o[run])
        if first + count == steps:
            np.copyto(h_last, some[-1])


def _backward_shapes(do: Any, static: Any) -> list[Shape]:
    """Of packed weights, gradients of two steps' sums, of the last state, of a run's outputs' sums and hidden states'
    sums, what its steps were handed, and the gradient of the static input's part of the sums."""
    steps, streams, units = do.shape
    run = steps_at_once(steps, streams)
    return [
        packed_shape(units, 1, do.dtype.itemsize),
        state_shape(streams, units, do.dtype.itemsize),
        (streams, units),
        (run, streams, units),
        (run, streams, units),
        (0 if static is None else streams, units),
    ]


def _backward_room(x: Any, cont: Any, static: Any, w_x: Any, w_static: Any, w_h: Any, w_o: Any, b_o: Any, hiddens: Any,
                   do: Any, *_: Any, **__: Any) -> int:  # fmt: skip
    return room(do, _backward_shapes(do, static)) if do.size else 0


@op(workspace=_backward_room)
def rnn_backward(x: np.ndarray, cont: np.ndarray, static: np.ndarray | None, w_x: np.ndarray,
                 w_static: np.ndarray | None, w_h: np.ndarray, w_o: np.ndarray, b_o: np.ndarray, hiddens: np.ndarray,
                 do: np.ndarray, dh_last: np.ndarray | None, dx: np.ndarray | None, dstatic: np.ndarray | None,
                 dh_0: np.ndarray | None, dw_x: np.ndarray | None, db: np.ndarray | None,
                 dw_static: np.ndarray | None, dw_h: np.ndarray | None, dw_o: np.ndarray | None,
                 db_o: np.ndarray | None, *, ws: np.ndarray | None = None,
                 accumulate: bool = False) -> None:  # fmt: skip
    """All gradients, None where they are not wanted; of dh_last, None means zero. Those of parameters are added to with
    `accumulate`. hiddens, as `rnn_forward` left them, are not changed; outputs are computed from them anew."""
    if not do.size:
        clear(accumulate, dw_x, db, dw_static, dw_h, dw_o, db_o)
        return
    steps, streams, units = do.shape
    turns, packed, dstate, dlast, some, dsums, dfixed = carve(ws, do, _backward_shapes(do, static))
    team = crew(streams, units, 1, turns, do.dtype)
    team.pack(w_h, packed, 1, transposed=False)
    dstate.fill(0)
    fill_or_copy(dlast, dh_last)
    added, later = accumulate, False
    for run, first, count in reversed(list(runs(steps, streams))):
        hidden, dhidden, out = hiddens[first + 1 : first + 1 + count], dsums[:count], some[:count]
        inner_product_forward(rows(hidden), w_o, b_o, rows(out), transpose=False)
        tanh_forward(out, out)
        tanh_backward(out, do[run], out)
        if dw_o is not None:
            inner_product_backward_weights(rows(hidden), rows(out), dw_o, transpose=False, accumulate=added)
        if db_o is not None:
            inner_product_backward_bias(rows(out), db_o, accumulate=added)
        inner_product_backward_data(rows(out), w_o, rows(dhidden), transpose=False)
        team.run(rnn_steps_backward, packed, team.blocks, dstate.reshape(-1), dstate.shape[2], hidden.reshape(-1),
                 dlast.reshape(-1), dhidden.reshape(-1), cont.reshape(-1), first, count, steps, streams,
                 units)  # fmt: skip
        input_gradients(x[run], w_x, dhidden, None if dx is None else dx[run], dw_x, db, added)
        add_over_steps(dhidden, dfixed, later)
        if dw_h is not None:
            scale_rows(hiddens[run], cont[run], out)
            inner_product_backward_weights(rows(out), rows(dhidden), dw_h, transpose=False, accumulate=added)
        added = later = True
    static_gradients(static, w_static, dfixed, dstatic, dw_static, accumulate)
    if dh_0 is not None:
        inner_product_backward_data(dsums[0], w_h, dh_0, transpose=False)
        scale_rows(dh_0, cont[0], dh_0)
