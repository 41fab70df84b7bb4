"""A run of an LSTM's steps in one launch, by clusters of blocks that keep the weights of the state in registers.

Products with the state are of float32, and so are their sums, whatever the device's math.
"""

from __future__ import annotations

import numpy as np

from blobmem.devices.cuda.array import CudaArray
from blobmem.ops.cuda.launch import Kernels

_KERNELS = Kernels("recurrent_cluster")
_RANKS, _STREAMS, _UNITS = 8, 4, 256  # as in the source: blocks of a cluster, the most streams and units that it takes
_AT_ONCE = 14  # clusters, one block to a multiprocessor, for which a large card (132 multiprocessors) has room


def fits(h: CudaArray) -> bool:
    """Whether the steps of h (steps, streams, units) are run so."""
    _, streams, units = h.shape
    # of more, which clusters take in turns, products that fill the card are faster, those of halves sooner
    most = h.dtype.itemsize * (64 if units <= 64 else 32)
    return units <= _UNITS and streams <= most and h.dtype != np.float64 and h.device.clusters


def _grid(streams: int, units: int) -> tuple[int, int, int]:
    """Blocks, their threads, and the streams of a cluster: as few as let all clusters run at once."""
    each = min(_STREAMS, -(-streams // _AT_ONCE))
    return _RANKS * -(-streams // each), max(256, 64 * -(-units // (4 * _RANKS))), each


def forward(gates: CudaArray, w_h: CudaArray, b: CudaArray, fixed: CudaArray | None, before: int, after: int,
            h: CudaArray, state: CudaArray, cont: CudaArray, first: int, steps: int, *,
            keep: bool) -> None:  # fmt: skip
    """The steps of h (count, streams, units), from `first` of `steps` on: gates come as the products of inputs with
    their weights and become the gates; state (streams, units) is what the first step multiplies, then what the next
    one would.

    The cell is read at the address `before` and written from `after` on: of each step with `keep`, else of the last.
    """
    count, streams, units = h.shape
    blocks, threads, each = _grid(streams, units)
    _KERNELS.run(h, "lstm_steps", (blocks, 1, 1), threads, gates, w_h, b, fixed, before, after,
                 streams * units if keep else 0, h, state, cont, first, count, steps, streams, units, each)  # fmt: skip


def backward(gates: CudaArray, w_h: CudaArray, cells: CudaArray, dh: CudaArray, dnext: CudaArray | None,
             dafter: CudaArray | None, dbefore: CudaArray, dgates: CudaArray, cont: CudaArray,
             first: int) -> None:  # fmt: skip
    """The gradients of the gates' sums of the steps of dgates (count, streams, 4 units), from `first` on; gates, cells
    and dh are of all steps. dnext and dafter (None: zero) are what the last of these steps is handed back, dbefore the
    gradient of the cell before the first."""
    steps, streams, units = dh.shape
    blocks, threads, each = _grid(streams, units)
    _KERNELS.run(dh, "lstm_steps_gradient", (blocks, 1, 1), threads, gates, w_h, cells, dh, dnext, dafter, dbefore,
                 dgates, cont, first, dgates.shape[0], steps, streams, units, each)  # fmt: skip
