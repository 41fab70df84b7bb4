"""`blobmem compute-mean`: the mean of the images in a database."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blobmem.cli import options

if TYPE_CHECKING:
    from blobmem.cli.output import Output

DESCRIPTION = """\
Computes the mean of all records of an LMDB or LevelDB database, pixel by pixel, and prints the mean of each channel.
The mean image goes to a binaryproto file, for mean_file in transform_param; the channels' means are for mean_value.
Records must have one shape.
"""

EXAMPLE = """\
example:
  blobmem compute-mean train_lmdb mean.binaryproto
"""


def add(commands: Any) -> None:
    """Declare the command."""
    parser = options.new(commands, "compute-mean", run, "the mean of the images in a database", DESCRIPTION, EXAMPLE)
    parser.add_argument("database", type=Path, metavar="DATABASE", help="folder of an LMDB or LevelDB database")
    parser.add_argument("target", type=Path, nargs="?", metavar="FILE", help="the binaryproto file to write")


def run(args: argparse.Namespace, output: Output) -> int:
    """Compute the mean, write it and print it."""
    from blobmem.data import mean

    with output.progress(None, "record") as bar:
        result = mean.compute(args.database, bar.update)
    if args.target is not None:
        mean.save(result, args.target)
    channels = result.channels
    size = " x ".join(map(str, result.image.shape))
    human = f"{result.records} records of {size}; means of the channels: {', '.join(f'{m:.4f}' for m in channels)}"
    if args.target is not None:
        human += f"\nmean image: {args.target}"
    output.event(
        "mean",
        human,
        records=result.records,
        shape="x".join(map(str, result.image.shape)),
        **{f"channel{number}": value for number, value in enumerate(channels)},
        **({} if args.target is None else {"path": args.target}),
    )
    return 0
