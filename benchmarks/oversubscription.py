"""Training in less memory than a net needs, beside PyTorch's ways to do with less, in one process.

    python benchmarks/oversubscription.py --nets resnet50:256 --out benchmarks/results/oversubscription.json
    python benchmarks/oversubscription.py --nets resnet1001:64 --curve 2GiB --points 6 --out FILE.json
    python benchmarks/oversubscription.py --device simulated --torch none --nets lenet:64 --maths fp32 --steps 4

Need is the peak of our own step (`memory="train"`) without a limit. Then come limits of the need's parts, each raced
against the step without one; where the net takes more at the least, that. Of PyTorch there are the plain step, in a
CUDA graph too, with `save_on_cpu(pin_memory=True)`, and checkpointed in as few segments as do with the same memory.
With --curve it is one limit, and batches that double from the given one on.

The data is constant and on the device. What fails is recorded as its message, and the rest goes on; results are written
after each figure. A file that is there keeps the rows that are not measured again.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import clock, inputs, machine  # noqa: E402
from benchmarks.clock import Contestant, Deadline, race, steps_for  # noqa: E402
from benchmarks.gpu import attempt, merged, words  # noqa: E402
from benchmarks.gpu_ours import CLASSES, waiting  # noqa: E402
from blobmem import devices  # noqa: E402
from blobmem.errors import OutOfDeviceMemory  # noqa: E402

NETS = "resnet1001:64,resnet50:256,vgg16:64,densenet264:32,vnet:2,lstm_lm:1408"
TIMES = (1.5, 2.0, 4.0, 7.5)
"""Need over limit."""
COUNTED = 4  # steps whose copies are counted
KEY, CURVE_KEY = ("net", "batch", "math", "gpu"), ("net", "batch", "math", "gpu", "limit")


class Ours:
    """A solver, warmed up, on a device of its own that may hold `limit` bytes. OutOfDeviceMemory if they do not do."""

    def __init__(self, model: str, batch: int, math: str, word: str, deadline: Deadline, limit: int | None) -> None:
        dtype = inputs.dtype_of(math)
        chosen = {"math": math} if word.startswith("cuda") and dtype != math else {}
        self.device = devices.get(word, limit, **chosen) if limit or chosen else device_alone(word)
        deadline.check()
        solver = inputs.solver_of(inputs.with_inputs(model, batch), device=self.device, dtype=dtype, memory="train")
        inputs.fill(solver.net, CLASSES)
        self.contestant = Contestant(solver.step, waiting(self.device), several=solver.step)
        self.ms = self.contestant.warm_up(deadline)
        if limit is None:  # the search for algorithms does not count; under a limit all does
            self.device.statistics.reset_peak()

    def result(self) -> dict[str, Any]:
        """What was measured, the most bytes held, and those that leave and come back in a step."""
        before = self.device.statistics.snapshot()
        self.contestant.take(COUNTED)
        moved = self.device.statistics - before
        return self.contestant.result() | {
            "peak_bytes": self.device.statistics.peak_bytes,
            "out_bytes": moved.dtoh_bytes // COUNTED, "in_bytes": moved.htod_bytes // COUNTED,
        }  # fmt: skip


def device_alone(word: str) -> Any:
    """A device that nobody else uses, without a limit."""
    if not word.startswith("cuda"):
        return devices.get(word)
    from blobmem.devices.cuda.device import CudaDevice

    return CudaDevice(int(word.partition(":")[2] or 0))


def at_least(limit: int, *common: Any) -> tuple[Ours, int]:
    """Ours with that limit, or if the net takes more, with the least that it takes; and which it is."""
    try:
        return Ours(*common, limit), limit
    except OutOfDeviceMemory as error:
        if error.requested <= limit:
            raise
        least = error.requested
    gc.collect()
    return Ours(*common, least), least


def compare(row: dict[str, Any], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The row of a net, batch and math as it fills: ours without a limit, at its limits, and PyTorch's ways."""
    deadline = Deadline(args.time_limit)
    common = (row["net"], row["batch"], row["math"], args.device, deadline)
    row["limits"] = []
    with attempt(row, "ours"):
        full = Ours(*common, None)
        run([full], args, deadline)
        row["ours"] = full.result()
        row["limits"] += [{"times": times, "limit": int(row["ours"]["peak_bytes"] / times)} for times in TIMES]
    yield row
    if not row["limits"]:
        return
    least = None
    for each in row["limits"]:
        with attempt(each, "ours"):
            if least is None:
                side, granted = at_least(each["limit"], *common)
                run([full, side], args, deadline)
                each["ours"] = side.result() | {"granted_bytes": granted}
                each["ours"]["speed"] = full.contestant.result()["ms"] / each["ours"]["ms"]
                least = each["ours"] if granted > each["limit"] else None
                del side
            else:  # as less will not do
                each["ours"] = least
        gc.collect()
        yield row
    del full
    gc.collect()
    if args.torch:
        granted = [each["ours"].get("granted_bytes", each["limit"]) for each in row["limits"]]
        for sides in beside(common, ("plain", "checkpointed", "on_host", "graph"), granted, args):
            checkpointed = sides.get("checkpointed", [])
            row["torch"] = {name: side for name, side in sides.items() if name != "checkpointed"}
            for each, side in zip(row["limits"], checkpointed, strict=False):
                each["checkpointed"] = side
            yield row


def curve(row: dict[str, Any], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The row of a net, batch, math and limit as it fills: ours, and PyTorch's ways."""
    deadline = Deadline(args.time_limit)
    common = (row["net"], row["batch"], row["math"], args.device, deadline)
    with attempt(row, "ours"):
        side = Ours(*common, row["limit"])
        run([side], args, deadline)
        row["ours"] = side.result()
        del side
    gc.collect()
    yield row
    if args.torch and "ms" in row["ours"]:
        for sides in beside(common, ("plain", "checkpointed", "on_host"), [row["limit"]], args):
            row |= sides
            row["checkpointed"] = next(iter(sides.get("checkpointed", [])), {})
            yield row


def run(sides: list[Ours], args: argparse.Namespace, deadline: Deadline) -> None:
    """Let sides take turns; what they took before is forgotten."""
    for side in sides:
        side.contestant.groups.clear()
    steps = steps_for(max(side.ms for side in sides), args.steps, args.seconds)
    race([(side.contestant, steps) for side in sides], args.group, deadline)


def beside(
    common: tuple[Any, ...], ways: tuple[str, ...], limits: list[int], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """PyTorch's figures by way as they come; checkpointed, a list, for each limit."""
    from benchmarks.torch_ways import Theirs

    sides: dict[str, Any] = {}
    theirs: Theirs | None = None
    with attempt(sides, ways[0]):
        theirs = Theirs(*common, args.steps, args.seconds, args.group)
    for way in ways if theirs is not None else ():
        with attempt(sides, way):
            sides[way] = theirs.checkpointed(limits) if way == "checkpointed" else getattr(theirs, way)()
        if way == "checkpointed" and "error" in sides[way]:
            sides[way] = [sides[way] for _ in limits]
        yield sides
    if theirs is not None:
        theirs.close()
    yield sides


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", type=words, default=words(NETS), metavar="NET:BATCH,...", help=f"default: {NETS}")
    parser.add_argument("--maths", type=words, default=["tf32"], help="of fp32, tf32, float16, bfloat16; default: tf32")
    parser.add_argument("--curve", type=devices.parse_bytes, metavar="LIMIT", help="batches that double, at that limit")
    parser.add_argument("--points", type=int, default=5, help="so many batches of a curve (default: %(default)s)")
    parser.add_argument("--torch", choices=("none", "all"), default="all", help="default: %(default)s")
    parser.add_argument("--group", type=int, default=5, help="steps between two waits (default: %(default)s)")
    clock.add_options(parser)
    machine.add_options(parser)
    parser.set_defaults(steps=20, seconds=2)
    args = parser.parse_args()
    args.torch = args.torch == "all"
    return args


def rows(net: str, math: str, args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is measured of a net, with the list that it belongs to, each row several times as it fills."""
    model, _, batch = net.partition(":")
    row = {"net": model, "batch": int(batch), "math": math, "command": " ".join(["python", *sys.argv])}
    row["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    if args.curve is None:
        yield from (("results", each) for each in compare(row, args))
        return
    for point in range(args.points):
        own = row | {"batch": row["batch"] << point, "limit": args.curve}
        yield from (("curves", each) for each in curve(own, args))
        if "error" in own["ours"]:
            return


def main() -> None:
    args = arguments()
    there = args.out is not None and args.out.exists()
    report: dict[str, Any] = json.loads(args.out.read_text()) if there else {"results": [], "curves": []}
    found = machine.described(args.device, args.torch)
    gpu = found.get("model", args.device)
    report.setdefault("machines", {})[gpu] = found
    for net in args.nets:
        for math in args.maths:
            for kind, row in rows(net, math, args):
                row["gpu"] = gpu
                report[kind] = merged(report[kind], [row], KEY if kind == "results" else CURVE_KEY)
                if args.out:
                    args.out.write_text(json.dumps(report, indent=1) + "\n")
            print(json.dumps(row), flush=True)
            gc.collect()


if __name__ == "__main__":
    main()
