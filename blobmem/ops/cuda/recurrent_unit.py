"""One step of an LSTM by itself, the unit of Caffe's unrolled nets: no product, one step, nothing kept."""

from __future__ import annotations

from blobmem.devices.cuda.array import CudaArray
from blobmem.ops.cuda.recurrent_plan import over_units
from blobmem.ops.registry import op


@op(family="cuda")
def lstm_unit_forward(c_prev: CudaArray, gates: CudaArray, cont: CudaArray, c: CudaArray, h: CudaArray) -> None:
    """c = cont * f * c_prev + i * g, h = o * tanh(c): i, f and o are the sigmoid of the first three quarters of gates,
    g is tanh of the last. c_prev, c and h (streams, units), gates (streams, 4 * units), cont (streams,)."""
    over_units("lstm_unit", c, c_prev, gates, cont, c, h)


@op(family="cuda")
def lstm_unit_backward(c_prev: CudaArray, gates: CudaArray, cont: CudaArray, dc: CudaArray, dh: CudaArray,
                       dc_prev: CudaArray | None, dgates: CudaArray | None) -> None:  # fmt: skip
    """The gradients of c_prev and of the gates before their functions, None where they are not wanted."""
    over_units("lstm_unit_gradient", dc, c_prev, gates, cont, dc, dh, dc_prev, dgates)
