"""One net trained on every GPU at once, by a process each, from one empty cache of algorithms: do they hold as much?

    python benchmarks/many_gpus.py --out benchmarks/results/many_gpus.json
    python benchmarks/many_gpus.py --device cpu --processes 2 --net lenet:4 --steps 2    # a dry run

The processes start together, so that they search for algorithms at the same time. Neither what the package ships nor
what the user's cache has is used. The data is constant.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

START_SECONDS = 90
BYTES = ("peak", "physical", "driver", "nvml", "workspace")
"""What is compared: our statistics' peak after warm-up, our chunks, what the driver and NVML say is in use on the card,
and the part of the first that is the workspace."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", default="inception_v3:32", metavar="NET:BATCH", help="default: %(default)s")
    parser.add_argument("--math", default="fp32", help="default: %(default)s")
    parser.add_argument("--processes", type=int, help="as many as there are GPUs, unless said")
    parser.add_argument("--steps", type=int, default=20, help="to time (default: %(default)s)")
    parser.add_argument("--time-limit", type=float, default=300, help="seconds for everything (default: %(default)s)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(train(args)))
        return
    words = words_for(args)
    rows = run_all(words, args)
    model, _, batch = args.net.partition(":")
    result = {"command": " ".join(["python", *sys.argv]), "machine": rows[0].pop("machine"), "net": model,
              "batch": int(batch), "math": args.math, "results": rows, "spread": spreads(rows)}  # fmt: skip
    for row in rows[1:]:
        del row["machine"]
    for row in rows:
        said = ", ".join(f"{name} {row[name] / 2**20:.1f} MiB" for name in BYTES if row.get(name) is not None)
        print(f"{row['device']}: {row['ms']:.2f} ms, {said}, {row['searches']} searches in {row['search_s']:.1f} s")
    print("spread: " + ", ".join(f"{name} {value:.4%}" for name, value in result["spread"].items()))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def words_for(args: argparse.Namespace) -> list[str]:
    """A device's word for each process."""
    if args.device != "cuda":
        return [args.device] * (args.processes or 2)
    from blobmem.devices.cuda.context import count

    return [f"cuda:{ordinal}" for ordinal in range(args.processes or count())]


def spreads(rows: list[dict[str, Any]]) -> dict[str, float]:
    """How much more the largest is than the smallest, of each count of bytes that all processes have."""
    found = {}
    for name in BYTES:
        values = [row.get(name) for row in rows]
        if all(values):
            found[name] = max(values) / min(values) - 1
    return found


def run_all(words: list[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """What each process found. RuntimeError if one fails, and the others are ended."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "BLOBMEM_CACHE": cache}
        command = [sys.executable, __file__, "--child", "--net", args.net, "--math", args.math]
        command += ["--steps", str(args.steps), "--time-limit", str(args.time_limit)]
        children = [
            subprocess.Popen(
                [*command, "--device", word], cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for word in words
        ]  # fmt: skip
        try:
            for child in children:
                read_line(child)
            for child in children:
                print("go", file=child.stdin, flush=True)
            return [json.loads(read_line(child)) for child in children]
        finally:
            for child in children:
                child.kill()
                child.communicate()


def read_line(child: Any) -> str:
    """The next line that a process says."""
    line = child.stdout.readline()
    if not line:
        raise RuntimeError(f"{' '.join(child.args)} ended with {child.wait()}")
    return line


# -------------------------------------------------------------------- in a GPU's process


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Some steps; ms, and bytes of several counts, those of BYTES None where the device has none."""
    from benchmarks import inputs, machine
    from benchmarks.clock import Contestant, Deadline
    from benchmarks.gpu_ours import CLASSES, device_of, search_clock, waiting
    from blobmem.devices.cuda.card import card
    from blobmem.memory.workspace import workspace
    from blobmem.ops.cuda import algorithms

    signal.alarm(int(args.time_limit) + START_SECONDS)  # ends a process that hangs, and with it all
    algorithms.SHIPPED = Path(os.environ["BLOBMEM_CACHE"]) / "none"
    deadline = Deadline(args.time_limit)
    model, _, batch = args.net.partition(":")
    device = device_of(args.device, args.math)
    print("ready", flush=True)
    sys.stdin.readline()
    with search_clock() as searched:
        solver = inputs.solver_of(inputs.with_inputs(model, int(batch)), device=device)
        inputs.fill(solver.net, CLASSES)
        contestant = Contestant(solver.step, waiting(device), several=solver.step)
        contestant.warm_up(deadline)
    device.statistics.reset_peak()
    for _ in range(args.steps):
        contestant.groups.append(contestant.take(1))
        deadline.check()
    row = {"device": args.device, "machine": machine.described(args.device, False), **contestant.result(),
           "searches": searched[1], "search_s": searched[0], **dict.fromkeys(BYTES)}  # fmt: skip
    if not device.is_host:
        row |= {"peak": device.statistics.peak_bytes, "workspace": workspace(device).gpu_capacity}
    if device.name.startswith("cuda:"):
        now = card(device)
        row |= {"physical": now.mapped, "driver": now.driver, "nvml": now.nvml}
    return row


if __name__ == "__main__":
    main()
