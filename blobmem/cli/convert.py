"""`blobmem convert`: data sets to databases that Data layers read."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blobmem.cli import options

if TYPE_CHECKING:
    from blobmem.cli.output import Output
    from blobmem.data.convert import Converted

DESCRIPTION = """\
Turns data into LMDB databases of Datum records, as Caffe has them, or into HDF5 files. What is made appears when it is
complete; what is there already is replaced with --overwrite only.
"""

MNIST = """\
Reads MNIST's four idx files, packed with gzip or not, from SOURCE and writes TARGET/mnist_train_lmdb and
TARGET/mnist_test_lmdb.
"""

IMAGES = """\
Makes a database of the images that the list SOURCE names, a line `path label` for each, or of those in the folder
SOURCE, which has a folder for each class: classes are numbered by name, and TARGET_labels.txt then says their names.
Images are resized as OpenCV does it (bilinear), and stored as raw pixels unless --encoded is given.
"""

CSV = """\
Makes a database, or an HDF5 file where TARGET ends in .h5, of the numbers in a table, one row a record. HDF5 files have
the datasets data and, with --label, label.
"""

EXAMPLE = """\
examples:
  blobmem convert mnist models/lenet/mnist models/lenet
  blobmem convert images photos photos_lmdb --resize 256x256 --shuffle
  blobmem convert csv iris.csv iris.h5 --label -1
"""


def add(commands: Any) -> None:
    """Declare the command and its kinds of data."""
    parser = options.new(commands, "convert", run_mnist, "turn data into databases", DESCRIPTION, EXAMPLE)
    kinds = parser.add_subparsers(title="kinds of data", metavar="KIND", required=True, parser_class=type(parser))
    mnist = options.new(kinds, "mnist", run_mnist, "handwritten digits, 28 x 28 pixels", MNIST, EXAMPLE)
    mnist.add_argument("source", type=Path, metavar="SOURCE", help="folder with the four idx files")
    mnist.add_argument("target", type=Path, metavar="TARGET", help="folder for the two databases; made if absent")
    mnist.add_argument("--overwrite", action="store_true", help="replace databases that are there")
    _add_images(options.new(kinds, "images", run_images, "images in files", IMAGES, EXAMPLE))
    _add_csv(options.new(kinds, "csv", run_csv, "tables in text", CSV, EXAMPLE))


def _add_images(parser: Any) -> None:
    parser.add_argument("source", type=Path, metavar="SOURCE", help="a list of images, or a folder of class folders")
    parser.add_argument("target", type=Path, metavar="TARGET", help="the database's folder")
    parser.add_argument("--root", default="", metavar="FOLDER", help="where the paths in the list start")
    parser.add_argument("--resize", type=_size, metavar="HxW", help="resize to this height and width")
    parser.add_argument("--gray", action="store_true", help="one channel instead of three")
    parser.add_argument(
        "--encoded", action="store_true", help="store compressed images: the files as they are where they can stay so"
    )
    parser.add_argument(
        "--encode-type", choices=("jpg", "png"), help="compress all images so; implies --encoded (default: as the file)"
    )
    parser.add_argument("--shuffle", action="store_true", help="put the images in random order")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="what the order depends on (default: 0)")
    parser.add_argument("--check-size", action="store_true", help="refuse images that differ in size")
    parser.add_argument("--skip-damaged", action="store_true", help="warn of images that cannot be read, and go on")
    parser.add_argument("--overwrite", action="store_true", help="replace a database that is there")


def _add_csv(parser: Any) -> None:
    parser.add_argument("source", type=Path, metavar="SOURCE", help="the table, numbers with commas between them")
    parser.add_argument("target", type=Path, metavar="TARGET", help="the database's folder, or a file in .h5")
    parser.add_argument(
        "--label", metavar="COLUMN", help="the labels' column: its name in the header, or its number (1 first, -1 last)"
    )
    parser.add_argument(
        "--header",
        choices=("auto", "yes", "no"),
        default="auto",
        help="whether the first row has names (default: auto)",
    )
    parser.add_argument(
        "--separator", type=_separator, default=",", metavar="C", help="what stands between cells: a character, or tab"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")


def run_mnist(args: argparse.Namespace, output: Output) -> int:
    """Convert MNIST and say what was made."""
    from blobmem.data import mnist

    with output.progress(None, "record") as bar:
        made = mnist.convert(args.source, args.target, bar.update, args.overwrite)
    for database in made:
        show("convert", database, output)
    return 0


def run_images(args: argparse.Namespace, output: Output) -> int:
    """Convert images and say what was made."""
    from blobmem.data import image_sets

    encoded = args.encoded or args.encode_type is not None
    recipe = image_sets.Recipe(args.resize, args.gray, encoded, args.encode_type)
    with output.progress(None, "image") as bar:
        made = image_sets.convert(
            args.source,
            args.target,
            recipe,
            root=args.root,
            shuffle=args.shuffle,
            seed=args.seed,
            check_size=args.check_size,
            skip_damaged=args.skip_damaged,
            overwrite=args.overwrite,
            progress=bar.update,
        )
    show("convert", made, output)
    return 0


def run_csv(args: argparse.Namespace, output: Output) -> int:
    """Convert a table and say what was made."""
    from blobmem.data import tables

    header = {"auto": None, "yes": True, "no": False}[args.header]
    with output.progress(None, "byte") as bar:
        made = tables.convert(
            args.source,
            args.target,
            label=args.label,
            header=header,
            separator=args.separator,
            overwrite=args.overwrite,
            progress=bar.update,
        )
    show("convert", made, output)
    return 0


def show(event: str, made: Converted, output: Output, **values: Any) -> None:
    """Say what was made; `values` come first."""
    from blobmem.cli.output import mib

    output.event(
        event,
        f"{made.path}: {made.records} records, {mib(made.nbytes)} MiB",
        **values,
        path=made.path,
        records=made.records,
        bytes=made.nbytes,
    )


def _size(text: str) -> tuple[int, int]:
    """(height, width) from 256x227."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected HEIGHTxWIDTH, for instance 256x256, got '{text}'")
    return int(match[1]), int(match[2])


def _separator(text: str) -> str:
    """One character, or the word tab."""
    if text in ("tab", r"\t"):
        return "\t"
    if len(text) != 1 or text in '"\r\n':
        raise argparse.ArgumentTypeError(f"expected one character or the word tab, got '{text}'")
    return text
