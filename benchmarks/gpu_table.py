"""The GPU's part of docs/benchmarks.md, from what the benchmarks on one have written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

NAMES = {"caffenet": "CaffeNet", "vgg16": "VGG-16", "googlenet": "GoogLeNet", "resnet50": "ResNet-50",
         "resnet50_v2": "ResNet-50 v2", "resnet1001": "ResNet-1001", "inception_v3": "Inception-v3",
         "densenet264": "DenseNet-264", "vnet": "V-Net", "lstm_lm": "LSTM-LM", "lenet": "LeNet"}  # fmt: skip
PHASES = {"train": "Training step", "infer": "Inference"}
_OWN = {"train": "`Solver.step`", "infer": "no graph"}  # a column that the other phase does not have
EAGER = ("eager", "channels_last")
COMPILED = ("compile", "compile_overhead")

BESIDE = """Rows with `beside` in the JSON were measured while processes of others
prepared theirs, which used the GPU in turns."""
GPU = f"""
## One GPU, beside PyTorch

{{commands}}

On {{machine}}. Both sides run in one process and take turns in groups of steps; medians, in ms. PyTorch runs the same
net, made layer by layer from the prototxt, with `cudnn.benchmark` and its fused SGD: eager in NCHW and channels last,
compiled (the better of its modes `default` and `reduce-overhead`), and with the whole step captured as a CUDA graph.
Ratios are blobmem's figure over that of eager PyTorch in its better layout; the target is 1 at most. Host is the time
in which the host has queued one of our steps; `Solver.step` also reads the loss of each, and no graph is our inference
as calls that the host launches one by one. Memory is the peak after
warm-up, without the search for algorithms: ours by our statistics, rounded to the driver's chunks in brackets,
PyTorch's by its allocator. {BESIDE}
What has a `date` of its own there was measured beside ours in another run than the rest of its row.
"""
PLANNED = {
    phase: f"""
With `memory="{memory}"`, arrays take turns in an arena. MiB: what the net that keeps all holds, what this one holds
(in brackets the driver's chunks), the smallest peak of eager PyTorch, in either layout and with `cudnn.benchmark` on or
off, and the compiled one's (mode `default`). Milliseconds are whole calls of `{call}`, over those above, and over eager
PyTorch's better layout.

| net, batch | math | all kept | planned | PyTorch | ratio | compiled | planned, ms | / all kept | / PyTorch |
| --- | --- |{" ---: |" * 8}
"""
    for phase, memory, call in (("train", "train", "Solver.step"), ("infer", "inference", "Net.run_forward"))
}
LINK = """
## Blobs over the link

`{command}`

on {machine}. GB/s of plain copies of page-locked memory, and of the accesses to blobs that cause such copies, taking
turns; medians.

| MiB | direction | plain | blobmem | ratio |
| ---: | --- | ---: | ---: | ---: |
"""
FEEDING = """
## Steps fed from LMDB

`{command}`

on {machine}. The same training step on constant data and on records that prefetch threads read, taking turns; ms.

| net, batch | math | constant | fed | ratio |
| --- | --- | ---: | ---: | ---: |
"""
SHARING = """
## Sharing blobs between train and test net

`{command}`

on {machine}. Two solvers, one whose test net shares blobs with its train net and one whose does not, take turns in
groups of steps: `Solver.step`, `Solver.test` (one pass), and each step followed by a test; medians, in ms.

| net, train / test batch | math | what | separate | shared | ratio |
| --- | --- | --- | ---: | ---: | ---: |
"""
FOOTPRINT = """
## The test net beside its train net

`{command}`

on {machine}. What a train net holds on the card, as predicted, after an iteration by our statistics and in the driver's
chunks, and what the test net adds, in MiB: as predicted, after its first iteration by our statistics, by the chunks, by
what the driver and NVML say is in use. The scheme `weights` is Caffe's, `blobs` and `planned` ours; not ours is what
CUDA's context and libraries hold beside.

| net, train / test batch | scheme | {heads} |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
"""
MNIST = """
## LeNet on all of MNIST

`{command}`

on {machine}. Trained on 60,000 images from LMDB by Caffe's schedule, tested on 10,000.

| seed | math | iterations | seconds | accuracy |
| ---: | --- | ---: | ---: | ---: |
"""
MANY = """
## Many GPUs at once

`{command}`

on {machine}. {name} trained on each GPU by a process of its own, all started together with one empty cache of
algorithms, so that they search at the same time. MiB in use after warm-up: the most by our statistics, the same in the
driver's chunks, on the card as the driver and NVML say, and the workspace; the spread is how much more the largest is
than the smallest.

| GPU | searches | ms | {heads} |
| --- | ---: | ---: |{bars}
"""
FOOTPRINTS = {"train": "train net", "train_measured": "measured", "train_mapped": "in chunks", "extra": "test net adds",
              "extra_measured": "measured", "extra_mapped": "in chunks", "extra_driver": "driver", "extra_nvml": "NVML",
              "others": "not ours"}  # fmt: skip
FIGURES = {"step": "step", "test": "test", "both": "step and test"}
HEADS = {"peak": "ours", "physical": "in chunks", "driver": "driver", "nvml": "NVML", "workspace": "workspace"}


STREAMS = """
## Two streams for backward

`{command}`

on {machine}. `Solver.step` with `backward_streams` 1 and 2, in CUDA graphs and without, all taking turns in groups of
steps; medians, in ms. The ratio is that of captured steps, two streams over one. Held is what the train net has on the
card by our statistics, in MiB, and its ratio.

| net, batch | math | eager 1 | eager 2 | captured 1 | captured 2 | ratio | held 1 | held 2 | ratio |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
"""

ALLOCATORS = """
## Allocators

`{command}`

on {machine}. Where a GPU's memory comes from (`--allocator`): microseconds of an allocation with its release, and of
growth from 64 to 128 MiB with contents; after 1500 allocations at random of 4 KiB to 64 MiB, and releases, what the
driver says is taken over what is held, and MiB that stay taken once all are released; then steps, in ms, with what the
net holds and what the driver says it took, in MiB. RMM's resource is a pool that begins with 256 MiB.

| allocator | 1 KiB | 1 MiB | 64 MiB | growth | taken / held | kept |{heads}
| --- |{bars}
"""

HALVES = """
## Half precision beside float32

`{command}`

on {machine}. LeNet and a small residual net on MNIST: the mean loss of the last 100 iterations, over float32's (the
target is within 2%), and the accuracy on the 10,000 test images, with how many points it is above float32's. The
residual net is in the middle of its training: its accuracies vary by ten points with the seed.

| net | iterations | seed | dtype | loss | ratio | accuracy | points |
| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: |
"""


def sections(results: Path) -> str:
    """One section for each file that is there."""
    parts: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
        ("gpu.json", gpu), ("link.json", link), ("feeding.json", feeding),
        ("sharing.json", sharing), ("streams.json", streams), ("footprint.json", footprint), ("mnist.json", mnist),
        ("half.json", halves), ("allocators.json", allocators), ("many_gpus.json", many_gpus),
    )  # fmt: skip
    return "".join(make(json.loads((results / name).read_text())) for name, make in parts if (results / name).exists())


def gpu(report: dict[str, Any]) -> str:
    """A table for each phase, then the errors."""
    rows = report["results"]
    commands = "\n".join(f"- `{command}`" for command in dict.fromkeys(row["command"] for row in rows))
    parts = [GPU.format(commands=commands, machine=machine_of(report))]
    for phase, title in PHASES.items():
        mine = [row for row in rows if row["phase"] == phase]
        if mine:
            parts.append(f"\n### {title}\n\n{_head(phase)}" + "".join(f"{_row(row)}\n" for row in mine))
        planned = [row for row in mine if "ms" in row["sides"].get("planned", {})]
        if planned:
            parts.append(PLANNED[phase] + "".join(f"{_planned_row(row)}\n" for row in planned))
    failed = [
        f"- {name_of(row)}, {PHASES[row['phase']].lower()}, {row['math']}, {side}: {_first_line(result['error'])}\n"
        for row in rows
        for side, result in row["sides"].items()
        if result.get("error")
    ]
    return "".join(parts) + ("\nNot measured:\n\n" + "".join(failed) if failed else "")


def _head(phase: str) -> str:
    columns = [
        "blobmem", _OWN[phase], "host", "NCHW", "channels last", "ratio", "compiled", "graph", "blobmem, MiB",
        "PyTorch, MiB", "ratio",
    ]  # fmt: skip
    return f"| net, batch | math | {' | '.join(columns)} |\n| --- | --- |{' ---: |' * len(columns)}\n"


def _row(row: dict[str, Any]) -> str:
    sides = {name: side for name, side in row["sides"].items() if "ms" in side}
    ours, eager, compiled = sides.get("blobmem", {}), _best(sides, EAGER), _best(sides, COMPILED)
    held = number(ours.get("peak_mib"), 0)
    if "physical_mib" in ours:
        held += f" ({number(ours['physical_mib'], 0)})"
    cells = [
        name_of(row), row["math"], number(ours.get("ms")),
        number(ours.get("solver_ms") if row["phase"] == "train" else sides.get("uncaptured", {}).get("ms")),
        number(ours.get("host_ms")),
        *(number(sides.get(name, {}).get("ms")) for name in EAGER), ratio(ours.get("ms"), eager.get("ms")),
        number(compiled.get("ms")), number(sides.get("graph", {}).get("ms")), held,
        number(eager.get("peak_mib"), 0), ratio(ours.get("peak_mib"), eager.get("peak_mib")),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _planned_row(row: dict[str, Any]) -> str:
    sides = {name: side for name, side in row["sides"].items() if "ms" in side}
    ours, keep, eager = sides["planned"], sides.get("blobmem", {}), _best(sides, EAGER)
    # what a captured step holds is no longer among what PyTorch's allocator counts
    theirs, compiled = _least(sides, EAGER), _least(sides, COMPILED[:1])
    held = ours.get("peak_mib")
    cells = [
        name_of(row), row["math"], number(keep.get("peak_mib"), 0),
        f"{number(held, 0)} ({number(ours.get('physical_mib'), 0)})", number(theirs, 0), ratio(held, theirs),
        number(compiled, 0), number(ours["ms"]), ratio(ours["ms"], keep.get("ms")),
        ratio(ours["ms"], eager.get("ms")),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _least(sides: dict[str, Any], names: Iterable[str]) -> float | None:
    """The smallest peak in MiB of these sides, in whatever way; None if none was measured."""
    found = (sides[name].get(key) for name in names if name in sides for key in ("peak_mib", "unsearched_mib"))
    return min((mib for mib in found if mib is not None), default=None)


def _best(sides: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The fastest of these sides; empty if none was measured."""
    return min((sides[name] for name in names if name in sides), key=lambda side: side["ms"], default={})


def _first_line(text: str) -> str:
    return text.splitlines()[0][:200]


def name_of(row: dict[str, Any]) -> str:
    """The net and its batch."""
    return f"{NAMES.get(row['net'], row['net'])}, {row['batch']}"


def number(value: float | None, digits: int = 2) -> str:
    """A figure; a dash if there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def ratio(ours: float | None, theirs: float | None) -> str:
    """Of two figures; a dash if one of them is not there."""
    return f"{ours / theirs:.2f}" if ours and theirs else "-"


def machine_of(report: dict[str, Any]) -> str:
    """What a report says of its machine."""
    return ", ".join(f"{key} {value}" for key, value in report["machine"].items())


def link(report: dict[str, Any]) -> str:
    """Bandwidths, and the growth."""
    rows = "".join(
        f"| {row['mib']:.0f} | {row['direction']} | {row['plain_gbs']:.1f} | {row['blobmem_gbs']:.1f} "
        f"| {row['ratio']:.3f}{'' if row['pinned'] else ', not page-locked'} |\n"
        for row in report["results"]
    )
    grown = report["growth"]
    place = "in place, with its contents" if grown["in_place"] and grown["kept"] else "by moving or losing its contents"
    said = f"\nA memory of {grown['mib']:.0f} MiB grows by as much again in {grown['ms']:.3f} ms, {place}.\n"
    return LINK.format(command=report["command"], machine=machine_of(report)) + rows + said


def feeding(report: dict[str, Any]) -> str:
    """Steps on constant data and on records."""
    return FEEDING.format(command=report["command"], machine=machine_of(report)) + "".join(
        f"| {name_of(row)} | {row['math']} | {row['constant']['ms']:.3f} | {row['fed']['ms']:.3f} "
        f"| {row['ratio']:.3f} |\n"
        for row in report["results"]
    )


def sharing(report: dict[str, Any]) -> str:
    """Steps and tests of nets that share blobs and of nets that do not."""
    return SHARING.format(command=report["command"], machine=machine_of(report)) + "".join(
        f"| {name_of(row)} / {row['test_batch']} | {row['math']} | {title} | {row['separate'][figure]['ms']:.3f} "
        f"| {row['shared'][figure]['ms']:.3f} | {row['ratios'][figure]:.4f} |\n"
        for row in report["results"]
        for figure, title in FIGURES.items()
    )


def streams(report: dict[str, Any]) -> str:
    """Steps on one stream and on two."""
    return STREAMS.format(command=report["command"], machine=machine_of(report)) + "".join(
        f"| {name_of(row)} | {row['math']} | "
        + " | ".join(f"{side['ms']:.3f}" for side in row["sides"].values())
        + f" | {row['ratios']['captured']:.3f} | {row['sides']['captured 1']['held_mib']:.1f} "
        f"| {row['sides']['captured 2']['held_mib']:.1f} | {row['ratios']['held']:.4f} |\n"
        for row in report["results"]
    )


def footprint(report: dict[str, Any]) -> str:
    """What a test net adds, by several counts."""
    heads = " | ".join(FOOTPRINTS.values())
    return FOOTPRINT.format(command=report["command"], machine=machine_of(report), heads=heads) + "".join(
        f"| {name_of(row)} / {row['test_batch']} | {row['scheme']} | "
        + " | ".join("-" if row.get(key) is None else f"{row[key] / 2**20:.1f}" for key in FOOTPRINTS)
        + " |\n"
        for row in report["results"]
    )


def mnist(report: dict[str, Any]) -> str:
    """Accuracies."""
    return MNIST.format(command=report["command"], machine=machine_of(report)) + "".join(
        f"| {row['seed']} | {row['math']} | {row['iterations']} | {row['train_s']:.1f} | {row['accuracy']:.2%} |\n"
        for row in report["results"]
    )


def halves(report: dict[str, Any]) -> str:
    """Losses and accuracies of nets of each dtype."""
    return HALVES.format(command=report["command"], machine=machine_of(report)) + "".join(
        f"| {row['net']} | {row['steps']} | {row['seed']} | {row['dtype']} | {row['last_loss']:.4f} "
        f"| {row['loss_ratio']:.4f} | {row['accuracy']:.2%} | {row['accuracy_points']:+.2f} |\n"
        for row in report["results"]
    )


def allocators(report: dict[str, Any]) -> str:
    """A row for each allocator, then those that were not there."""
    rows = [row for row in report["results"] if "error" not in row]
    nets = dict.fromkeys(net for row in rows for net in row["nets"])
    heads = "".join(
        f" {name_of(dict(zip(('net', 'batch'), net.split(':'), strict=True)))}: ms | held | taken |" for net in nets
    )
    head = ALLOCATORS.format(
        command=report["command"], machine=machine_of(report), heads=heads, bars=" ---: |" * (6 + 3 * len(nets))
    )
    table = ""
    for row in rows:
        churn, found = row["churn"], [row["nets"][net] for net in nets]
        cells = [f"{us:.1f}" for us in row["us"].values()]
        cells += [f"{churn['driver_mib'] / churn['held_mib']:.2f}", f"{churn['kept_mib']:.0f}"]
        for net in found:
            cells += [f"{net['ms']:.3f}", f"{net['held_mib']:.1f}", f"{net['driver_mib']:.1f}"]
        table += f"| {row['allocator']} | {' | '.join(cells)} |\n"
    failed = [f"- {row['allocator']}: {row['error']}\n" for row in report["results"] if "error" in row]
    return head + table + ("\nNot measured:\n\n" + "".join(failed) if failed else "")


def many_gpus(report: dict[str, Any]) -> str:
    """What each GPU's process held, and the spread."""
    head = MANY.format(
        command=report["command"], machine=machine_of(report), name=f"{name_of(report)}, {report['math']},",
        heads=" | ".join(HEADS.values()), bars=" ---: |" * len(HEADS),
    )  # fmt: skip
    mib = [[None if row[key] is None else row[key] / 2**20 for key in HEADS] for row in report["results"]]
    rows = [
        f"| {row['device']} | {row['searches']} | {row['ms']:.2f} | {' | '.join(map(number, values))} |\n"
        for row, values in zip(report["results"], mib, strict=True)
    ]
    spread = [f"{report['spread'][key]:.3%}" if key in report["spread"] else "-" for key in HEADS]
    return head + "".join(rows) + f"| spread | | | {' | '.join(spread)} |\n"
