"""A training step fed from LMDB against the same step on constant data, taking turns.

    python benchmarks/feeding.py --out benchmarks/results/feeding.json
    python benchmarks/feeding.py --device cpu --nets lenet:8 --records 64 --steps 4    # a dry run

The databases are made for the purpose in a temporary folder: random bytes, 28x28 for LeNet, 3x256x256 for the others,
which crop, mirror and subtract the mean as their files say. Both solvers choose their number of streams. Each turn is
a run of about a second, as what a run costs at its beginning and its end is no part of what feeding costs.

A fed step of LeNet keeps the host at work for two thirds of the time that a GPU takes for it, so that turns are slower
where the host's cores are, for a while, as those shared with others can be; the groups in the results show that.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import clock, inputs, machine  # noqa: E402
from benchmarks.clock import Contestant, Deadline, race, steps_for  # noqa: E402
from benchmarks.gpu_ours import device_of, waiting  # noqa: E402
from blobmem.data import waiting_time  # noqa: E402
from blobmem.data.writer import new_database  # noqa: E402
from blobmem.proto import caffe_pb2  # noqa: E402
from blobmem.proto.text import read_net  # noqa: E402

ITEMS = {"lenet": (1, 28, 28)}
IMAGE = (3, 256, 256)
CLASSES = 10
SETTLING = 30  # steps, after which a solver has chosen its streams and captured its iterations
TURNS = 5


def make_database(path: Path, shape: tuple[int, int, int], records: int) -> None:
    """An LMDB of random bytes of that shape, with labels from 0 to 9."""
    rng = np.random.default_rng(0)
    channels, height, width = shape
    with new_database(path) as writer:
        for index in range(records):
            data = rng.integers(0, 256, shape, np.uint8).tobytes()
            datum = caffe_pb2.Datum(
                channels=channels, height=height, width=width, data=data, label=int(rng.integers(CLASSES))
            )
            writer.put(b"%08d" % index, datum.SerializeToString())


def from_database(model: str, batch: int, path: Path) -> Any:
    """The NetParameter of a model's train_val file with its training data from there."""
    param = read_net(inputs.MODELS / model / "train_val.prototxt")
    for layer in param.layer:
        if layer.type == "Data":
            layer.data_param.source, layer.data_param.batch_size = str(path), batch
    return param


def compare(net: str, args: argparse.Namespace) -> dict[str, Any]:
    """Medians of `Solver.step`, fed and on constant data, and what the fed one waited for data."""
    model, _, number = net.partition(":")
    batch = int(number)
    deadline = Deadline(args.time_limit)
    device = device_of(args.device, args.math)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lmdb"
        begin = time.perf_counter()
        make_database(path, ITEMS.get(model, IMAGE), args.records)
        made = time.perf_counter() - begin
        constant = inputs.solver_of(inputs.with_inputs(model, batch), device=device, backward_streams="auto")
        inputs.fill(constant.net, CLASSES)
        fed = inputs.solver_of(from_database(model, batch, path), device=device, backward_streams="auto")
        contestants = [Contestant(solver.step, waiting(device), several=solver.step) for solver in (constant, fed)]
        for contestant in contestants:
            contestant.warm_up(deadline)
            contestant.take(SETTLING)
        steps = steps_for(max(contestant.take(10) for contestant in contestants), args.steps, args.seconds)
        waited = waiting_time(fed.net)
        race([(contestant, steps) for contestant in contestants], max(1, steps // TURNS), deadline)
        waited = waiting_time(fed.net) - waited
        on_constant, on_records = (contestant.result() for contestant in contestants)
        streams = [solver.net.streams for solver in (constant, fed)]
        del fed, contestants
    return {"net": model, "batch": batch, "math": args.math, "steps": steps, "records": args.records,
            "streams": streams, "constant": on_constant, "fed": on_records, "waited_ms": waited * 1e3 / steps,
            "ratio": on_records["ms"] / on_constant["ms"], "database_s": made}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", default="lenet:64,resnet50:256", help="NET:BATCH,... (default: %(default)s)")
    parser.add_argument("--math", default="tf32", help="the faster the step, the harder to feed (default: %(default)s)")
    parser.add_argument("--records", type=int, default=2000, help="in each database (default: %(default)s)")
    clock.add_options(parser)
    machine.add_options(parser)
    parser.set_defaults(steps=1 << 20)
    args = parser.parse_args()
    rows = []
    for net in args.nets.split(","):
        row = compare(net, args)
        rows.append(row)
        print(
            f"{row['net']} {row['batch']} {row['math']}: constant {row['constant']['ms']:.3f} ms, "
            f"fed {row['fed']['ms']:.3f} ms, ratio {row['ratio']:.3f}, waited {row['waited_ms']:.3f} ms a step",
            flush=True,
        )
    machine.report(args, rows)


if __name__ == "__main__":
    main()
