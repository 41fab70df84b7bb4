"""Blobs over the link between host and GPU, against plain copies of page-locked memory; growth of 1 GiB in place.

python benchmarks/link.py --out benchmarks/results/link.json
python benchmarks/link.py --device simulated --sizes 1 --growth 1    # a dry run
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import machine  # noqa: E402
from blobmem import devices  # noqa: E402
from blobmem.devices.pages import Pages  # noqa: E402
from blobmem.memory import Side, SyncedMemory  # noqa: E402

MIB = 2**20
DIRECTIONS = ("to the device", "to the host", "both at once")


class Plain:
    """Copies between page-locked host memory and the device, two streams, nothing else."""

    def __init__(self, device: Any, nbytes: int) -> None:
        self.device = device
        self.pages = [Pages(nbytes, nbytes) for _ in range(2)]
        self.host = [pages.bytes(0, nbytes) for pages in self.pages]
        for array, pages in zip(self.host, self.pages, strict=True):
            array.fill(1)
            pages.pin(device, nbytes)
        self.far = [device.allocate(nbytes, "plain") for _ in range(2)]
        self.streams = [copy_stream(device) for _ in range(2)]

    def run(self, direction: str) -> float:
        """Seconds of one copy, or of two in the two directions."""
        begin = time.perf_counter()
        if direction != "to the host":
            self.device.memcpy_htod(self.far[0], self.host[0], self.streams[0])
        if direction != "to the device":
            self.device.memcpy_dtoh(self.host[1], self.far[1], self.streams[1])
        for stream in self.streams:
            stream.synchronize()
        return time.perf_counter() - begin

    def close(self) -> None:
        for address in self.far:
            self.device.free(address)
        for pages in self.pages:
            pages.unpin()


class Ours:
    """The same, as accesses of two SyncedMemories that cause them."""

    def __init__(self, device: Any, nbytes: int) -> None:
        self.nbytes = nbytes
        self.up, self.down = (SyncedMemory(nbytes, device, name) for name in ("up", "down"))
        self.stream = copy_stream(device)
        for memory in (self.up, self.down):
            memory.mutable_cpu_data()[:] = 1

    def run(self, direction: str) -> float:
        """Seconds of one access, or of two in the two directions; what makes the other side stale is not timed."""
        self.up.access(Side.HOST, 0, self.nbytes, "overwrite")
        self.down.access(Side.DEVICE, 0, self.nbytes, "overwrite")
        begin = time.perf_counter()
        if direction != "to the host":
            self.up.access(Side.DEVICE, 0, self.nbytes, "read", self.stream)
        if direction != "to the device":
            self.down.access(Side.HOST, 0, self.nbytes, "read")
        self.stream.synchronize()
        return time.perf_counter() - begin


def copy_stream(device: Any) -> Any:
    make: Callable[[], Any] = getattr(device, "create_copy_stream", device.create_stream)
    return make()


def compare(device: Any, nbytes: int, repeats: int) -> list[dict[str, Any]]:
    """GB/s of both for each direction, taking turns; medians."""
    plain, ours = Plain(device, nbytes), Ours(device, nbytes)
    rows = []
    for direction in DIRECTIONS:
        seconds: dict[str, list[float]] = {"plain": [], "blobmem": []}
        for repeat in range(repeats + 3):  # the first ones page-lock and allocate
            for name, side in (("plain", plain), ("blobmem", ours)):
                taken = side.run(direction)
                if repeat >= 3:
                    seconds[name].append(taken)
        moved = nbytes * (2 if direction == "both at once" else 1)
        used = {"to the device": [ours.up], "to the host": [ours.down]}.get(direction, [ours.up, ours.down])
        rate = {name: moved / statistics.median(values) / 1e9 for name, values in seconds.items()}
        rows.append(
            {"mib": nbytes / MIB, "direction": direction, "plain_gbs": rate["plain"], "blobmem_gbs": rate["blobmem"],
             "ratio": rate["blobmem"] / rate["plain"], "pinned": all(memory.pinned_bytes >= nbytes for memory in used)}
        )  # fmt: skip
    plain.close()
    return rows


def growth(device: Any, nbytes: int, repeats: int) -> dict[str, Any]:
    """Milliseconds in which a memory of `nbytes` grows by as much again, and whether its address and bytes stay."""
    memory = SyncedMemory(nbytes, device, "grows")
    memory.mutable_cpu_data()[:1024] = 7
    times, addresses = [], set()
    for _ in range(repeats):
        addresses.add(memory.gpu_data())
        begin = time.perf_counter()
        memory.reserve(Side.DEVICE, 2 * nbytes)
        times.append((time.perf_counter() - begin) * 1e3)
        addresses.add(memory.gpu_data())
        memory.unreserve(Side.DEVICE, nbytes)
    held = np.empty(1024, np.uint8)
    device.memcpy_dtoh(held, memory.gpu_data())
    return {"mib": nbytes / MIB, "ms": statistics.median(times), "best_ms": min(times),
            "in_place": len(addresses) == 1, "kept": bool((held == 7).all())}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="16,64,256", help="MiB of the blobs (default: %(default)s)")
    parser.add_argument("--growth", type=int, default=1024, help="MiB to grow by (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=20)
    machine.add_options(parser)
    args = parser.parse_args()
    device = devices.get(args.device)
    rows = [row for size in args.sizes.split(",") for row in compare(device, int(size) * MIB, args.repeats)]
    for row in rows:
        print(
            f"{row['mib']:5.0f} MiB {row['direction']:13} plain {row['plain_gbs']:6.1f} GB/s  blobmem "
            f"{row['blobmem_gbs']:6.1f} GB/s  ratio {row['ratio']:.3f}{'' if row['pinned'] else '  (not page-locked)'}"
        )
    grown = growth(device, args.growth * MIB, 5)
    print(
        f"growth of {grown['mib']:.0f} MiB by as much: {grown['ms']:.3f} ms, "
        f"{'in place' if grown['in_place'] else 'moved'}, contents {'kept' if grown['kept'] else 'LOST'}"
    )
    machine.report(args, rows, growth=grown)


if __name__ == "__main__":
    main()
