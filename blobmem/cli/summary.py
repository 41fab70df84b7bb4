"""`blobmem summary`: the layers of a net with what each gives, learns and computes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from blobmem.cli import options, outline
from blobmem.version import __version__

if TYPE_CHECKING:
    from blobmem.cli.output import Output, Row
    from blobmem.summary import Summary

DESCRIPTION = """\
Shows for each layer of a net its output shapes, its parameters, the multiply-adds of a forward pass and the size of its
outputs, in MiB. Nothing is allocated for it, and data need not be here.
"""

EXAMPLE = """\
examples:
  blobmem summary models/caffenet/deploy.prototxt --batch 1
  blobmem summary models/resnet50/train_val.prototxt --phase TEST --json -

Multiply-adds are products with weights, scales and coefficients: convolutions, inner products and recurrent layers
count each weight wherever it is used; Scale, BatchNorm, PReLU and Axpy one for each value; other layers mostly none.
Outputs that are computed in place, or are another blob in another shape, take no bytes. Shapes that depend on values
are the largest there can be, with <= before them. JSON has bytes.
"""


def add(commands: Any) -> None:
    """Declare the command."""
    parser = options.new(commands, "summary", run, "a table of a net's layers", DESCRIPTION, EXAMPLE)
    outline.add_model(parser)
    parser.add_argument("--json", metavar="FILE", help="write it as JSON; - writes that and nothing else to the output")


def run(args: argparse.Namespace, output: Output) -> int:
    """Work the summary out and print it."""
    from blobmem.cli.footprint import write_json
    from blobmem.summary import summary

    result = summary(outline.spec(args), batch=args.batch, input_shapes=dict(args.input_shape))
    if args.json:
        write_json(args.json, _json(args, result))
    if args.json != "-":
        _show(args, result, output)
    return 0


COLUMNS = ("parameters", "statistics", "multiply_adds", "bytes")


def _json(args: argparse.Namespace, result: Summary) -> dict[str, Any]:
    layers = [
        {
            "name": row.name,
            "type": row.type,
            "tops": row.tops,
            **{column: getattr(row, column) for column in COLUMNS},
        }
        for row in result.rows
    ]
    totals = {column: result.total(column) for column in COLUMNS}
    return {
        "model": str(args.model),
        "version": __version__,
        "net": result.name,
        "phase": args.phase,
        "batch": result.batch,
        "layers": layers,
        "totals": totals,
    }


def _show(args: argparse.Namespace, result: Summary, output: Output) -> None:
    from blobmem.cli.output import mib

    rows: list[Row] = []
    for row in result.rows:
        first, *rest = row.tops.values() or ("-",)
        rows.append([row.name, row.type, first, _count(row.parameters), _count(row.multiply_adds), mib(row.bytes)])
        rows += [["", "", shape, "", "", ""] for shape in rest]
    totals = {column: result.total(column) for column in COLUMNS}
    rows.append(["total", "", "", _count(totals["parameters"]), _count(totals["multiply_adds"]), mib(totals["bytes"])])
    title = f"{args.model} ({args.phase}), batch {result.batch}"
    columns = ["layer", "type", "output", "parameters", "multiply-adds", "output\nMiB"]
    output.table(title, columns, rows, texts=3)
    if result.batch > 1:
        each = totals["multiply_adds"] / result.batch
        output.say(f"Multiply-adds for each of {result.batch} items: {each:,.0f}")
    if totals["statistics"]:
        output.say(f"Beside the parameters, running statistics: {totals['statistics']:,} values")


def _count(number: int) -> str:
    return f"{number:,}" if number else "-"
