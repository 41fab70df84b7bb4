"""Training steps and tests with blobs shared between train and test net, and without, taking turns.

    python benchmarks/sharing.py --out benchmarks/results/sharing.json
    python benchmarks/sharing.py --device cpu --nets lenet:8/12 --steps 4    # a dry run

The data is constant, in inputs of each net's own. `Solver.step` and `Solver.test` are timed each by itself, and a step
with a test after it, where the nets hand the memory to each other.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import clock, inputs, machine  # noqa: E402
from benchmarks.clock import Contestant, Deadline, race, steps_for  # noqa: E402
from benchmarks.gpu_ours import CLASSES, MIB, device_of, waiting  # noqa: E402
from blobmem.proto import caffe_pb2  # noqa: E402

SIDES = {"separate": False, "shared": True}
FIGURES = ("step", "test", "both")


def with_both_inputs(model: str, train_batch: int, test_batch: int) -> Any:
    """The NetParameter of a model's train_val file with inputs of these batches for the two phases."""
    param = inputs.with_inputs(model, train_batch)
    train = next(layer for layer in param.layer if layer.type == "Input")
    test = caffe_pb2.LayerParameter()
    test.CopyFrom(train)
    train.include.add(phase=caffe_pb2.TRAIN)
    test.include.add(phase=caffe_pb2.TEST)
    for shape in test.input_param.shape:
        shape.dim[0] = test_batch
    param.layer.insert(0, test)
    return param


class Side:
    """A solver with a test net on a device of its own."""

    def __init__(self, net: Any, share: bool, word: str, math: str) -> None:
        self.device = device_of(word, math)
        self.solver = inputs.solver_of(net, share=share, tests=True, device=self.device)
        for each in (self.solver.net, *self.solver.test_nets):
            inputs.fill(each, CLASSES)
        calls = {"step": self.solver.step, "test": self.solver.test, "both": self._both}
        self.contestants = {name: Contestant(calls[name], waiting(self.device)) for name in FIGURES}

    def _both(self) -> None:
        self.solver.step()
        self.solver.test()

    def result(self) -> dict[str, Any]:
        """What was measured, and the bytes held."""
        found: dict[str, Any] = {name: contestant.result() for name, contestant in self.contestants.items()}
        return found | {"held_mib": self.device.statistics.bytes_held / MIB}


def compare(net: str, args: argparse.Namespace) -> dict[str, Any]:
    """Medians of both sides, and shared over separate, of one NET:TRAIN/TEST."""
    model, _, batches = net.partition(":")
    train_batch, test_batch = map(int, batches.split("/"))
    deadline = Deadline(args.time_limit)
    param = with_both_inputs(model, train_batch, test_batch)
    sides = {name: Side(param, share, args.device, args.math) for name, share in SIDES.items()}
    contestants = []
    for figure in FIGURES:
        mine = [side.contestants[figure] for side in sides.values()]
        steps = steps_for(max(contestant.warm_up(deadline) for contestant in mine), args.steps, args.seconds)
        contestants += [(contestant, steps) for contestant in mine]
    race(contestants, args.group, deadline)
    results = {name: side.result() for name, side in sides.items()}
    ratios = {figure: results["shared"][figure]["ms"] / results["separate"][figure]["ms"] for figure in FIGURES}
    return {"net": model, "batch": train_batch, "test_batch": test_batch, "math": args.math, **results,
            "ratios": ratios}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--nets", default="caffenet:256/50,lenet:64/100", help="NET:TRAIN/TEST,... batches (default: %(default)s)"
    )
    parser.add_argument("--math", default="fp32", help="default: %(default)s")
    parser.add_argument("--group", type=int, default=10, help="steps between two waits (default: %(default)s)")
    clock.add_options(parser)
    machine.add_options(parser)
    args = parser.parse_args()
    rows = []
    for net in args.nets.split(","):
        row = compare(net, args)
        rows.append(row)
        said = ", ".join(
            f"{figure} {row['separate'][figure]['ms']:.3f} / {row['shared'][figure]['ms']:.3f} ms "
            f"(ratio {row['ratios'][figure]:.4f})"
            for figure in FIGURES
        )
        print(f"{row['net']} {row['batch']}/{row['test_batch']} {row['math']}, separate / shared: {said}", flush=True)
    machine.report(args, rows)


if __name__ == "__main__":
    main()
