"""One step of an LSTM by itself, the unit of Caffe's unrolled nets: no product, one step, nothing kept."""

from __future__ import annotations

import numpy as np

from blobmem.ops.host.compiled import kernel
from blobmem.ops.host.parallel import parallel_for
from blobmem.ops.host.recurrent_vectors import lstm_vector, lstm_vector_backward
from blobmem.ops.host.tile import lanes, lanes_of
from blobmem.ops.registry import op

_GRAIN = 4096


@kernel
def _unit(start, stop, scratch, before, raw, cont, after, hidden, units):
    """Streams [start, stop)."""
    width = lanes(raw)
    gates, state = 4 * width, 4 * width + 4 * units
    scratch[:gates] = 0
    one = raw.dtype.type(1)
    for n in range(start, stop):
        for v in range(0, units, width):
            at = n * units + v
            lstm_vector(raw, 4 * n * units + v, scratch, start * 0, scratch, gates + v, before, at, after, at, hidden,
                        at, scratch, state, units, width, cont[n], one, units - v)  # fmt: skip


@kernel
def _unit_backward(start, stop, scratch, before, raw, cont, dafter, dhidden, dbefore, dgates, with_before, with_gates,
                   units):  # fmt: skip
    """Streams [start, stop). What is not wanted goes to scratch."""
    width = lanes(raw)
    gates, spare = 4 * width, 4 * width + 4 * units
    after, unused = spare + 4 * units, spare + 4 * units + width
    scratch[:gates] = 0
    one = raw.dtype.type(1)
    to_before, to_gates = dbefore if with_before else scratch, dgates if with_gates else scratch
    for n in range(start, stop):
        for v in range(0, units, width):
            at, gate = n * units + v, 4 * n * units + v
            lstm_vector(raw, gate, scratch, start * 0, scratch, gates + v, before, at, scratch, after, scratch, unused,
                        scratch, unused, units, width, cont[n], one, units - v)  # fmt: skip
            lstm_vector_backward(scratch, gates + v, before, at, scratch, after, dhidden, at, scratch, start * 0,
                                 dafter, at, to_before, at if with_before else unused,
                                 to_gates, gate if with_gates else spare + v, scratch, spare + v, scratch, unused,
                                 units, cont[n], one, units - v)  # fmt: skip


@op
def lstm_unit_forward(c_prev: np.ndarray, gates: np.ndarray, cont: np.ndarray, c: np.ndarray,
                      h: np.ndarray) -> None:  # fmt: skip
    """c = cont * f * c_prev + i * g, h = o * tanh(c): i, f and o are the sigmoid of the first three quarters of gates,
    g is tanh of the last. c_prev, c and h (streams, units), gates (streams, 4 * units), cont (streams,)."""
    streams, units = c.shape
    parallel_for(_unit, streams, c_prev.reshape(-1), gates.reshape(-1), cont, c.reshape(-1), h.reshape(-1), units,
                 grain=1 + _GRAIN // units, scratch_of=(5 * lanes_of(c.itemsize) + 4 * units, c.dtype))  # fmt: skip


@op
def lstm_unit_backward(c_prev: np.ndarray, gates: np.ndarray, cont: np.ndarray, dc: np.ndarray, dh: np.ndarray,
                       dc_prev: np.ndarray | None, dgates: np.ndarray | None) -> None:  # fmt: skip
    """The gradients of c_prev and of the gates before their functions, None where they are not wanted."""
    streams, units = dc.shape
    flat = dc.reshape(-1)
    parallel_for(_unit_backward, streams, c_prev.reshape(-1), gates.reshape(-1), cont, flat, dh.reshape(-1),
                 flat if dc_prev is None else dc_prev.reshape(-1), flat if dgates is None else dgates.reshape(-1),
                 dc_prev is not None, dgates is not None, units, grain=1 + _GRAIN // units,
                 scratch_of=(6 * lanes_of(dc.itemsize) + 8 * units, dc.dtype))  # fmt: skip
