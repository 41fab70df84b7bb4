"""Training steps whose backward pass runs on one stream and on two, captured and eager, taking turns.

    python benchmarks/streams.py --out benchmarks/results/streams.json
    python benchmarks/streams.py --device cpu --nets lenet --batches 8 --steps 4    # a dry run

The data is constant and on the device. `Solver.step` is timed, which reads the loss of each; nets have the memory that
`blobmem train` gives them. A file that is there keeps the rows that are not measured again.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import clock, inputs, machine  # noqa: E402
from benchmarks.clock import Contestant, Deadline, race, steps_for  # noqa: E402
from benchmarks.gpu import merged  # noqa: E402
from benchmarks.gpu_ours import CLASSES, MIB, device_of, waiting  # noqa: E402

KEY = ("net", "batch", "math", "memory")
SIDES = {f"{kind} {streams}": (kind == "captured", streams) for kind in ("eager", "captured") for streams in (1, 2)}
"""By name: whether steps are captured, and the number of streams."""


class Side:
    """A solver on a device of its own."""

    def __init__(self, param: Any, captured: bool, streams: int, args: argparse.Namespace, deadline: Deadline) -> None:
        self.device = device_of(args.device, args.math, captured)
        options = {"dtype": inputs.dtype_of(args.math), "memory": args.memory, "backward_streams": streams}
        solver = inputs.solver_of(param, device=self.device, **options)
        inputs.fill(solver.net, CLASSES)
        self.contestant = Contestant(solver.step, waiting(self.device), several=solver.step)
        self.ms = self.contestant.warm_up(deadline)

    def result(self) -> dict[str, Any]:
        """What was measured, and the bytes held."""
        return self.contestant.result() | {"held_mib": self.device.statistics.bytes_held / MIB}


def compare(model: str, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """All sides of one net and batch; the ratios of two streams over one."""
    deadline, param = Deadline(args.time_limit), inputs.with_inputs(model, batch)
    sides = {name: Side(param, *which, args, deadline) for name, which in SIDES.items()}
    steps = steps_for(max(side.ms for side in sides.values()), args.steps, args.seconds)
    race([(side.contestant, steps) for side in sides.values()], args.group, deadline)
    results = {name: side.result() for name, side in sides.items()}
    ratios = {kind: results[f"{kind} 2"]["ms"] / results[f"{kind} 1"]["ms"] for kind in ("eager", "captured")}
    ratios["held"] = results["captured 2"]["held_mib"] / max(results["captured 1"]["held_mib"], 1 / MIB)
    return {"net": model, "batch": batch, "math": args.math, "memory": args.memory, "sides": results, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--nets", default="resnet50,googlenet,inception_v3", help="NET,... of models/ (default: %(default)s)"
    )
    parser.add_argument("--batches", default="8,16,32,64,256", help="of each net (default: %(default)s)")
    parser.add_argument(
        "--math", default="tf32", help="fp32, tf32, or a dtype of halves, in which nets then are (default: %(default)s)"
    )
    parser.add_argument("--memory", choices=("train", "keep"), default="train", help="default: %(default)s")
    parser.add_argument("--group", type=int, default=10, help="steps between two waits (default: %(default)s)")
    clock.add_options(parser)
    machine.add_options(parser)
    args = parser.parse_args()
    there = args.out is not None and args.out.exists()
    rows = json.loads(args.out.read_text())["results"] if there else []
    for model in args.nets.split(","):
        for batch in map(int, args.batches.split(",")):
            row = compare(model, batch, args)
            rows = merged(rows, [row], KEY)
            times = ", ".join(f"{name} {side['ms']:.3f} ms" for name, side in row["sides"].items())
            ratios = ", ".join(f"{name} {ratio:.4f}" for name, ratio in row["ratios"].items())
            print(f"{model} {batch} {args.math}: {times}; two over one: {ratios}", flush=True)
            machine.report(args, rows)
            gc.collect()


if __name__ == "__main__":
    main()
