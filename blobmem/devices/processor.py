"""What the machine's processor is, as far as the operating system tells."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_MODEL = ("model name", "cpu model", "Hardware", "cpu")
"""What Linux calls the model, architecture by architecture; ARM mostly has none."""


def model() -> str:
    """The processor's model, or at least its architecture."""
    for entry in _entries():
        for name in _MODEL:
            if entry.get(name):
                return " ".join(entry[name].split())
    return platform.processor() or platform.machine() or "unknown"


def processors() -> tuple[int, int]:
    """(the machine's logical processors, those that this process may run on)."""
    count = os.cpu_count() or 1
    return count, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else count


def cores() -> int | None:
    """The machine's cores, each with one logical processor or more; None where nobody tells."""
    places = {(entry.get("physical id"), entry.get("core id")) for entry in _entries()}
    return len(places) if places and not any(None in place for place in places) else None


def _entries() -> Iterator[dict[str, str]]:
    """The blocks of Linux's /proc/cpuinfo, one for each logical processor; none elsewhere."""
    text = ""
    with contextlib.suppress(OSError):
        text = _CPUINFO.read_text("utf-8", "replace")
    for block in text.split("\n\n"):
        pairs = (line.partition(":") for line in block.splitlines() if ":" in line)
        entry = {name.strip(): value.strip() for name, _, value in pairs}
        if "processor" in entry:
            yield entry
