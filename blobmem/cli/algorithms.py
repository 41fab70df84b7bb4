"""`blobmem algorithms`: what was measured on GPUs: which of cuDNN's plans are fastest, and how long calls take."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blobmem.cli import options

if TYPE_CHECKING:
    from blobmem.cli.output import Output

DESCRIPTION = """\
Shows, forgets or copies what was chosen on GPUs: plans for convolutions, and on how many streams backward runs; and how
long calls take. Each distinct convolution is timed once, when a net that has it is built on a GPU, each distinct net's
backward when it is first trained there (`--backward-streams`), and all calls of a step where a net is first trained in
less memory than it needs (`--device-memory`); this then serves every net and process, and predicts footprints and times
where there is no GPU. There is a file per GPU model, cuDNN version and math: some come with the package, the others are
in the user's cache folder, or in the folder that BLOBMEM_CACHE names. How a net is best trained in less memory is kept
there, too, so that only the first process searches for it.
"""

LIST = (
    "Prints each file's choices: the convolution, the plan, its workspace in MiB, and the ms that it took when chosen. "
    "Of a net's backward: what goes into its first convolution, how many calls, their digest, how many streams, the ms."
    " Of a call: its op, a digest of what it takes and how, the bytes of that, the ms."
)
CLEAR = (
    "Deletes the user's files, and how nets are trained in less memory, so that nets built from now on search anew. "
    "Those of the package stay."
)
EXPORT = (
    "Writes all choices, the user's and the package's, into files of the same names in FOLDER, to be used elsewhere."
)

EXAMPLE = """\
examples:
  blobmem algorithms list
  blobmem algorithms export chosen
"""


def add(commands: Any) -> None:
    """Declare the command and what it does."""
    parser = options.new(commands, "algorithms", run_list, "what was chosen as fastest on a GPU", DESCRIPTION, EXAMPLE)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, parser_class=type(parser))
    options.new(actions, "list", run_list, "show the choices", LIST, EXAMPLE)
    options.new(actions, "clear", run_clear, "forget the user's", CLEAR, EXAMPLE)
    export = options.new(actions, "export", run_export, "copy all into a folder", EXPORT, EXAMPLE)
    export.add_argument("folder", type=Path, metavar="FOLDER", help="where the files go; made if absent")


def run_list(args: argparse.Namespace, output: Output) -> int:
    """Print a table, a heading for each file."""
    from blobmem.ops.cuda import algorithms

    rows: list[Any] = []
    for path in algorithms.files():
        rows.append(str(path))
        for text, choice in sorted(algorithms.read(path).items()):
            rows.append((text, choice.plan, f"{choice.workspace / 2**20:.2f}", f"{choice.ms:.3f}"))
    if rows:
        output.table("chosen plans", ("for", "plan", "workspace", "ms"), rows, texts=2)
    else:
        output.say(f"no choices yet; they will be kept in {algorithms.folder()}")
    return 0


def run_clear(args: argparse.Namespace, output: Output) -> int:
    """Delete the user's files."""
    from blobmem.net.plan import recipes
    from blobmem.ops.cuda import algorithms

    for path in (path for folder in (algorithms.folder(), recipes.folder()) for path in folder.glob("*.json")):
        path.unlink(missing_ok=True)
        output.event("clear", f"{path}: deleted", path=path)
    return 0


def run_export(args: argparse.Namespace, output: Output) -> int:
    """Write the merged files."""
    from blobmem.ops.cuda import algorithms

    for path in algorithms.export(args.folder):
        count = len(algorithms.read(path))
        output.event("export", f"{path}: {count} choices", path=path, choices=count)
    return 0
