"""`blobmem upgrade`: net and solver files in old formats, in today's."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blobmem.cli import options

if TYPE_CHECKING:
    from blobmem.cli.output import Output

DESCRIPTION = """\
Writes a net or solver file in one of Caffe's old formats anew in today's, and says what was changed: V0 and V1 layers,
inputs without an Input layer, transformations outside of transform_param, BatchNorm multipliers, solver_type. Text
(prototxt) stays text, binary (caffemodel) stays binary, whatever the names of the files.
"""

EXAMPLE = """\
examples:
  blobmem upgrade old_train_val.prototxt train_val.prototxt
  blobmem upgrade old.caffemodel new.caffemodel

An upgraded text has no comments; a file that is up to date is copied as it is. If IN cannot be read, OUT is not
touched. The files that a solver names are not upgraded with it.
"""


def add(commands: Any) -> None:
    """Declare the command."""
    parser = options.new(commands, "upgrade", run, "bring old files up to date", DESCRIPTION, EXAMPLE)
    parser.add_argument("source", type=Path, metavar="IN", help="a net or solver file, text or binary")
    parser.add_argument("target", type=Path, metavar="OUT", help="the file to write; may be IN")


def run(args: argparse.Namespace, output: Output) -> int:
    """Upgrade the file and say what was done."""
    from blobmem.proto.upgrade_file import upgrade_file

    result = upgrade_file(args.source, args.target)
    form = "binary" if result.binary else "text"
    done = result.done
    changes = "".join(f"\n  upgraded {step}" for step in done.steps) or "\n  up to date: copied as it is"
    output.event(
        "upgrade",
        f"{args.target}: a {result.kind}, {form}{changes}",
        path=args.target,
        kind=result.kind,
        format=form,
        upgraded="; ".join(done.steps) or "-",
    )
    for remark in done.ignored:
        output.note(f"warning: {args.source}: {remark}: without effect, as in Caffe")
    return 0
