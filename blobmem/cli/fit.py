"""`blobmem fit`: the largest batches with which nets fit into so much memory, and what holds it then."""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blobmem.cli import options

if TYPE_CHECKING:
    from blobmem.cli.output import Output
    from blobmem.devices import SimulatedDevice
    from blobmem.fit import Fit

DESCRIPTION = """\
Finds the largest training batch of a net or solver file with which its nets fit into so much memory, then the largest
test batch beside it, under each scheme of `blobmem footprint`, and shows what holds the memory then, in MiB. Nothing
runs: it needs neither data nor a GPU.
"""

EXAMPLE = """\
examples:
  blobmem fit models/caffenet/solver.prototxt --card 16GiB
  blobmem fit models/caffenet/solver.prototxt --card 16GiB --test-batch 50
  blobmem fit models/resnet50/solver.prototxt --card 80GiB --math tf32
  blobmem fit models/lenet/solver.prototxt --device-memory 64MiB \\
      --device simulated
  blobmem fit models/resnet50/solver.prototxt --device-memory 16GiB \\
      --max-slowdown 1.1

The training batch is found beside the file's own test batches, or those of --test-batch. Both batches were reckoned,
and the next larger ones do not fit; bytes mostly grow with the batch, but where an algorithm takes less workspace for
more items a larger batch might fit again. A convolution whose algorithm is not known for a batch counts with the most
that it may take, so that a run may hold less.
If not one item fits, the exit code is 1, and `left` says what lacks.
With --max-slowdown a net may have less memory than it needs, as `blobmem train --device-memory` grants it: what is
found is the largest training batch of which an item takes at most so many times as long as without a limit, and how
long a step takes. That is reckoned from times of calls on an H200 and from bytes that go to the host and back.
"""


def add(commands: Any) -> None:
    """Declare the command."""
    parser = options.new(
        commands, "fit", run, "find the largest batches that fit into so much memory", DESCRIPTION, EXAMPLE
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="a solver or net file (prototxt)")
    room = parser.add_mutually_exclusive_group(required=True)
    room.add_argument(
        "--device-memory",
        type=options.nbytes,
        metavar="BYTES",
        help="most bytes for the nets to hold, as in 16GiB: what --device-memory of `blobmem train` grants",
    )
    room.add_argument(
        "--card",
        type=options.nbytes,
        metavar="BYTES",
        help="memory of a GPU that nobody else uses, of which 839 MiB are for CUDA and its libraries (measured on an "
        "H200)",
    )
    parser.add_argument(
        "--test-batch", type=options.positive, metavar="N", help="items in a test batch, instead of the largest"
    )
    parser.add_argument(
        "--max-slowdown",
        type=options.slowdown,
        metavar="TIMES",
        help="find the largest training batch that takes at most so many times as long for an item as without a limit, "
        "as in 1.1, where arrays are evicted and made anew",
    )
    options.add_input_shape(parser)
    parser.add_argument(
        "--device",
        dest="reckoned_for",
        choices=("cuda", "simulated"),
        default="cuda",
        help="whose workspaces count: cuda (the default), those that the algorithms chosen for an H200 take, or "
        "simulated, those of the host's ops",
    )
    options.add_math(parser)
    options.add_dtype(parser)


def run(args: argparse.Namespace, output: Output) -> int:
    """Find the batches and print them."""
    from blobmem.cli.nets import check_input_shapes
    from blobmem.cli.output import mib
    from blobmem.fit import CARD_OVERHEAD, fit
    from blobmem.footprint import BOUND
    from blobmem.net.builder import specs_of

    if args.input_shape:
        check_input_shapes(args.model, specs_of(args.model), dict(args.input_shape))
    room = args.device_memory or max(args.card - CARD_OVERHEAD, 0)
    if args.max_slowdown is not None:
        return _pace(args, room, output)
    found = fit(
        args.model,
        room,
        chunks=args.card is not None,
        test_batch=args.test_batch,
        input_shapes=dict(args.input_shape),
        dtype=args.dtype,
        make_device=_device_maker(args),
    )
    _show(args, room, found, output)
    if any(best.train_batch for name, best in found.items() if name != BOUND):
        return 0
    output.error(f"{args.model} takes more than {mib(room)} MiB with a training batch of 1 under every scheme")
    return 1


def _pace(args: argparse.Namespace, room: int, output: Output) -> int:
    """Find the largest training batch at that slowdown, and print how long its step takes."""
    from blobmem.cli.output import mib
    from blobmem.fit import largest_at
    from blobmem.footprint import CHUNK

    room -= 2 * CHUNK if args.card else 0  # at the ends of memories
    log = logging.getLogger("blobmem")
    level = log.level
    log.setLevel(logging.WARNING)  # not what each batch that is tried would evict
    try:
        found = largest_at(
            args.model, room, args.max_slowdown, test_batch=args.test_batch, input_shapes=dict(args.input_shape),
            dtype=args.dtype, make_device=_device_maker(args),
        )  # fmt: skip
    finally:
        log.setLevel(level)
    if found.slowdown > args.max_slowdown:
        took = f"takes {found.slowdown:.2f} times as long" if found.slowdown < math.inf else "does not fit"
        output.error(f"in {mib(room)} MiB a training batch of 1 of {args.model} {took}")
        return 1
    columns = ["train\nbatch", "step,\nms", "without a\nlimit, ms", "times", "items a\nsecond", "moved,\nMiB"]
    cells = [f"{found.ms:.2f}", f"{found.free_ms:.2f}", f"{found.slowdown:.3f}", f"{found.batch / found.ms * 1e3:.0f}"]
    title = f"Largest training batch of {args.model} in {mib(room)} MiB, at most {args.max_slowdown:g} times slower"
    output.table(title, columns, [[str(found.batch), *cells, mib(found.moved)]])
    output.say()
    output.say("moved: bytes that leave the device in a step, and that come back; times are reckoned")
    return 0


def _device_maker(args: argparse.Namespace) -> Callable[[], SimulatedDevice]:
    """What gives the device whose workspaces count; one for all batches, as it is to warn once."""
    from blobmem import devices
    from blobmem.devices.cuda.predicted import PredictedCuda

    chosen = {"math": args.math or "", "deterministic": args.deterministic}
    if args.reckoned_for == "simulated":
        devices.get("simulated", **chosen)  # which has neither
        return partial(devices.SimulatedDevice, compute=False)
    device = PredictedCuda(**{name: value for name, value in chosen.items() if value})
    return lambda: device


def _show(args: argparse.Namespace, room: int, found: Mapping[str, Fit], output: Output) -> None:
    from blobmem.cli.footprint import HEADS, LEGEND
    from blobmem.cli.output import mib
    from blobmem.fit import CARD_OVERHEAD
    from blobmem.footprint import PURPOSES

    held = {
        name: {purpose: sum(net.purposes[purpose] for net in best.nets) for purpose in PURPOSES}
        for name, best in found.items()
    }
    purposes = [purpose for purpose in PURPOSES if any(taken[purpose] for taken in held.values())]
    rounding = ["rounding"] if args.card else []
    rows = []
    for name, best in found.items():
        cells = [name, str(best.train_batch or "-"), ", ".join(map(str, best.test_batches)) or "-"]
        cells += [mib(held[name][purpose]) for purpose in purposes]
        cells += [mib(best.nbytes - sum(held[name].values())) for _ in rounding]
        rows.append([*cells, mib(best.nbytes), mib(room - best.nbytes)])
    columns = ["scheme", "train\nbatch", "test\nbatch", *(HEADS.get(name, name) for name in purposes), *rounding]
    columns += ["total", "left"]
    output.table(f"Largest batches of {args.model} in {mib(room)} MiB, and what holds these", columns, rows)
    output.say()
    if args.card:
        output.say(
            f"of the card's {mib(args.card)} MiB {mib(CARD_OVERHEAD)} are for CUDA's context and libraries, as was "
            "measured on an H200; the rest is had in chunks of 2 MiB"
        )
    for name, meaning in LEGEND.items():
        output.say(f"{name}: {meaning}")
