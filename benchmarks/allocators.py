"""A GPU's memory from each allocator: time per allocation, what is held when sizes vary, and training steps.

    python benchmarks/allocators.py --out benchmarks/results/allocators.json
    python benchmarks/allocators.py --device simulated --nets lenet:8 --steps 4    # a dry run

Steps are `Solver.step` with the memory that `blobmem train` gives its nets; the allocators take turns. RMM's resource
is a pool over the driver's allocations, which begins small.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import clock, inputs, machine  # noqa: E402
from benchmarks.clock import Contestant, Deadline, race, steps_for  # noqa: E402
from benchmarks.gpu_ours import CLASSES, MIB, waiting  # noqa: E402
from blobmem import devices  # noqa: E402
from blobmem.devices import Device  # noqa: E402

SIZES = {"1 KiB": 1024, "1 MiB": MIB, "64 MiB": 64 * MIB}
REPEATS = 200
GROWTH = 64 * MIB, 128 * MIB
CHURN_STEPS, CHURN_LIMIT, CHURN_LARGEST = 1500, 1024 * MIB, 64 * MIB
SMALL_POOL = 256 * MIB


def device_of(word: str, allocator: str, math: str) -> Device:
    """A device with that allocator; what is no GPU has its own."""
    return devices.get(word, allocator=allocator, math=math) if word.startswith("cuda") else devices.get(word)


def started(word: str, allocator: str, math: str) -> tuple[Device, int]:
    """A device with that allocator, and the bytes that were in use before it. ImportError without RMM."""
    probe = device_of(word, "pool", math)
    if allocator != "rmm" or not word.startswith("cuda"):
        return device_of(word, allocator, math), used(probe)
    from rmm import mr

    mr.set_current_device_resource(mr.CudaMemoryResource())  # in place of an earlier pool
    gc.collect()
    before = used(probe)
    mr.set_current_device_resource(mr.PoolMemoryResource(mr.CudaMemoryResource(), initial_pool_size=SMALL_POOL))
    return device_of(word, allocator, math), before


def timed(call: Callable[[], Any]) -> float:
    """The microseconds that a call takes."""
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


def used(device: Device) -> int:
    """Bytes of the card in use, by the driver, once all is done; what a simulated device holds."""
    device.synchronize()
    context = getattr(device, "context", None)
    if context is None:
        return device.statistics.bytes_held
    free, total = context.memory_info()
    return int(total - free)


def times(device: Device) -> dict[str, float]:
    """Median microseconds of an allocation with its release, of each size, and of growth with contents."""
    result = {}
    for name, nbytes in SIZES.items():
        result[name] = statistics.median(
            timed(lambda nbytes=nbytes: device.free(device.allocate(nbytes))) for _ in range(REPEATS)
        )
    grown = []
    for _ in range(REPEATS // 10):
        address = device.allocate(GROWTH[0])
        begin = time.perf_counter()
        address = device.grow(address, *GROWTH)
        grown.append((time.perf_counter() - begin) * 1e6)
        device.free(address)
    return result | {"growth": statistics.median(grown)}


def churn(device: Device, before: int) -> dict[str, float]:
    """Allocate and free at random, sizes from 4 KiB to 64 MiB: our bytes at the end, the driver's, those kept after it.

    `before` is what the driver had in use before the device.
    """
    rng, live, held = random.Random(1), [], 0
    for _ in range(CHURN_STEPS):
        nbytes = int(4096 * (CHURN_LARGEST / 4096) ** rng.random())
        while live and (held + nbytes > CHURN_LIMIT or rng.random() < 0.4):
            address, size = live.pop(rng.randrange(len(live)))
            device.free(address)
            held -= size
        live.append((device.allocate(nbytes), nbytes))
        held += nbytes
    result = {"held_mib": held / MIB, "driver_mib": (used(device) - before) / MIB}
    for address, _ in live:
        device.free(address)
    return result | {"kept_mib": (used(device) - before) / MIB}


class Side:
    """A solver on a device with one of the allocators, warmed up, with what it took of the card."""

    def __init__(self, net: Any, device: Device, before: int, deadline: Deadline) -> None:
        self.device = device
        solver = inputs.solver_of(net, device=device, memory="train")
        inputs.fill(solver.net, CLASSES)
        self.contestant = Contestant(solver.step, waiting(device), several=solver.step)
        self.ms = self.contestant.warm_up(deadline)
        self.driver = used(device) - before

    def result(self) -> dict[str, Any]:
        """What was measured."""
        counts = self.device.statistics
        return self.contestant.result() | {
            "held_mib": counts.bytes_held / MIB, "peak_mib": counts.peak_bytes / MIB, "driver_mib": self.driver / MIB,
            "moves": counts.moves,
        }  # fmt: skip


def steps(model: str, args: argparse.Namespace, names: list[str]) -> dict[str, dict[str, Any]]:
    """By allocator the steps of a net, all taking turns."""
    name, batch = model.split(":")
    net, deadline = inputs.with_inputs(name, int(batch)), Deadline(args.time_limit)
    # the first one loads kernels and libraries, which count for nobody
    Side(net, *started(args.device, "pool", args.math), deadline)
    gc.collect()
    sides = {name: Side(net, *started(args.device, name, args.math), deadline) for name in names}
    count = steps_for(max(side.ms for side in sides.values()), args.steps, args.seconds)
    race([(side.contestant, count) for side in sides.values()], args.group, deadline)
    return {name: side.result() for name, side in sides.items()}


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each allocator that there is; of one that there is not, why."""
    rows = []
    for name in args.allocators.split(","):
        try:
            device, before = started(args.device, name, args.math)
            rows.append({"allocator": name, "us": times(device), "churn": churn(device, before)})
        except Exception as error:  # the others are measured all the same
            rows.append({"allocator": name, "error": f"{type(error).__name__}: {error}"})
        print(rows[-1], flush=True)
    there = {row["allocator"]: row for row in rows if "error" not in row}
    for model in args.nets.split(","):
        for name, result in steps(model, args, [*there]).items():
            there[name].setdefault("nets", {})[model] = result
            took = f"{result['held_mib']:.1f} MiB held, {result['driver_mib']:.1f} taken"
            print(f"{model} {name}: {result['ms']:.3f} ms, {took}", flush=True)
        gc.collect()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--allocators", default="pool,direct,async,rmm,managed", help="default: %(default)s")
    parser.add_argument(
        "--nets", default="lenet:64,resnet50:32", help="NET:BATCH,... of models/ (default: %(default)s)"
    )
    parser.add_argument("--math", default="tf32", help="default: %(default)s")
    parser.add_argument("--group", type=int, default=10, help="steps between two waits (default: %(default)s)")
    clock.add_options(parser)
    machine.add_options(parser)
    args = parser.parse_args()
    machine.report(args, compare(args))


if __name__ == "__main__":
    main()
