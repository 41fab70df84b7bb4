"""Memory that lives on the host, on a device, or on both; see `SyncedMemory`.

`blobmem.memory.debug` (at first true if the environment has BLOBMEM_DEBUG=1) makes memories checksum the arrays they
handed out when the device side takes over from them, and report a late write through one.
"""

from __future__ import annotations

import os

debug: bool = os.environ.get("BLOBMEM_DEBUG", "") not in ("", "0")

from blobmem.memory.synced import SyncedMemory  # noqa: E402
from blobmem.memory.views import Head, Intent, Side, View  # noqa: E402

__all__ = ["Head", "Intent", "Side", "SyncedMemory", "View", "debug"]
