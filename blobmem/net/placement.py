"""Where a net lives: moving it, following the default device, and staying with the nets that it shares memory with."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from blobmem import devices
from blobmem.errors import SharedBlobError
from blobmem.layers.base import Context
from blobmem.memory import SyncedMemory
from blobmem.memory.blob import Blob
from blobmem.net import weights as weight_files
from blobmem.net.build import Node, check_device

if TYPE_CHECKING:
    from blobmem.net.plan import Arena, Plan
    from blobmem.net.sharing import SharingGroup


class Placement:
    """The device side of a `Net`.

    Attributes:
        device: where the net computes now.
        follows: it goes wherever the default device is, at each pass.
    """

    nodes: list[Node]
    blobs: dict[str, Blob]
    internals: dict[str, Blob]
    params: dict[str, list[Blob]]
    identity: Any
    group: SharingGroup
    _context: Context
    _schedules: Any
    _images_last: bool | None
    _spans: dict[Any, Any]
    _plan: Plan | None
    _arena: Arena | None

    if TYPE_CHECKING:  # what Net has

        def _end_plan(self) -> None: ...

    def __init__(self, device: devices.Device | str | None) -> None:
        self.device = devices.default() if device is None else devices.get(device)
        self.follows = device is None
        self._switches = devices.switches()  # of the default device, that this net has followed
        self._family: weakref.WeakSet[Placement] = weakref.WeakSet([self])  # those with which it shares memory

    def move_to(self, device: devices.Device | str) -> None:
        """Live and compute on another device from now on, with all bytes as they are; the old one's are freed. Its
        word, as in `devices.get`, names it too.

        Nets that share memory with this one move too, and none of them follows the default device any more. Raises
        DeviceError or MemoryError, and all are where they were, if the bytes cannot come.
        """
        device = devices.get(device)
        family = list(self._family)
        for net in family:
            net._leave(device)  # all of it before the first byte moves, as this may fail
        for net in family:
            net._settle(device)
            net.follows = False

    def _memories(self) -> list[SyncedMemory]:
        """Those with bytes that outlast a pass."""
        params = [blob for node in self.nodes for blob in node.layer.blobs]
        blobs = [*self.blobs.values(), *self.internals.values(), *params]
        views = [blob.data_view for blob in blobs] + [blob.diff_view for blob in blobs if blob.has_diff]
        planned = self._plan.memories if self._plan is not None else ()
        return [memory for memory in dict.fromkeys(view.memory for view in views) if memory not in planned]

    def _leave(self, device: devices.Device) -> None:
        """Have on the host all that is to move to that device. DeviceError where the net's dtype cannot be."""
        check_device(self._context.dtype, device)
        with self.group.lock:
            for memory in self._memories():
                if memory.device is not device:
                    memory.fetch()

    def _settle(self, device: devices.Device) -> None:
        """Move this net's memory, wherever each of it is."""
        with self.group.lock:
            self._leave(device)
            self._end_plan()
            if self._arena is not None:
                self._arena.leave(device)
            for memory in self._memories():
                memory.move_to(device)
            if device is not self.device:
                self.device = self._context.device = device
                self._schedules, self._spans, self._images_last = None, {}, None

    def _follow(self) -> None:
        """Be where the default device is, with memory that other nets may have taken elsewhere and back."""
        switches = devices.switches()
        if self.follows and (switches != self._switches or devices.default() is not self.device):
            self._settle(devices.default())
        self._switches = switches

    def _share_params(self, other: Placement) -> set[str]:
        """Use the other net's parameters; the names of their layers.

        From now on both follow the default device, with all that they share with, or none of them.
        """
        self._follow()
        other._follow()
        if other.device is not self.device:
            raise SharedBlobError(f"{self.identity} and {other.identity} are on different devices: they cannot share")
        names = weight_files.share_params(self.params, other.params)
        family = self._family | other._family
        follows = self.follows and other.follows
        for net in family:
            net._family, net.follows = family, follows
        return names
