"""Options that several commands have, and the types of their values."""

from __future__ import annotations

import argparse
import itertools
import math
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blobmem import dtypes

if TYPE_CHECKING:
    from blobmem.devices import Device


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Help whose paragraphs fit the terminal, with examples as they are, and room for the names of commands."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for example, group in itertools.groupby(text.splitlines(), lambda line: not line or line.startswith(" ")):
            paragraph = list(group)
            lines += paragraph if example else textwrap.wrap(" ".join(paragraph), width)
        return "\n".join(indent + line for line in lines)


def new(commands: Any, name: str, run: Callable[..., int], summary: str, description: str, example: str) -> Any:
    """A command's parser; `example` stands below its options."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=example,
        formatter_class=Formatter,
    )
    parser.set_defaults(run=run)
    return parser


def positive(text: str) -> int:
    """A whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got '{text}'")
    return value


def slowdown(text: str) -> float:
    """A number of at least 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, as in 1.1, got '{text}'")
    return value


def nbytes(text: str) -> int:
    """A number of bytes of at least 1, with a unit or without."""
    from blobmem.devices import parse_bytes

    try:
        value = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least one byte, got '{text}'")
    return value


def simulated_or_cuda(text: str) -> str:
    """simulated, cuda or cuda:N."""
    if not re.fullmatch(r"simulated|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"expected simulated, cuda or cuda:N, got '{text}'")
    return text


def make_device(args: argparse.Namespace) -> Device:
    """The device that a command line asks for. DeviceError if there is none such."""
    from blobmem import devices

    return devices.get(
        args.device,
        args.device_memory,
        reserve=args.device_reserve,
        math=args.math,
        deterministic=args.deterministic,
        graphs=False if getattr(args, "no_cuda_graphs", False) else None,
        allocator=args.allocator,
    )


def input_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """(blob, shape of one item) from BLOB=3x227x227."""
    from blobmem.footprint import parse_input_shape

    try:
        return parse_input_shape(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def paths(text: str) -> list[Path]:
    """Paths with commas between them."""
    return [Path(part) for part in text.split(",") if part]


def add_device(parser: Any) -> None:
    """--device and what belongs to it."""
    parser.add_argument(
        "--device",
        default="cpu",
        metavar="DEVICE",
        help="where to compute: cpu (the default), cuda or cuda:N, a GPU, simulated, or simulated:BYTES, a device of "
        "that capacity made of host memory (simulated:8GiB shows whether it would fit in 8 GiB)",
    )
    parser.add_argument("--device-memory", type=nbytes, metavar="BYTES", help="most bytes to hold there, as in 8GiB")
    parser.add_argument(
        "--device-reserve", type=nbytes, metavar="BYTES", help="bytes of a GPU to leave free for others"
    )
    parser.add_argument(
        "--allocator",
        choices=("pool", "direct", "async", "rmm", "managed"),
        help="of a GPU, where memory comes from: pool (the default), mapped chunks, which grow in place; direct, "
        "allocations of the driver; async, its stream-ordered pool; rmm, RMM's current device resource; managed, "
        "unified memory",
    )
    add_math(parser)


def add_graphs(parser: Any) -> None:
    """--no-cuda-graphs and --graph-dot."""
    parser.add_argument(
        "--no-cuda-graphs",
        action="store_true",
        help="of a GPU: queue each kernel by itself, instead of capturing what runs again and again",
    )
    parser.add_argument(
        "--graph-dot",
        metavar="PREFIX",
        help="at the end, write what was captured as DOT files, PREFIX-NET-PHASE-DIRECTION-NUMBER.dot, and say which "
        "layers were not, and why",
    )


def add_streams(parser: Any) -> None:
    """--backward-streams."""
    parser.add_argument(
        "--backward-streams",
        type=lambda word: int(word) if word.isdigit() else word,
        choices=("auto", 1, 2),
        default="auto",
        help="2: let a GPU compute gradients of parameters beside those of data, which takes another workspace; auto: "
        "where that was measured to be faster, which `train` does in its first steps (default: %(default)s)",
    )


def add_math(parser: Any) -> None:
    """--math and --deterministic, which say what algorithms a GPU may use."""
    parser.add_argument(
        "--math",
        choices=("fp32", "tf32"),
        help="of a GPU: fp32 (the default, as Caffe), or tf32 for faster, less exact products and convolutions",
    )
    parser.add_argument(
        "--deterministic", action="store_true", help="only use algorithms of a GPU that give the same bits in every run"
    )


def add_dtype(parser: Any) -> None:
    """--dtype."""
    parser.add_argument(
        "--dtype",
        choices=dtypes.NAMES,
        default="float32",
        help="what the net's numbers are (default: %(default)s, as Caffe); float16 and bfloat16 need a GPU",
    )


def words(text: str) -> list[str]:
    """Words with commas between them."""
    return [part.strip() for part in text.split(",") if part.strip()]


def add_state(parser: Any) -> None:
    """--level, --stage."""
    parser.add_argument("--level", type=int, metavar="N", help="the net's level, which include and exclude rules see")
    parser.add_argument(
        "--stage", type=words, default=[], metavar="NAME[,NAME]", help="the net's stages, which rules see"
    )


def add_memory(parser: Any, choices: tuple[str, ...], default: str) -> None:
    """--memory."""
    parser.add_argument(
        "--memory",
        choices=choices,
        default=default,
        help="keep: each array of a net has bytes of its own, as in Caffe; train, inference: in one pass forward and "
        "backward, or forward, they take turns at as few bytes as will do (default: %(default)s)",
    )


def add_input_shape(parser: Any) -> None:
    """--input-shape."""
    parser.add_argument(
        "--input-shape",
        type=input_shape,
        nargs="+",
        action="extend",
        default=[],
        metavar="BLOB=CxHxW",
        help="shape of one item of a data layer's top whose database is not here, for instance data=3x227x227",
    )
