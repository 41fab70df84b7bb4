"""What a test net adds beside its train net on a card, under each scheme: predicted, by our statistics, by the driver.

    python benchmarks/footprint.py --out benchmarks/results/footprint.json
    python benchmarks/footprint.py --device simulated --nets lenet:64/10    # a dry run, without a driver

`blobmem footprint --measure` for each pair of nets, in a process of its own.
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

from benchmarks import machine  # noqa: E402

MIB = 2**20
NETS = (
    "caffenet:256/50,caffenet:256/250,vgg16:64/50,googlenet:32/50,resnet50:32/25,resnet50:256/25,inception_v3:256/25,"
    "resnet1001:64/64"
)


def measure(net: str, device: str, math: str) -> list[dict[str, Any]]:
    """A row for each scheme that can run, of one NET:TRAIN/TEST; bytes, None where there is no driver to ask."""
    model, _, batches = net.partition(":")
    batch, _, test_batch = batches.partition("/")
    command = [sys.executable, "-m", "blobmem", "footprint", f"models/{model}/solver.prototxt", "--train-batch", batch,
               "--test-batch", test_batch, "--measure", "--device", device, "--json", "-"]  # fmt: skip
    command += ["--math", math] if device.startswith("cuda") else []
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    rows = []
    for scheme, found in json.loads(done.stdout)["schemes"].items():
        if "measured" not in found:  # the lower bound, which nothing runs in
            continue
        before, train, test = found.get("cards", [None] * 3)
        rows.append(
            {"net": model, "batch": int(batch), "test_batch": int(test_batch), "math": math, "scheme": scheme,
             "train": found["train_bytes"], "train_measured": found["measured"][0],
             "train_mapped": train and train["mapped"] - before["mapped"],
             "extra": found["tests"][0]["extra_bytes"], "extra_measured": found["measured"][1],
             "extra_mapped": test and test["mapped"] - train["mapped"],
             "extra_driver": test and test["driver"] - train["driver"],
             "extra_nvml": test and test["nvml"] is not None and test["nvml"] - train["nvml"],
             "others": before and test["others"]}
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", default=NETS, metavar="NET:TRAIN/TEST,...", help="default: %(default)s")
    parser.add_argument("--math", default="tf32", choices=["fp32", "tf32"], help="of a GPU (default: %(default)s)")
    machine.add_options(parser)
    args = parser.parse_args()
    rows = []
    for net in args.nets.split(","):
        for row in measure(net, args.device, args.math):
            rows.append(row)
            said = ", ".join(
                f"{name} {row[f'extra_{name}'] / MIB:.1f}"
                for name in ("measured", "mapped", "driver", "nvml")
                if row[f"extra_{name}"] is not None
            )
            held = f"{row['train'] / MIB:.1f} MiB, measured {row['train_measured'] / MIB:.1f}"
            print(f"{net}, {row['scheme']}: {held}; adds {row['extra'] / MIB:.1f}; {said}", flush=True)
    machine.report(args, rows)


if __name__ == "__main__":
    main()
