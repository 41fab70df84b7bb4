"""LSTM over all steps; the mathematics are in `blobmem.layers.recurrent`.

T steps of N streams with D units, I inputs and S static ones. x (T, N, I), cont (T, N), static (N, S); w_x (4 D, I),
b (4 D,), w_static (4 D, S), w_h (4 D, D), by gate: input, forget, output, candidate; h (T, N, D); states (N, D).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from blobmem.ops.host.linear import inner_product_backward_data, inner_product_backward_weights
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
from blobmem.ops.host.recurrent_kernels import lstm_steps, lstm_steps_backward
from blobmem.ops.host.recurrent_plan import Shape, carve, crew, packed_shape, room, runs, state_shape, steps_at_once
from blobmem.ops.registry import op


def _forward_shapes(h: Any, static: Any, gates: Any) -> list[Shape]:
    """Of packed weights, states, the static input's part of the gates, and what is not kept: gates and cell."""
    steps, streams, units = h.shape
    itemsize = h.dtype.itemsize
    return [
        packed_shape(units, 4, itemsize),
        state_shape(streams, units, itemsize),
        (0 if static is None else streams, 4 * units),
        (0 if gates is not None else steps_at_once(steps, streams), streams, 4 * units),
        (0 if gates is not None else 1, streams, units),
    ]


def _forward_room(x: Any, cont: Any, static: Any, w_x: Any, b: Any, w_static: Any, w_h: Any, h_0: Any, c_0: Any, h: Any,
                  h_last: Any, c_last: Any, gates: Any, *_: Any) -> int:  # fmt: skip
    return room(h, _forward_shapes(h, static, gates)) if h.size else 0


@op(workspace=_forward_room)
def lstm_forward(x: np.ndarray, cont: np.ndarray, static: np.ndarray | None, w_x: np.ndarray, b: np.ndarray,
                 w_static: np.ndarray | None, w_h: np.ndarray, h_0: np.ndarray, c_0: np.ndarray, h: np.ndarray,
                 h_last: np.ndarray, c_last: np.ndarray, gates: np.ndarray | None, cells: np.ndarray | None,
                 start: np.ndarray | None, *, ws: np.ndarray | None = None) -> None:  # fmt: skip
    """h, and the states after the last step, which may be the memory of h_0 and c_0, those before the first.

    For backward gates (T, N, 4 D), cells (T + 1, N, D), from c_0 on, and start (N, D), which is h_0; else None.
    """
    if not h.size:
        return
    steps, streams, units = h.shape
    turns, packed, state, fixed, some_gates, cell = carve(ws, h, _forward_shapes(h, static, gates))
    team = crew(streams, units, 4, turns, h.dtype)
    team.pack(w_h, packed, 4, transposed=True)
    state.fill(0)
    scale_rows(h_0, cont[0], state[0, :streams, :units])
    np.copyto(cell[0] if cells is None else cells[0], c_0)
    if start is not None:
        np.copyto(start, h_0)
    static_sums(static, w_static, fixed)
    for run, first, count in runs(steps, streams):
        some = some_gates[:count] if gates is None else gates[run]
        input_sums(x[run], w_x, b, fixed, some)
        along, apart = (cell, 0) if cells is None else (cells[first:], streams * units)
        team.run(lstm_steps, packed, team.blocks, state.reshape(-1), state.shape[2], some.reshape(-1),
                 along.reshape(-1), apart, h[run].reshape(-1), cont.reshape(-1), first, count, steps, streams,
                 units)  # fmt: skip
    np.copyto(h_last, h[-1])
    np.copyto(c_last, cell[0] if cells is None else cells[-1])


def _backward_shapes(dh: Any, static: Any) -> list[Shape]:
    """Of packed weights, gradients of two steps' gates, of the last state, of the cell, of a run's gates and one step
    more, what its steps handed on, and the gradient of the static input's part of the gates."""
    steps, streams, units = dh.shape
    run = steps_at_once(steps, streams)
    return [
        packed_shape(units, 4, dh.dtype.itemsize),
        state_shape(streams, 4 * units, dh.dtype.itemsize),
        (streams, units),
        (streams, units),
        (run + 1, streams, 4 * units),
        (run, streams, units),
        (0 if static is None else streams, 4 * units),
    ]


def _backward_room(x: Any, cont: Any, static: Any, w_x: Any, w_static: Any, w_h: Any, gates: Any, cells: Any,
                   start: Any, dh: Any, *_: Any, **__: Any) -> int:  # fmt: skip
    return room(dh, _backward_shapes(dh, static)) if dh.size else 0


@op(workspace=_backward_room)
def lstm_backward(x: np.ndarray, cont: np.ndarray, static: np.ndarray | None, w_x: np.ndarray,
                  w_static: np.ndarray | None, w_h: np.ndarray, gates: np.ndarray, cells: np.ndarray,
                  start: np.ndarray, dh: np.ndarray, dh_last: np.ndarray | None, dc_last: np.ndarray | None,
                  dx: np.ndarray | None, dstatic: np.ndarray | None, dh_0: np.ndarray | None, dc_0: np.ndarray | None,
                  dw_x: np.ndarray | None, db: np.ndarray | None, dw_static: np.ndarray | None,
                  dw_h: np.ndarray | None, *, ws: np.ndarray | None = None,
                  accumulate: bool = False) -> None:  # fmt: skip
    """All gradients, None where they are not wanted; of dh_last and dc_last, None means zero. dw_x, db, dw_static and
    dw_h are added to with `accumulate`. gates, cells and start, as `lstm_forward` left them, are not changed."""
    if not dh.size:
        clear(accumulate, dw_x, db, dw_static, dw_h)
        return
    steps, streams, units = dh.shape
    shapes = _backward_shapes(dh, static)
    turns, packed, dstate, dlast, dcell, dgates, carried, dfixed = carve(ws, dh, shapes)
    team = crew(streams, units, 4, turns, dh.dtype)
    team.pack(w_h, packed, 4, transposed=False)
    dstate.fill(0)
    fill_or_copy(dlast, dh_last)
    fill_or_copy(dcell, dc_last)
    dgates[0].fill(0)  # those of the step after the last
    later = False
    for run, first, count in reversed(list(runs(steps, streams))):
        np.copyto(dgates[count], dgates[0])
        team.run(lstm_steps_backward, packed, team.blocks, dstate.reshape(-1), dstate.shape[2], gates[run].reshape(-1),
                 cells[first : first + count + 1].reshape(-1), dh[run].reshape(-1), dlast.reshape(-1),
                 dcell.reshape(-1), dgates.reshape(-1), carried.reshape(-1), cont.reshape(-1), first, count, steps,
                 streams, units)  # fmt: skip
        input_gradients(x[run], w_x, dgates[:count], None if dx is None else dx[run], dw_x, db, later or accumulate)
        add_over_steps(dgates[:count], dfixed, later)
        if dw_h is not None:
            inner_product_backward_weights(rows(carried[:count]), rows(dgates[1 : count + 1]), dw_h, transpose=False,
                                           accumulate=later or accumulate)  # fmt: skip
        later = True
    static_gradients(static, w_static, dfixed, dstatic, dw_static, accumulate)
    if dw_h is not None:
        scale_rows(start, cont[0], carried[0])
        inner_product_backward_weights(carried[0], dgates[0], dw_h, transpose=False, accumulate=True)
    if dh_0 is not None:
        inner_product_backward_data(dgates[0], w_h, dh_0, transpose=False)
        scale_rows(dh_0, cont[0], dh_0)
    if dc_0 is not None:
        np.copyto(dc_0, dcell)
