"""`blobmem stress`: a random walk over everything one can do to a memory."""

from __future__ import annotations

import argparse
import secrets
import time
from typing import TYPE_CHECKING, Any

from blobmem.cli import options as common

if TYPE_CHECKING:
    from blobmem.cli.output import Output

DESCRIPTION = """\
Takes random steps on one memory (reads and writes on both sides, growth, trims, failures, copies in flight, threads)
and compares every byte with two plain arrays after each. The same seed takes the same steps.
"""

EXAMPLE = """\
examples:
  blobmem stress --steps 10000 --seed 7
  blobmem stress --device cuda
"""


def add(commands: Any) -> None:
    """Declare the command."""
    parser = common.new(commands, "stress", run, "hunt for lost bytes in the memory core", DESCRIPTION, EXAMPLE)
    parser.add_argument(
        "--steps", type=common.positive, default=100_000, metavar="N", help="steps to take (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="where to begin (default: anywhere; it is printed)")
    parser.add_argument(
        "--device",
        dest="walked",
        type=common.simulated_or_cuda,
        default="simulated",
        metavar="DEVICE",
        help="simulated (the default), which looks for more kinds of mistakes, or cuda or cuda:N, a GPU",
    )


def run(args: argparse.Namespace, output: Output) -> int:
    """Walk, and say how it went."""
    from blobmem.cli.output import per_second
    from blobmem.memory import stress

    options: dict[str, Any] = {}
    if args.walked != "simulated":
        from blobmem.memory.stress_cuda import StressedCuda

        ordinal = int(args.walked.partition(":")[2] or 0)
        options["make_device"] = lambda: StressedCuda(ordinal)
    seed = secrets.randbelow(2**31) if args.seed is None else args.seed
    begin = time.perf_counter()
    try:
        with output.progress(args.steps, "step") as bar:
            stress.run(args.steps, seed, bar.update, **options)
    except stress.Mismatch as error:
        output.error(str(error))
        return 1
    seconds = time.perf_counter() - begin
    speed = args.steps / seconds
    walk = f"{args.steps} steps on a {args.walked} device from seed {seed}"
    output.event(
        "stress",
        f"{walk}, {per_second(speed, 'step')}: every byte was where it should be",
        steps=args.steps,
        seed=seed,
        device=args.walked,
        seconds=seconds,
        steps_per_second=speed,
        result="ok",
    )
    return 0
