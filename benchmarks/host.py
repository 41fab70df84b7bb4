"""Forward and forward + backward on the host, against PyTorch's CPU build, alternating processes; peak memory too.

    python benchmarks/host.py [--runs 5] [--json benchmarks/results/host.json]

Needs PyTorch beside blobmem. Both sides get the same random images. Two-thread runs of whole processes come in two
speeds on shared machines, so the fastest process of each side counts, and the median over processes is given too.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

SPEED = {"lenet": 64, "caffenet": 32}
MEMORY = ("caffenet", 64, 50)
ROOT = Path(__file__).parents[1]


def images(
    shape: tuple[int, ...], classes: int, batch: int, out: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Random images, in `out` if given, and labels, float32."""
    rng = np.random.default_rng(0)
    return rng.random((batch, *shape), np.float32, out), rng.integers(0, classes, batch).astype(np.float32)


def timed(forward: Callable[[], Any], both: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Medians in ms, after two passes that compile, allocate and choose."""
    for _ in range(2):
        both()
    result = {}
    for name, run in (("forward", forward), ("both", both)):
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            run()
            times.append(1000 * (time.perf_counter() - start))
        result[name] = statistics.median(times)
    return result


def our_net(name: str, batch: int, phase: int) -> Any:
    """The train_val net with its data layer replaced by net inputs."""
    import blobmem
    from benchmarks.inputs import with_inputs

    return blobmem.Net(with_inputs(name, batch), phase, seed=1)


def time_ours(name: str, batch: int, repeats: int) -> dict[str, float]:
    from benchmarks.peers import MODELS

    _, shape, classes = MODELS[name]
    net = our_net(name, batch, 0)
    net.blobs["data"].data[...], net.blobs["label"].data[...] = images(shape, classes, batch)

    def both() -> None:
        net.clear_param_diffs()
        net.run_forward()
        net.run_backward()

    return timed(net.run_forward, both, repeats)


def time_torch(name: str, batch: int, repeats: int) -> dict[str, float]:
    import torch

    from benchmarks.peers import MODELS

    torch.set_num_threads(2)
    make, shape, classes = MODELS[name]
    model, loss = make().train(), torch.nn.CrossEntropyLoss()
    data, labels = images(shape, classes, batch)
    x, y = torch.from_numpy(data), torch.from_numpy(labels).long()

    def both() -> None:
        model.zero_grad(set_to_none=False)
        loss(model(x), y).backward()

    return timed(lambda: loss(model(x), y), both, repeats)


def memory_ours() -> dict[str, float]:
    """One solver step and one test pass of a train and a test net that share memory."""
    import blobmem
    from benchmarks.peers import MODELS
    from blobmem.proto import caffe_pb2

    name, train_batch, test_batch = MEMORY
    _, shape, classes = MODELS[name]
    param = caffe_pb2.SolverParameter(base_lr=0.01, momentum=0.9, weight_decay=5e-4, lr_policy="fixed", random_seed=1)
    param.test_iter.append(1)
    param.test_interval, param.test_initialization = 100, False
    net = caffe_pb2.NetParameter(name=name)
    for phase, batch in ((0, train_batch), (1, test_batch)):
        layer = net.layer.add(name="data", type="MemoryData", top=["data", "label"])
        layer.include.add(phase=phase)
        options = layer.memory_data_param
        options.batch_size, options.channels, options.height, options.width = batch, *shape
    from blobmem.proto.text import read_net

    for layer in read_net(ROOT / "models" / name / "train_val.prototxt").layer:
        if layer.type != "Data":
            net.layer.add().CopyFrom(layer)
    param.net_param.CopyFrom(net)
    solver = blobmem.SGDSolver(param, share=True)
    for one in (solver.net, *solver.test_nets):
        batch = train_batch if one is solver.net else test_batch
        one.layers[0].reset(*images(shape, classes, batch))
    solver.step(2)
    for one in solver.test_nets:
        one.run_forward()
    return {"peak_mib": peak_mib()}


def memory_torch() -> dict[str, float]:
    import torch

    from benchmarks.peers import MODELS

    torch.set_num_threads(2)
    name, train_batch, test_batch = MEMORY
    make, shape, classes = MODELS[name]
    model, loss = make(), torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    for _ in range(2):
        data, labels = images(shape, classes, train_batch)
        model.train()
        optimizer.zero_grad()
        loss(model(torch.from_numpy(data)), torch.from_numpy(labels).long()).backward()
        optimizer.step()
    data, labels = images(shape, classes, test_batch)
    with torch.no_grad():
        model.eval()(torch.from_numpy(data))
    return {"peak_mib": peak_mib()}


def peak_mib() -> float:
    """Peak resident memory of this process, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def child(what: str, side: str, repeats: int) -> dict[str, float]:
    """Measure one thing in a process of its own."""
    command = [sys.executable, __file__, "--child", what, side, "--repeats", str(repeats)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="processes of each side")
    parser.add_argument("--repeats", type=int, default=10, help="passes timed in each process")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "SIDE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        what, side = args.child
        if what == "memory":
            result = memory_ours() if side == "ours" else memory_torch()
        else:
            result = (time_ours if side == "ours" else time_torch)(what, SPEED[what], args.repeats)
        print(json.dumps(result))
        return
    report: dict[str, Any] = {"command": " ".join(sys.argv), "machine": machine(), "results": []}
    for what in (*SPEED, "memory"):
        runs: dict[str, list[dict[str, float]]] = {"ours": [], "torch": []}
        for _ in range(args.runs):
            for side, results in runs.items():
                results.append(child(what, side, args.repeats))
        for key in runs["ours"][0]:
            row: dict[str, Any] = {"what": what, "batch": SPEED.get(what, "train 64 + test 50"), "figure": key}
            for side, results in runs.items():
                values = [result[key] for result in results]
                row[side] = {"best": min(values), "median": statistics.median(values)}
            row["ratio_best"] = row["ours"]["best"] / row["torch"]["best"]
            row["ratio_median"] = row["ours"]["median"] / row["torch"]["median"]
            report["results"].append(row)
            print(
                f"{what:9} {key:9} ours {row['ours']['best']:8.1f}  PyTorch {row['torch']['best']:8.1f}  "
                f"ratio {row['ratio_best']:.2f} (medians {row['ratio_median']:.2f})",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.machine()


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    import numba
    import torch

    import blobmem

    return {
        "cpu": _cpu(), "cores": 2, "python": platform.python_version(),
        "numpy": np.__version__, "numba": numba.__version__, "torch": torch.__version__, "blobmem": blobmem.__version__,
    }  # fmt: skip


if __name__ == "__main__":
    main()
