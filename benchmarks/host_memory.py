"""Peak resident memory of training and inference on the host, against PyTorch's CPU build.

    python benchmarks/host_memory.py --out benchmarks/results/host_memory.json
    python benchmarks/host_memory.py --nets resnet50:16 --phases train

Needs PyTorch beside blobmem. Each figure is of a process of its own, which imports a library, makes the net on constant
data and takes a few steps (forward, backward and SGD with momentum; or the deploy net's forward); the second counts.
A file that is there keeps the rows that are not measured again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import clock  # noqa: E402
from benchmarks.gpu import OURS, merged, words  # noqa: E402
from benchmarks.host import machine, peak_mib  # noqa: E402

NETS = "caffenet:256,vgg16:64,googlenet:32,resnet50:32,inception_v3:16,resnet1001:16"
THEIRS = ("eager", "channels_last")
LIMIT = 3600  # seconds for a process


def measure(side: str, model: str, batch: int, phase: str) -> dict[str, float]:
    """The peak in MiB of this process, once it has taken its steps, and what it was after the imports."""
    clock.WARM_UPS = 1
    common = (model, batch, phase, "fp32", "cpu", clock.Deadline(LIMIT))
    if side in THEIRS:
        from benchmarks.gpu_torch import Theirs

        imported = peak_mib()
        Theirs(side, "NCHW", *common)
    else:
        from benchmarks.gpu_ours import Ours

        imported = peak_mib()
        Ours(*common, OURS[phase][side])
    return {"peak_mib": peak_mib(), "imported_mib": imported}


def child(*words: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", *words]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT, timeout=LIMIT)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", type=words, default=words(NETS), metavar="NET:BATCH,...", help=f"default: {NETS}")
    parser.add_argument("--phases", type=words, default=[*OURS], help="default: train,infer")
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        side, model, batch, phase = args.child
        print(json.dumps(measure(side, model, int(batch), phase)))
        return
    there = args.out is not None and args.out.exists()
    report: dict[str, Any] = json.loads(args.out.read_text()) if there else {"results": []}
    report = {"command": " ".join(["python", *sys.argv])} | report | {"machine": machine()}
    for net in args.nets:
        model, _, batch = net.partition(":")
        for phase in args.phases:
            # the first process of a side may compile, which takes memory of its own
            tries = [
                (side, child(side, model, batch, phase)) for side in ("blobmem", "planned", *THEIRS) for _ in range(2)
            ]
            sides = dict(tries[1::2])
            row = {"net": model, "batch": int(batch), "phase": phase, "sides": sides}
            report["results"] = merged(report["results"], [row], ("net", "batch", "phase"))
            said = ", ".join(f"{side} {found['peak_mib']:.0f}" for side, found in sides.items())
            print(f"{model} {batch} {phase}, MiB: {said}", flush=True)
            if args.out:  # after each: they take minutes
                args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
