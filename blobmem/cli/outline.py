"""What commands that look at a net without running it have in common."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blobmem.cli import options

if TYPE_CHECKING:
    from blobmem.net.builder import Spec


def add_model(parser: Any) -> None:
    """MODEL, --phase, --batch, --input-shape, --level, --stage."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="a net or solver file (prototxt)")
    parser.add_argument(
        "--phase", choices=("TRAIN", "TEST"), default="TRAIN", help="which layers to include (default: %(default)s)"
    )
    parser.add_argument("--batch", type=options.positive, metavar="N", help="items in a batch, instead of the file's")
    options.add_input_shape(parser)
    options.add_state(parser)


def spec(args: argparse.Namespace) -> Spec:
    """The net that these options ask for. Raises NetError."""
    from blobmem.cli import nets
    from blobmem.net.builder import specs_of

    specs = specs_of(args.model)
    nets.check_input_shapes(args.model, specs, dict(args.input_shape))
    return nets.in_state(nets.spec_of(args.model, specs, args.phase), args)
