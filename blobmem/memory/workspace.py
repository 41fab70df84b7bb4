"""Workspaces: scratch bytes that calls need only while they run."""

from __future__ import annotations

from blobmem.devices import Device
from blobmem.memory.synced import SyncedMemory

_NAMES = "workspace", "second workspace"


def workspace(device: Device, lane: int = 0) -> SyncedMemory:
    """The one workspace that serves all calls of all nets on a device, of those on its stream number 0, or 1.

    One per thread, because two threads may run two nets at once and each call's scratch must stay its own.
    """
    of_thread, name = device.of_thread.__dict__, _NAMES[lane]
    memory: SyncedMemory | None = of_thread.get(name)
    if memory is None:
        memory = of_thread[name] = SyncedMemory(0, device, name=name)
    return memory


def workspaces(device: Device, streams: int) -> tuple[SyncedMemory, ...]:
    """Those of so many streams."""
    return tuple(workspace(device, lane) for lane in range(streams))
