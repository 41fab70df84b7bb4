"""`blobmem convert`: data sets to databases that Data layers read."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blobmem.cli import options

if TYPE_CHECKING:
    from blobmem.cli.output import Output

DESCRIPTION = """\
Turns a data set as it is published into LMDB databases of Datum records, as Caffe has them.
The one kind so far is mnist: four idx files, packed with gzip or not.
"""

MNIST = """\
Reads MNIST's four idx files from SOURCE and writes TARGET/mnist_train_lmdb and TARGET/mnist_test_lmdb.
Both appear when both are complete; databases that are there already are replaced with --overwrite only.
"""

EXAMPLE = """\
example, with the part of MNIST that comes with models/lenet (10,000 training and 2,000 test images):
  blobmem convert mnist models/lenet/mnist models/lenet
"""


def add(commands: Any) -> None:
    """Declare the command and its kinds of data."""
    parser = options.new(commands, "convert", run, "turn a data set into LMDB databases", DESCRIPTION, EXAMPLE)
    kinds = parser.add_subparsers(title="data sets", metavar="KIND", required=True, parser_class=type(parser))
    mnist = options.new(kinds, "mnist", run, "handwritten digits, 28 x 28 pixels", MNIST, EXAMPLE)
    mnist.add_argument("source", type=Path, metavar="SOURCE", help="folder with the four idx files")
    mnist.add_argument("target", type=Path, metavar="TARGET", help="folder for the two databases; made if absent")
    mnist.add_argument("--overwrite", action="store_true", help="replace databases that are there")


def run(args: argparse.Namespace, output: Output) -> int:
    """Convert MNIST and say what was made."""
    from blobmem.cli.output import mib
    from blobmem.data import mnist

    with output.progress(None, "record") as bar:
        made = mnist.convert(args.source, args.target, bar.update, args.overwrite)
    for database in made:
        output.event(
            "convert",
            f"{database.path}: {database.records} records, {mib(database.nbytes)} MiB",
            path=database.path,
            records=database.records,
            bytes=database.nbytes,
        )
    return 0
