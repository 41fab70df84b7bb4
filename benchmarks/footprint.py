"""What a test net adds beside its train net on a card, under each scheme: predicted, by our statistics, by the driver.

    python benchmarks/footprint.py --out benchmarks/results/footprint.json
    python benchmarks/footprint.py --device simulated --net lenet:64 --tests 10    # a dry run, without a driver

`blobmem footprint --measure` for each test batch, in a process of its own.
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


def measure(net: str, test_batch: int, device: str) -> list[dict[str, Any]]:
    """A row for each scheme that can run; bytes, None where there is no driver to ask."""
    model, _, batch = net.partition(":")
    command = [sys.executable, "-m", "blobmem", "footprint", f"models/{model}/solver.prototxt", "--train-batch", batch,
               "--test-batch", str(test_batch), "--measure", "--device", device, "--json", "-"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    rows = []
    for scheme, found in json.loads(done.stdout)["schemes"].items():
        if "measured" not in found:  # the lower bound, which nothing runs in
            continue
        before, train, test = found.get("cards", [None] * 3)
        rows.append(
            {"net": model, "batch": int(batch), "test_batch": test_batch, "scheme": scheme,
             "train": found["train_bytes"], "train_measured": found["measured"][0],
             "extra": found["tests"][0]["extra_bytes"], "extra_measured": found["measured"][1],
             "extra_mapped": test and test["mapped"] - train["mapped"],
             "extra_driver": test and test["driver"] - train["driver"],
             "extra_nvml": test and test["nvml"] is not None and test["nvml"] - train["nvml"],
             "others": before and test["others"]}
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", default="caffenet:256", metavar="NET:BATCH", help="default: %(default)s")
    parser.add_argument("--tests", default="50,250", help="batches of the test net (default: %(default)s)")
    machine.add_options(parser)
    args = parser.parse_args()
    rows = []
    for test_batch in map(int, args.tests.split(",")):
        for row in measure(args.net, test_batch, args.device):
            rows.append(row)
            said = ", ".join(
                f"{name} {row[f'extra_{name}'] / MIB:.1f}"
                for name in ("measured", "mapped", "driver", "nvml")
                if row[f"extra_{name}"] is not None
            )
            print(f"test batch {test_batch}, {row['scheme']}: adds {row['extra'] / MIB:.1f} MiB; {said}", flush=True)
    machine.report(args, rows)


if __name__ == "__main__":
    main()
