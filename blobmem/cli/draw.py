"""`blobmem draw`: a picture of a net with the sizes of its blobs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blobmem.cli import options, outline

if TYPE_CHECKING:
    from blobmem.cli.output import Output

DESCRIPTION = """\
Draws a net in one phase: layers as boxes, blobs as octagons, each edge with the shape and the bytes of its blob, dashed
lines between layers that share parameters. OUT names the format: .dot is a text that needs no program; .svg, .png, .pdf
and others are pictures. Without OUT the text is printed. Drawing needs an extra: pip install 'blobmem[draw]'.
"""

EXAMPLE = """\
examples:
  blobmem draw models/lenet/train_val.prototxt lenet.svg
  blobmem draw --batch 1 --rankdir TB models/googlenet/deploy.prototxt net.pdf

Options go before MODEL or after OUT. Nothing is allocated for it, and data need not be here. Shapes that depend on
values are the largest there can be, with <= before them.
"""


def add(commands: Any) -> None:
    """Declare the command."""
    parser = options.new(commands, "draw", run, "a picture of a net, with sizes", DESCRIPTION, EXAMPLE)
    outline.add_model(parser)
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT", help="the picture's file, .dot, .svg, .png, ...")
    parser.add_argument(
        "--rankdir",
        choices=("LR", "RL", "TB", "BT"),
        default="LR",
        help="which way it runs: from left to right, top to bottom, ... (default: %(default)s)",
    )


def run(args: argparse.Namespace, output: Output) -> int:
    """Draw the net."""
    from blobmem import draw
    from blobmem.errors import NetError
    from blobmem.picture import sized_graph
    from blobmem.proto.files import write_atomic

    extension = "dot" if args.out is None else args.out.suffix.removeprefix(".").lower()
    if not extension:
        raise NetError(f"{args.out}: expected a name that ends with a format, such as .svg or .dot")
    try:
        graph = sized_graph(outline.spec(args), args.rankdir, batch=args.batch, input_shapes=dict(args.input_shape))
        picture = draw.render(graph, extension)
    except ImportError as error:
        output.error(str(error))
        return 1
    if args.out is None:
        output.say(picture.decode().rstrip("\n"))
        return 0
    write_atomic(args.out, picture)
    output.event("draw", f"{args.out}: {len(picture):,} bytes", path=args.out, bytes=len(picture))
    return 0
