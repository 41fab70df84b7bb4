"""`blobmem footprint`: the bytes that a train net and its test nets hold, and what sharing saves."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blobmem.cli import options
from blobmem.version import __version__

if TYPE_CHECKING:
    from blobmem.cli.output import Output, Row
    from blobmem.devices import Device
    from blobmem.footprint import Held, Scheme

DESCRIPTION = """\
Shows what the train net of a net or solver file holds on a device and what each test net adds, by purpose, in MiB,
under four schemes: every net by itself, parameters shared, blobs shared by name, arrays that take turns in one arena;
and the least that the last could come to. It needs no data, and a GPU only to measure there.
"""

EXAMPLE = """\
examples:
  blobmem footprint models/caffenet/solver.prototxt
  blobmem footprint models/caffenet/solver.prototxt --test-batch 50 250
  blobmem footprint models/resnet50/solver.prototxt --measure
  blobmem footprint models/lenet/solver.prototxt --device cuda --math tf32
  blobmem footprint models/lenet/train_val.prototxt --json footprint.json
  blobmem footprint models/resnet50/solver.prototxt --html plan.html
  blobmem footprint models/resnet50/solver.prototxt --device cuda \\
      --device-memory 1GiB --html plan.html

A solver file counts the solver's state too; a net file has no solver.
Sizes are in MiB (2^20 bytes) after one training and one test iteration; JSON has bytes.
The page needs bokeh to be written (pip install 'blobmem[plot]'), and no network to be looked at.
"""

LEGEND = {
    "separate": "every net by itself",
    "weights": "parameters shared, as in Caffe",
    "blobs": "parameters and every eligible blob shared by name, as `blobmem train --memory keep` does",
    "planned": "arrays take turns in one arena, as `blobmem train` has it: what is in use there at its fullest moment; "
    "gaps: what is not",
    "lower bound": "what has to stay, and the most that is in use at one moment",
}

HEADS = {"solver state": "solver\nstate", "workspace": "work-\nspace", "input buffers": "input\nbuffers"}


def add(commands: Any) -> None:
    """Declare the command."""
    parser = options.new(
        commands, "footprint", run, "show what sharing saves, before anything runs", DESCRIPTION, EXAMPLE
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="a solver or net file (prototxt)")
    parser.add_argument(
        "--train-batch", type=options.positive, metavar="N", help="items in a training batch, instead of the file's"
    )
    parser.add_argument(
        "--test-batch",
        type=options.positive,
        nargs="+",
        action="extend",
        default=[],
        metavar="N",
        help="items in a test batch, instead of the file's; several make as many test nets",
    )
    options.add_input_shape(parser)
    parser.add_argument(
        "--measure",
        action="store_true",
        help="also run one training and one test iteration per scheme, and fail if a byte differs; a simulated device "
        "counts but does no arithmetic, of a GPU what its driver and NVML say is shown beside",
    )
    parser.add_argument(
        "--device",
        dest="measured_on",
        type=options.simulated_or_cuda,
        default="simulated",
        metavar="DEVICE",
        help="whose workspaces count: simulated (the default), or cuda or cuda:N, a GPU; where there is none, those "
        "that the algorithms chosen for an H200 take",
    )
    parser.add_argument(
        "--device-memory",
        type=options.nbytes,
        metavar="BYTES",
        help="most bytes to hold there, as in 8GiB, which planned nets keep to by evicting arrays; with --measure all "
        "schemes have to",
    )
    options.add_math(parser)
    options.add_dtype(parser)
    options.add_streams(parser)
    parser.add_argument(
        "--json", metavar="FILE", help="write bytes as JSON; - writes that and nothing else to the output"
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write a page that shows which array lies where in the plan's arena, and when",
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the same as a trace for ui.perfetto.dev")


def run(args: argparse.Namespace, output: Output) -> int:
    """Compute the footprints, print them, compare them with what was measured."""
    from blobmem.cli.nets import check_input_shapes
    from blobmem.footprint import footprint
    from blobmem.net.builder import specs_of

    if args.input_shape:
        check_input_shapes(args.model, specs_of(args.model), dict(args.input_shape))
    schemes = footprint(
        args.model,
        train_batch=args.train_batch,
        test_batches=args.test_batch,
        input_shapes=dict(args.input_shape),
        measured=args.measure,
        dtype=args.dtype,
        make_device=_device_maker(args),
        backward_streams=args.backward_streams,
    )
    if args.json:
        write_json(args.json, _json(args.model, schemes))
    if args.json != "-":
        _show(args.model, schemes, output)
    if (args.html or args.trace) and not _draw(args, output):
        return 1
    wrong = _differences(schemes)
    if wrong:
        output.error("prediction and measurement differ: " + "; ".join(wrong))
    return 1 if wrong else 0


def _draw(args: argparse.Namespace, output: Output) -> bool:
    """Write the plan's page and trace; whether that could be done."""
    from blobmem.timeline import timelines, write_page, write_trace

    found = timelines(
        args.model,
        train_batch=args.train_batch,
        test_batches=args.test_batch,
        input_shapes=dict(args.input_shape),
        dtype=args.dtype,
        make_device=_device_maker(args),
        backward_streams=args.backward_streams,
    )
    if args.trace:
        write_trace(found["planned"], args.trace)
    if args.html:
        try:
            write_page(found, args.html, f"The plan of {args.model}")
        except ImportError as error:
            output.error(str(error))
            return False
    return True


def _device_maker(args: argparse.Namespace) -> Callable[[], Device] | None:
    """What makes the device, or one that predicts for it. DeviceError without a GPU to be measured."""
    from blobmem import devices

    chosen = {"math": args.math or "", "deterministic": args.deterministic}
    limit = args.device_memory
    if args.measured_on == "simulated":
        devices.get("simulated", **chosen)  # which has neither
        return partial(devices.SimulatedDevice, limit, compute=False) if limit else None
    from blobmem.devices.cuda import context
    from blobmem.devices.cuda.device import CudaDevice
    from blobmem.devices.cuda.predicted import PredictedCuda
    from blobmem.errors import DeviceError

    chosen = {name: value for name, value in (chosen | {"limit": limit}).items() if value}
    try:
        context.count()
    except DeviceError:
        if args.measure:
            raise
        return partial(PredictedCuda, **chosen)
    return partial(CudaDevice, int(args.measured_on.partition(":")[2] or 0), **chosen)


def write_json(target: str, values: Any) -> None:
    """Write plain values to a file, or to standard output for "-"."""
    text = json.dumps(values, indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text, "utf-8")


def _json(model: Path, schemes: Mapping[str, Scheme]) -> dict[str, Any]:
    from blobmem.footprint import over_bound, reduction, to_json

    tests = range(len(schemes["blobs"].tests))
    return {
        "model": str(model),
        "version": __version__,
        **to_json(schemes),
        "reductions": [reduction(schemes, index) for index in tests],
        "planned_over_bound": over_bound(schemes),
    }


def _show(model: Path, schemes: Mapping[str, Scheme], output: Output) -> None:
    table(f"Footprint of {model} in MiB", schemes, output)
    output.say()
    _beside(schemes, output)
    output.say()
    if any(scheme.cards for scheme in schemes.values()):
        _cards(schemes, output)
        output.say()
    _totals(schemes, output)
    output.say()
    for name, meaning in LEGEND.items():
        output.say(f"{name}: {meaning}")
    if schemes["blobs"].tests:
        output.say()
        _reductions(schemes, output)
        output.say()
        for index, reasons in enumerate(schemes["blobs"].unshared):
            _not_shared(f"test net {index}", reasons, output)


def table(title: str, schemes: Mapping[str, Scheme], output: Output) -> None:
    """Print footprints: a section for each scheme, a row for each net, a column for each purpose that has bytes."""
    from blobmem.cli.output import mib
    from blobmem.footprint import PURPOSES

    nets = [held for scheme in schemes.values() for held in (scheme.train, *scheme.tests)]
    purposes = [name for name in PURPOSES if any(held.purposes[name] for held in nets)]
    measured = any(scheme.measured is not None for scheme in schemes.values())
    columns = ["net, batch", *(HEADS.get(name, name) for name in purposes), "total"]
    columns += ["measured"] if measured else []
    rows: list[Row] = []

    def add(name: str, held: Held, taken: list[int] | None, index: int) -> None:
        cells = [name, *(mib(held.purposes[purpose]) for purpose in purposes), mib(held.total)]
        rows.append(cells + ["-" if taken is None else mib(taken[index])] * measured)

    for scheme in schemes.values():
        rows.append(scheme.name)
        add(f"  train {scheme.train.batch}", scheme.train, scheme.measured, 0)
        for index, held in enumerate(scheme.tests, start=1):
            add(f"+ test {held.batch}", held, scheme.measured, index)
    output.table(title, columns, rows)


def _beside(schemes: Mapping[str, Scheme], output: Output) -> None:
    """Print what the footprint itself does not count."""
    from blobmem.cli.output import mib
    from blobmem.footprint import BOUND

    rows: list[Row] = []
    for scheme in schemes.values():
        if scheme.name == BOUND:
            continue
        rows.append(scheme.name)
        for name, held in [("  train", scheme.train), *(("+ test", held) for held in scheme.tests)]:
            # what fills a chunk that was begun takes away from rounding
            rounding = mib(held.rounding) if held.rounding > 0 else mib(0)
            cells = [mib(held.host), rounding, mib(held.purposes["input buffers"])]
            rows.append([f"{name} {held.batch}", *cells])
    columns = ["net, batch", "host", "rounding", "input buffers"]
    output.table("Beside it, in MiB: host side, rounding to chunks of 2 MiB, device input buffers", columns, rows)


def _totals(schemes: Mapping[str, Scheme], output: Output) -> None:
    """Print what all nets hold together, beside the lower bound."""
    from blobmem.cli.output import mib
    from blobmem.footprint import over_bound

    rows = [
        [name, mib(scheme.train.total), mib(sum(scheme.predicted)), f"{over_bound(schemes, name):.3f}"]
        for name, scheme in schemes.items()
    ]
    output.table("In all, in MiB", ["scheme", "train net", "with test nets", "/ lower bound"], rows)


def _cards(schemes: Mapping[str, Scheme], output: Output) -> None:
    """Print what was in use on the card before and after each net's first iteration."""
    from blobmem.cli.output import mib

    rows: list[Row] = []
    for scheme in schemes.values():
        if not scheme.cards:
            continue
        rows.append(scheme.name)
        names = ["  before", f"  train {scheme.train.batch}", *(f"+ test {held.batch}" for held in scheme.tests)]
        for name, card in zip(names, scheme.cards, strict=True):
            nvml = "-" if card.nvml is None else mib(card.nvml)
            rows.append([name, mib(card.held), mib(card.mapped), mib(card.driver), nvml, mib(card.others)])
    columns = ["after", "ours", "in chunks", "driver", "NVML", "not ours"]
    title = "In use on the card, in MiB: ours, and as the driver and NVML say; not ours: CUDA's context and libraries"
    output.table(title, columns, rows)


def _reductions(schemes: Mapping[str, Scheme], output: Output) -> None:
    from blobmem.cli.output import mib
    from blobmem.footprint import reduction

    pairs = zip(schemes["weights"].tests, schemes["blobs"].tests, strict=True)
    rows = [
        [str(held.batch), mib(before.total), mib(held.total), f"{reduction(schemes, index):.1%}"]
        for index, (before, held) in enumerate(pairs)
    ]
    columns = ["test batch", "weights shared", "blobs shared", "reduction"]
    output.table("Added by each test net, in MiB", columns, rows)


def _not_shared(who: str, reasons: Mapping[str, str], output: Output) -> None:
    """Say which blobs have memory of their own, those of one reason together."""
    from blobmem.cli.nets import by_reason

    for reason, names in by_reason(reasons).items():
        output.say(f"{who} does not share {', '.join(names)}: {reason}")


def _differences(schemes: Mapping[str, Scheme]) -> list[str]:
    result = []
    for scheme in schemes.values():
        taken = scheme.predicted if scheme.measured is None else scheme.measured
        for index, (predicted, measured) in enumerate(zip(scheme.predicted, taken, strict=True)):
            if predicted != measured:
                who = f"test net {index - 1}" if index else "train net"
                result.append(f"{scheme.name}, {who}: {predicted} bytes predicted, {measured} measured")
    return result
