"""docs/benchmarks.md, from the results: `python benchmarks/table.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import gpu_table, oversub_table  # noqa: E402

CAFFE = {("lenet", "forward"): 10.3, ("lenet", "both"): 19.2, ("caffenet", "forward"): 541, ("caffenet", "both"): 1307,
         ("memory", "peak_mib"): 1539}  # fmt: skip
FIGURES = {"forward": "forward, ms", "both": "forward + backward, ms", "peak_mib": "peak resident memory, MiB"}
HEAD = """# Benchmarks

Made by `python benchmarks/table.py` from `benchmarks/results/`; do not edit.

## The host, beside PyTorch's CPU build

`{command}`

on {machine}. Processes of the two sides alternate; the fastest of each counts (two-thread runs on shared machines come
in two speeds), the ratio of medians is beside it. CaffeNet memory: a train net (batch 64) and a test net
(batch 50) in one process, two steps with SGD and a test pass. Caffe's column was recorded on another machine
with two cores (the C++ program with OpenBLAS) and is for orientation.

| net, batch | figure | blobmem | PyTorch | ratio | ratio of medians | Caffe |
| --- | --- | ---: | ---: | ---: | ---: | ---: |
"""
HOST_MEMORY = """
## Resident memory on the host

`{command}`

on {machine}. Peak resident memory of whole processes, interpreter and libraries included, MiB: all blobs kept, planned
(`memory="train"`, `memory="inference"`), and eager PyTorch in its better layout.

| net, batch | what | all kept | planned | PyTorch | ratio |
| --- | --- | ---: | ---: | ---: | ---: |
"""


def row(result: dict[str, Any]) -> str:
    what, figure = result["what"], result["figure"]
    name = {"memory": "CaffeNet", "lenet": "LeNet", "caffenet": "CaffeNet"}[what]
    ours, torch = result["ours"]["best"], result["torch"]["best"]
    return (
        f"| {name}, {result['batch']} | {FIGURES[figure]} | {ours:.1f} | {torch:.1f} | {result['ratio_best']:.2f} "
        f"| {result['ratio_median']:.2f} | {CAFFE[what, figure]} |"
    )


def page() -> str:
    """The text of docs/benchmarks.md."""
    results = ROOT / "benchmarks" / "results"
    report = json.loads((results / "host.json").read_text())
    machine = ", ".join(f"{key} {value}" for key, value in report["machine"].items())
    host = HEAD.format(command=report["command"], machine=machine) + "\n".join(map(row, report["results"])) + "\n"
    memory = results / "host_memory.json"
    less = oversubscription()
    return (
        host
        + (host_memory(json.loads(memory.read_text())) if memory.exists() else "")
        + gpu_table.sections(results)
        + (oversub_table.section(less) if less else "")
    )


def oversubscription() -> dict[str, Any]:
    """What was measured of nets with less memory than they need; nothing if that has not been."""
    path = ROOT / "benchmarks" / "results" / "oversubscription.json"
    return json.loads(path.read_text()) if path.exists() else {}  # type: ignore[no-any-return]


def pictures() -> dict[str, str]:
    """By path in docs/, the pictures that the page shows."""
    curves = oversubscription().get("curves")
    return {oversub_table.PICTURE: oversub_table.picture(curves)} if curves else {}


def host_memory(report: dict[str, Any]) -> str:
    """A row for each net and phase."""
    rows = ""
    for result in report["results"]:
        of = {name: side["peak_mib"] for name, side in result["sides"].items()}
        keep, planned = of.pop("blobmem", None), of.pop("planned")
        theirs = min(of.values())
        rows += (
            f"| {gpu_table.NAMES[result['net']]}, {result['batch']} | {gpu_table.PHASES[result['phase']].lower()} "
            f"| {'-' if keep is None else f'{keep:.0f}'} | {planned:.0f} | {theirs:.0f} | {planned / theirs:.2f} |\n"
        )
    machine = ", ".join(f"{key} {value}" for key, value in report["machine"].items())
    return HOST_MEMORY.format(command=report["command"], machine=machine) + rows


if __name__ == "__main__":
    for name, text in {"benchmarks.md": page(), **pictures()}.items():
        (ROOT / "docs" / name).write_text(text)
