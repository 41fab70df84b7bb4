"""LSTM over all steps; the mathematics are in `blobmem.layers.recurrent`.

T steps of N streams with D units, I inputs and S static ones. x (T, N, I), cont (T, N), static (N, S); w_x (4 D, I),
b (4 D,), w_static (4 D, S), w_h (4 D, D), by gate: input, forget, output, candidate; h (T, N, D); states (N, D).
A step is one product, of the state with w_h or of the gates' gradients with it, and one kernel; or the steps of a run
are one kernel, where `recurrent_cluster.fits`.
"""

from __future__ import annotations

from typing import Any

from blobmem.devices.cuda.array import CudaArray
from blobmem.ops.cuda import recurrent_cluster
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
    runs,
    step_bytes,
    steps_at_once,
    steps_of,
)
from blobmem.ops.registry import op


def _forward_shapes(h: Any, static: Any, gates: Any) -> list[Shape]:
    """Of the state, the static input's part of the gates, and gates that are not kept."""
    steps, streams, units = h.shape
    return [
        (streams, units),
        (0 if static is None else streams, 4 * units),
        (0 if gates is not None else steps_at_once(steps, streams), streams, 4 * units),
    ]


def _forward_room(x: Any, cont: Any, static: Any, w_x: Any, b: Any, w_static: Any, w_h: Any, h_0: Any, c_0: Any, h: Any,
                  h_last: Any, c_last: Any, gates: Any, *_: Any, **__: Any) -> int:  # fmt: skip
    return room(h, _forward_shapes(h, static, gates))


@op(family="cuda", workspace=_forward_room)
def lstm_forward(x: CudaArray, cont: CudaArray, static: CudaArray | None, w_x: CudaArray, b: CudaArray,
                 w_static: CudaArray | None, w_h: CudaArray, h_0: CudaArray, c_0: CudaArray, h: CudaArray,
                 h_last: CudaArray, c_last: CudaArray, gates: CudaArray | None, cells: CudaArray | None,
                 start: CudaArray | None, *, ws: CudaArray) -> None:  # fmt: skip
    """h, and the states after the last step, which may be the memory of h_0 and c_0, those before the first.

    For backward gates (T, N, 4 D), cells (T + 1, N, D), from c_0 on, and start (N, D), which is h_0; else None.
    """
    if not h.size:
        return
    steps, streams, units = h.shape
    state, room_fixed, some_gates = carve(ws, h, _forward_shapes(h, static, gates))
    over_units("scale_rows", h_0, h_0, cont, state)
    if start is not None:
        start.copy_from(h_0)
    if cells is not None:
        steps_of(cells, 0, 1).copy_from(c_0)
    fixed = static_sums(static, w_static, room_fixed, ws)
    grid, block = grid_of(streams, units)
    some = some_gates if gates is None else gates
    h_step, gates_step = step_bytes(h), step_bytes(some)
    if cells is None:
        before, after, cell_step = c_0.address, c_last.address, 0
    else:
        before, after, cell_step = cells.address, cells.address + h_step, h_step
    clusters = recurrent_cluster.fits(h)
    add_state = prepare(state, w_h, steps_of(some, 0, 1).reshape(streams, 4 * units), ws, transpose_b=True, beta=1.0)
    for first, count in runs(steps, some.shape[0]):
        input_sums(steps_of(x, first, count), w_x, steps_of(some, 0, count), ws)
        if clusters:
            recurrent_cluster.forward(some, w_h, b, fixed, before, after, steps_of(h, first, count), state, cont, first,
                                      steps, keep=cells is not None)  # fmt: skip
            before, after = after + (count - 1) * cell_step, after + count * cell_step
            continue
        for step in range(first, first + count):
            here = some.address + (step - first) * gates_step
            add_state(state.address, here)
            KERNELS.run(h, "lstm_step", grid, block, here, b, fixed, before, after, h.address + step * h_step, state,
                        cont, step, steps, streams, units)  # fmt: skip
            before, after = after, after + cell_step
    h_last.copy_from(steps_of(h, steps - 1, 1))
    if cells is not None:
        c_last.copy_from(steps_of(cells, steps, 1))


def _backward_shapes(dh: Any, dstatic: Any, dw_static: Any, dw_h: Any) -> list[Shape]:
    """Of the gradients of a step's state, of the cell, of a run's gates; of what the steps of a run were handed, and of
    the gradient of the static input's part of the gates, where they are wanted."""
    steps, streams, units = dh.shape
    run = steps_at_once(steps, streams)
    return [
        (streams, units),
        (streams, units),
        (run, streams, 4 * units),
        (0 if dw_h is None else run, streams, units),
        (0 if dstatic is None and dw_static is None else streams, 4 * units),
    ]


def _backward_room(x: Any, cont: Any, static: Any, w_x: Any, w_static: Any, w_h: Any, gates: Any, cells: Any,
                   start: Any, dh: Any, dh_last: Any, dc_last: Any, dx: Any, dstatic: Any, dh_0: Any, dc_0: Any,
                   dw_x: Any, db: Any, dw_static: Any, dw_h: Any, **_: Any) -> int:  # fmt: skip
    return room(dh, _backward_shapes(dh, dstatic, dw_static, dw_h))


@op(family="cuda", workspace=_backward_room)
def lstm_backward(x: CudaArray, cont: CudaArray, static: CudaArray | None, w_x: CudaArray, w_static: CudaArray | None,
                  w_h: CudaArray, gates: CudaArray, cells: CudaArray, start: CudaArray, dh: CudaArray,
                  dh_last: CudaArray | None, dc_last: CudaArray | None, dx: CudaArray | None,
                  dstatic: CudaArray | None, dh_0: CudaArray | None, dc_0: CudaArray | None, dw_x: CudaArray | None,
                  db: CudaArray | None, dw_static: CudaArray | None, dw_h: CudaArray | None, *,
                  ws: CudaArray, accumulate: bool = False) -> None:  # fmt: skip
    """All gradients, None where they are not wanted; of dh_last and dc_last, None means zero. dw_x, db, dw_static and
    dw_h are added to with `accumulate`. gates, cells and start, as `lstm_forward` left them, are not changed."""
    if not dh.size:
        clear(accumulate, dw_x, db, dw_static, dw_h)
        return
    steps, streams, units = dh.shape
    shapes = _backward_shapes(dh, dstatic, dw_static, dw_h)
    dstate, dcell, dgates, received, dfixed = carve(ws, dh, shapes)
    grid, block = grid_of(streams, units)
    h_step, gates_step = step_bytes(dh), step_bytes(dgates)
    hand_back = prepare(steps_of(dgates, 0, 1).reshape(streams, 4 * units), w_h, dstate, ws)
    clusters = recurrent_cluster.fits(dh)
    dnext, dafter, later = dh_last, dc_last, False
    for first, count in reversed(list(runs(steps, dgates.shape[0]))):
        some, added = steps_of(dgates, 0, count), later or accumulate
        if later:  # the later run's first step is still in its place
            hand_back(dgates.address, dstate.address)
            dnext = dstate
        if clusters:
            dbefore = dcell if first or dc_0 is None else dc_0
            recurrent_cluster.backward(gates, w_h, cells, dh, dnext, dafter, dbefore, some, cont, first)
            dafter = dbefore
        for step in () if clusters else range(first + count - 1, first - 1, -1):
            here = dgates.address + (step - first) * gates_step
            dbefore = dcell if step or dc_0 is None else dc_0
            if step + 1 < first + count:
                hand_back(here + gates_step, dstate.address)
                dnext = dstate
            KERNELS.run(dh, "lstm_step_gradient", grid, block, gates.address + step * gates_step,
                        cells.address + step * h_step, dh.address + step * h_step, dnext, dafter, dbefore, here, cont,
                        step, steps, streams, units)  # fmt: skip
            dafter = dbefore
        dx_here = None if dx is None else steps_of(dx, first, count)
        input_gradients(steps_of(x, first, count), w_x, some, dx_here, dw_x, db, added, ws)
        add_over_steps(some, dfixed, later, ws)
        if dw_h is not None:
            handed = steps_of(received, 0, count)
            _receive(gates, cells, start, cont, handed, first)
            state_weights_gradient(handed, some, dw_h, added, ws)
        later = True
    static_gradients(static, w_static, dfixed, dstatic, dw_static, accumulate, ws)
    state_gradient(steps_of(dgates, 0, 1).reshape(streams, 4 * units), w_h, cont, dh_0, ws)


def _receive(gates: CudaArray, cells: CudaArray, start: CudaArray, cont: CudaArray, handed: CudaArray,
             first: int) -> None:  # fmt: skip
    """What the steps from `first` on multiplied with w_h."""
    count, streams, units = handed.shape
    KERNELS.run(handed, "lstm_received", *grid_of(count * streams, units), gates, cells, start, cont, handed,
                first * streams, count * streams, streams, units)  # fmt: skip
