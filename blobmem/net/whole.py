"""A whole iteration as one graph: what its passes and its update are captured in, joined, so that one call queues it.

Whether an iteration may be as the last one was is `net.settled`'s to say.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any, TypeAlias

from blobmem.devices import Device
from blobmem.devices.cuda.array import CudaArray
from blobmem.memory import Intent, Side
from blobmem.memory.blob import Blob
from blobmem.net.captured import Varied
from blobmem.net.losses import Landing, Losses, LossReader
from blobmem.ops.cuda import neuron

if TYPE_CHECKING:
    from blobmem.net.captured import Captured
    from blobmem.net.lanes import Lanes
    from blobmem.net.steps import Step

    Piece: TypeAlias = Step | Captured | Lanes

log = logging.getLogger("blobmem")

MOST = 1024  # steps: beside more, what a launch costs is little, and what a second graph of them takes is not
"""So it is beside copies of evicted arrays: no net with such is one graph."""


class Whole:
    """The pieces that an iteration ran last as one graph, with its losses on their way to the host.

    What takes records, which is not the same in every run, comes first: what it sends, and by itself where that is not
    all but kernels (`Op.before`).

    Args:
        pieces: all of them, in order; first those of the pass forward, then others.
        device: where they run.
        losses: of the iteration's one pass forward, on the device.
        reader: has the memory where these arrive.

    Attributes:
        launches: how often it was queued.
    """

    def __init__(self, pieces: Sequence[Sequence[Piece]], device: Device, losses: Losses, reader: LossReader) -> None:
        every = [*chain.from_iterable(pieces)]
        self._ran = [piece.ran for piece in every]
        self._device, self._losses, self._reader = device, losses, reader
        self._first = list(takewhile(_is_eager, every))
        while self._first and getattr(self._first[-1], "before", None):
            self._first.pop()
        self._varied = Varied()
        self._told: Any = None  # stands for the device to what sends the losses
        self._native: Any = None
        self.launches = 0
        self._sources = [self._source(blob) for blob, _ in losses]
        rest, forward = every[len(self._first) :], max(0, len(pieces[0]) - len(self._first))
        landing = reader.lend(device, losses)
        if landing.is_seen and _is_small(rest) and all(_joins(piece) for piece in rest):
            self._send(device, landing)  # by kernels that are loaded then
            try:
                self._native = device.capture(lambda graph: self._queue(rest, forward, graph, landing))
            except Exception as error:  # any library's
                log.warning("an iteration cannot be captured as one CUDA graph, and is queued as several: %s", error)
        reader.free(landing)

    def _source(self, blob: Blob) -> Any:
        view, stream = blob.data_view, self._device.compute_stream()
        address = view.memory.access(Side.DEVICE, view.offset, view.nbytes, Intent.READ, stream)
        return self._device.as_array(address, blob.shape, blob.dtype)

    def _queue(self, pieces: Sequence[Piece], forward: int, graph: Any, landing: Landing) -> None:
        def queue(some: Sequence[Piece]) -> None:
            for piece in some:
                piece.queue(lambda step: self._varied.queue(step, graph))

        device, self._told = self._device, graph.varied()
        main, side = device.compute_stream(), device.side_stream()
        assert main is not None and side is not None
        try:
            queue(pieces[:forward])
            side.wait(main.record())
            device.queue_on(side)  # beside what comes next
            self._send(self._told, landing)
            device.queue_on(main)
            queue(pieces[forward:])
            main.wait(side.record())
        finally:
            device.queue_on(main)
            device.faults.layer = ""

    def _send(self, device: Any, landing: Landing) -> None:
        """Send the losses: by kernels, which take a graph less than copies do."""
        for source, address in zip(self._sources, landing.addresses, strict=True):
            neuron.copy_out(source, CudaArray(address, source.shape, source.dtype, device))

    @property
    def is_made(self) -> bool:
        """Whether there is a graph, and `launch` may be called."""
        return self._native is not None

    def is_of(self, pieces: Sequence[Sequence[Piece]]) -> bool:
        """Whether it queues what these ran last."""
        return [piece.ran for piece in chain.from_iterable(pieces)] == self._ran

    def launch(self) -> Callable[[], float]:
        """Queue it, with the numbers that its steps would run with now; what waits for the loss (`LossReader.read`).

        If anything is raised before `launches` has gone up nothing was queued but what takes records.
        """
        try:
            for piece in self._first:
                piece.run_again()
            self._varied.tell()
        finally:
            self._device.faults.layer = ""
        landing = self._reader.lend(self._device, self._losses)
        if self._told.again(tuple(landing.addresses)):
            self._send(self._told, landing)
        self._native.launch()
        self.launches += 1
        statistics = self._device.statistics
        statistics.dtoh_copies += len(landing.arrays)
        statistics.dtoh_bytes += sum(array.nbytes for array in landing.arrays)
        stream = self._device.compute_stream()
        assert stream is not None
        return self._reader.after(stream.record(), landing, self._losses)


def _is_small(pieces: Sequence[Piece]) -> bool:
    steps = [step for piece in pieces for step in getattr(piece, "steps", [piece])]
    return len(steps) <= MOST and all(step.home is None for step in steps)


def _is_eager(piece: Any) -> bool:
    return bool(getattr(piece, "eager", ""))


def _joins(piece: Any) -> bool:
    return not _is_eager(piece) or piece.before is not None
