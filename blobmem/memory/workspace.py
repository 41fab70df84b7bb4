"""Workspaces: scratch bytes that calls need only while they run."""

from __future__ import annotations

import threading
import weakref

from blobmem.devices import Device
from blobmem.memory.synced import SyncedMemory

_local = threading.local()


def workspace(device: Device) -> SyncedMemory:
    """The one workspace that serves all calls of all nets on a device.

    One per thread, because two threads may run two nets at once and each call's scratch must stay its own.
    """
    table = getattr(_local, "table", None)
    if table is None:
        table = _local.table = weakref.WeakKeyDictionary()
    memory = table.get(device)
    if memory is None:
        memory = table[device] = SyncedMemory(0, device, name="workspace")
    return memory
