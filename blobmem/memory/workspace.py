"""Workspaces: scratch bytes that calls need only while they run."""

from __future__ import annotations

from blobmem.devices import Device
from blobmem.memory.synced import SyncedMemory


def workspace(device: Device) -> SyncedMemory:
    """The one workspace that serves all calls of all nets on a device.

    One per thread, because two threads may run two nets at once and each call's scratch must stay its own.
    """
    of_thread = device.of_thread
    try:
        memory: SyncedMemory = of_thread.workspace
    except AttributeError:
        memory = of_thread.workspace = SyncedMemory(0, device, name="workspace")
    return memory
