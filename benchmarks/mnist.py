"""LeNet on all of MNIST by Caffe's schedule, fed from LMDB: seconds, and the accuracy on the whole test set.

    python benchmarks/mnist.py FOLDER --out benchmarks/results/mnist.json
    python benchmarks/mnist.py models/lenet/mnist --device cpu --iterations 20    # a dry run

FOLDER has the four idx files, gzipped or not (LeCun, Cortes, Burges). 10,000 iterations of 64 images, learning rate
0.01 * (1 + 0.0001 * iteration) ^ -0.75, momentum 0.9, weight decay 0.0005.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import blobmem  # noqa: E402
from benchmarks import inputs, machine  # noqa: E402
from benchmarks.gpu_ours import device_of  # noqa: E402
from blobmem.data import mnist  # noqa: E402
from blobmem.proto import caffe_pb2  # noqa: E402
from blobmem.proto.text import read_net  # noqa: E402

BATCH, TEST_BATCH = 64, 100


def solver_param(folder: Path, test_images: int, seed: int) -> Any:
    """The SolverParameter, for the databases in a folder."""
    param = caffe_pb2.SolverParameter(
        base_lr=0.01, lr_policy="inv", gamma=1e-4, power=0.75, momentum=0.9, weight_decay=5e-4, random_seed=seed,
        test_interval=1 << 30, test_initialization=False,
    )  # fmt: skip
    param.test_iter.append(test_images // TEST_BATCH)
    net = read_net(inputs.MODELS / "lenet" / "train_val.prototxt")
    for layer in net.layer:
        if layer.type == "Data":
            layer.data_param.source = str(folder / Path(layer.data_param.source).name)
    param.net_param.CopyFrom(net)
    return param


def trained(solver: Any, iterations: int) -> tuple[float, dict[str, float]]:
    """Let a solver take so many iterations: the seconds that takes, and what its test net gives then."""
    begin = time.perf_counter()
    solver.step(iterations)
    seconds = time.perf_counter() - begin
    return seconds, {name: float(value) for name, value in solver.test().outputs.values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with the idx files")
    parser.add_argument("--math", default="fp32", help="default: %(default)s")
    parser.add_argument("--iterations", type=int, default=10_000, help="default: %(default)s")
    parser.add_argument("--seeds", default="1,2,3", help="of as many runs (default: %(default)s)")
    machine.add_options(parser)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        _, tests = mnist.convert(args.folder, folder)
        for seed in map(int, args.seeds.split(",")):
            solver = blobmem.get_solver(
                solver_param(Path(folder), tests.records, seed), device=device_of(args.device, args.math)
            )
            seconds, scores = trained(solver, args.iterations)
            rows.append({"net": "lenet", "batch": BATCH, "math": args.math, "seed": seed, "train_s": seconds,
                         "iterations": args.iterations, "test_images": tests.records, **scores})  # fmt: skip
            print(f"seed {seed}: {args.iterations} iterations in {seconds:.1f} s; {scores}", flush=True)
    machine.report(args, rows)


if __name__ == "__main__":
    main()
