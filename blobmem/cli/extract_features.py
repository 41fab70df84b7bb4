"""`blobmem extract-features`: what blobs of a trained net hold for the net's data."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blobmem.cli import options

if TYPE_CHECKING:
    from blobmem.cli.output import Output

DESCRIPTION = """\
Runs a net in its TEST phase over batches of its own data and writes the rows of blobs, item by item: to LMDB databases
PREFIX_BLOB_lmdb of Datum records, or, where PREFIX ends in .h5, to one HDF5 file with a dataset for each blob.
"""

EXAMPLE = """\
example, once `blobmem train --solver models/lenet/solver.prototxt` has written its snapshot:
  blobmem extract-features --model models/lenet/train_val.prototxt \\
    --weights models/lenet/lenet_iter_1250.caffemodel \\
    --blobs ip1,label --passes 20 --out features.h5
"""


def add(commands: Any) -> None:
    """Declare the command."""
    parser = options.new(commands, "extract-features", run, "write what blobs of a net hold", DESCRIPTION, EXAMPLE)
    parser.add_argument("--model", type=Path, required=True, metavar="FILE", help="a net or solver file (prototxt)")
    parser.add_argument(
        "--weights", type=options.paths, required=True, metavar="FILE[,FILE]", help="trained parameters (caffemodel)"
    )
    parser.add_argument("--blobs", type=options.words, required=True, metavar="NAME[,NAME]", help="the blobs to write")
    parser.add_argument("--passes", type=options.positive, required=True, metavar="N", help="batches to run")
    parser.add_argument("--out", type=Path, required=True, metavar="PREFIX", help="where to write; see above")
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")
    options.add_device(parser)
    options.add_dtype(parser)


def run(args: argparse.Namespace, output: Output) -> int:
    """Run the batches and say what was written."""
    from blobmem.cli import nets
    from blobmem.cli.convert import show
    from blobmem.data import features
    from blobmem.errors import NetError
    from blobmem.net.builder import specs_of

    spec = nets.spec_of(args.model, specs_of(args.model), "TEST")
    net = nets.build(spec, device=args.device, dtype=args.dtype, forward_only=True)
    if net.inputs:
        raise NetError(
            f"{args.model}: {', '.join(net.inputs)} would have to come from you: `blobmem extract-features` needs a "
            "net with a data layer in its TEST phase (the train_val file rather than the deploy file)"
        )
    nets.load_weights([net], args.weights, output)
    with output.progress(args.passes, "batch") as bar:
        made = features.extract(
            net, list(dict.fromkeys(args.blobs)), args.passes, args.out, overwrite=args.overwrite, progress=bar.update
        )
    for name, result in zip(dict.fromkeys(args.blobs), made, strict=True):
        show("extract", result, output, blob=name)
    return 0
