"""Training step and inference on one GPU, against PyTorch in the same process, the two taking turns.

    python benchmarks/gpu.py --out benchmarks/results/gpu.json
    python benchmarks/gpu.py --nets resnet50:256 --maths tf32 --phases train --torch eager,channels_last,compile,graph
    python benchmarks/gpu.py --nets resnet50_v2:1,resnet50_v2:128 --maths float16 --phases infer --group 20
    python benchmarks/gpu.py --device cpu --batch 2 --steps 4 --nets googlenet    # a dry run

The data is constant and on the device. A training step is forward, backward and SGD with momentum and weight decay;
inference is the deploy net, with random weights. Each net has a process of its own. What fails is recorded as its
message, and the rest goes on. A file that is there keeps the rows that are not measured again.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import machine  # noqa: E402
from benchmarks.clock import Deadline, race, steps_for  # noqa: E402

NETS = "caffenet:256,vgg16:64,googlenet:32,resnet50:32,resnet50:256,inception_v3:256,resnet1001:64"
OURS = {
    "train": {"blobmem": "keep", "planned": "train"},
    "infer": {"blobmem": "keep", "planned": "inference", "uncaptured": "keep"},
}
"""Our sides in each phase, and their nets' `memory`; uncaptured is without CUDA graphs (training: `streams.py`)."""
VARIANTS = ("eager", "channels_last", "graph", "compile")
START_SECONDS = 90  # imports and contexts, before a net's process counts as stuck
KEY = ("net", "batch", "math", "phase")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", type=words, default=words(NETS), metavar="NET:BATCH,...", help=f"default: {NETS}")
    parser.add_argument(
        "--maths",
        type=words,
        default=["fp32", "tf32"],
        help="or float16, bfloat16, in which PyTorch trains by autocast; default: fp32,tf32",
    )
    parser.add_argument("--phases", type=words, default=["train", "infer"], help="default: train,infer")
    parser.add_argument(
        "--torch", type=variants, default=["eager", "channels_last", "graph"], metavar="VARIANT,...",
        help=f"{', '.join(VARIANTS)} (takes minutes), or none; default: eager,channels_last,graph",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=20, help="steps to time of each side (default: %(default)s)")
    parser.add_argument("--group", type=int, default=5, help="steps between two waits (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3, help="fewer steps where they take longer (default: 3)")
    parser.add_argument("--time-limit", type=float, default=120, help="seconds for one net, math and phase")
    parser.add_argument("--batch", type=int, help="for all nets, in place of their own")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def variants(text: str) -> list[str]:
    """What --torch names; compile stands for its two modes."""
    result = [word for word in words(text) if word != "none"]
    for word in result:
        if word not in VARIANTS:
            raise argparse.ArgumentTypeError(f"'{word}' is not one of {', '.join(VARIANTS)}, none")
    # captured and compiled steps take the eager layout that was faster, so they come after both
    ordered = [word for word in VARIANTS if word in result]
    return [name for word in ordered for name in (["compile", "compile_overhead"] if word == "compile" else [word])]


# -------------------------------------------------------------------- in a net's process


def measure_net(args: argparse.Namespace) -> None:
    """All configurations of the one net of --nets, written to --child side by side; the last line of each counts."""
    (net,) = args.nets
    model, _, batch = net.partition(":")
    write(args.child, {"machine": machine.described(args.device, bool(args.torch))})
    for math in args.maths:
        for phase in args.phases:
            row: dict[str, Any] = {"net": model, "batch": args.batch or int(batch or 32), "math": math, "phase": phase}
            row |= {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
            for sides in measure(row, args):
                write(args.child, {**row, "sides": sides})


def measure(row: dict[str, Any], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The result, or the error, of each side of a configuration, so far: a process may be ended meanwhile."""
    from benchmarks.gpu_ours import Ours

    deadline = Deadline(args.time_limit)
    common = (row["net"], row["batch"], row["phase"], row["math"], args.device, deadline)
    sides: dict[str, Any] = {}
    ours: dict[str, Ours] = {}
    for name, memory in OURS[row["phase"]].items():
        with attempt(sides, name):
            ours[name] = Ours(*common, memory, captured=name != "uncaptured")
        yield sides
    for variant in args.torch:
        with attempt(sides, variant):
            sides[variant] = against(variant, better_layout(sides, row["math"]), [*ours.values()], common, args)
        yield sides
    if ours and not any(each.contestant.groups for each in ours.values()):  # no PyTorch, or it failed
        with attempt(sides, "blobmem"):
            race([(each.contestant, steps_of(each, args)) for each in ours.values()], args.group, deadline)
    for name, each in ours.items():
        with attempt(sides, name):
            sides[name] = each.finish()
        each.close()
    yield sides


def against(variant: str, layout: str, ours: list[Any], common: Any, args: argparse.Namespace) -> dict[str, Any]:
    """The result of PyTorch in one of its ways, taking turns with ours, whose steps are spread over all of these."""
    from benchmarks.gpu_torch import Theirs, release

    theirs: Theirs | None = None
    try:
        theirs = Theirs(variant, layout, *common)
        contestants = [(theirs.contestant, steps_of(theirs, args))]
        contestants += [(each.contestant, -(-steps_of(each, args) // len(args.torch))) for each in ours]
        race(contestants, args.group, common[-1])
        return theirs.finish()
    finally:
        if theirs is not None:
            theirs.close()
        release(args.device.startswith("cuda"))


@contextlib.contextmanager
def attempt(sides: dict[str, Any], name: str) -> Iterator[None]:
    """Record an exception as that side's error."""
    try:
        yield
    except Exception as error:  # any library's
        sides[name] = {"error": f"{type(error).__name__}: {error}"[:2000]}
        error.__traceback__ = None  # its frames hold memory


def steps_of(side: Any, args: argparse.Namespace) -> int:
    return steps_for(side.step_ms, args.steps, args.seconds)


def better_layout(sides: dict[str, Any], math: str) -> str:
    """The layout in which eager PyTorch was faster; where it was not timed, what is known to be."""
    timed = {name: sides[name]["ms"] for name in ("eager", "channels_last") if "ms" in sides.get(name, {})}
    if len(timed) < 2:
        return "NCHW" if math == "fp32" else "channels_last"
    return "NCHW" if timed["eager"] <= timed["channels_last"] else "channels_last"


def write(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


# -------------------------------------------------------------------- in the process that starts the others


def run_child(net: str, args: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The machine, and a row for each configuration of a net; what its process did not get to has an error."""
    limit = START_SECONDS + args.time_limit * len(args.maths) * len(args.phases)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        command = [sys.executable, *(word for word in sys.argv), "--nets", net, "--child", str(path)]
        failure = "the process ended"
        try:
            done = subprocess.run(command, cwd=ROOT, timeout=limit, stderr=subprocess.PIPE, text=True)
            if done.returncode:
                failure += f" with {done.returncode}: {done.stderr[-1500:]}"
        except subprocess.TimeoutExpired:
            failure = f"the process was ended after {limit:.0f} s"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    found: dict[str, Any] = next((line["machine"] for line in lines if "machine" in line), {})
    rows = merged([], [line for line in lines if "machine" not in line])
    model, _, batch = net.partition(":")
    for math in args.maths:
        for phase in args.phases:
            row = {"net": model, "batch": args.batch or int(batch or 32), "math": math, "phase": phase}
            if not any(all(other[key] == row[key] for key in KEY) for other in rows):
                rows.append({**row, "sides": {}})
    for row in rows:
        for name in (*OURS[row["phase"]], *args.torch):
            row["sides"].setdefault(name, {"error": failure})
    return found, rows


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]], keys: Sequence[str] = KEY) -> list[dict[str, Any]]:
    """The old rows in their order, with new ones in their places, then those that are only new."""
    return list({tuple(row[key] for key in keys): row for row in (*old, *new)}.values())


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    cells = []
    for name, side in row["sides"].items():
        if "error" in side:
            cells.append(f"{name} failed: {side['error'].splitlines()[0][:100] if side['error'] else ''}")
        else:
            memory = f", {side['peak_mib']:.0f} MiB" if "peak_mib" in side else ""
            cells.append(f"{name} {side['ms']:.2f} (host {side['host_ms']:.2f}){memory}")
    return f"{row['net']} {row['batch']} {row['phase']} {row['math']}: " + "; ".join(cells)


def main(report: Callable[[str], Any] = print) -> None:
    args = arguments()
    if args.child:
        measure_net(args)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which ends the net's process too
    command = " ".join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]])
    there = args.out is not None and args.out.exists()
    result: dict[str, Any] = json.loads(args.out.read_text()) if there else {"results": []}
    for net in args.nets:
        found, rows = run_child(net, args)
        for row in rows:
            report(line(row))
            row["command"] = command
        result["machine"] = found or result.get("machine", {})
        result["results"] = merged(result["results"], rows)
        if args.out:  # after each net: a run may be cut off
            args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
