"""`blobmem parse-log`: what the log of a training run says, as a table, as CSV and as curves."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blobmem.cli import options

if TYPE_CHECKING:
    from blobmem.cli.output import Output
    from blobmem.logs.record import Log

DESCRIPTION = """\
Reads logs of `blobmem train` (its --log FILE, or its output in a file) and of Caffe's train, and shows the last and the
best value of each loss, accuracy and other output. --csv writes all values, --plot draws them over the iterations.
"""

EXAMPLE = """\
examples:
  blobmem train --solver models/lenet/solver.prototxt --log lenet.log
  blobmem parse-log lenet.log --csv lenet --plot lenet.png
  blobmem parse-log sgd.log adam.log --plot both.svg

Best is most for accuracies, least for losses and errors, and not told for others. A run that went on from a snapshot
replaces what the log has after that snapshot. Plots need matplotlib (pip install 'blobmem[plot]').
"""


def add(commands: Any) -> None:
    """Declare the command."""
    parser = options.new(commands, "parse-log", run, "a training log as table and curves", DESCRIPTION, EXAMPLE)
    parser.add_argument("logs", type=Path, nargs="+", metavar="LOG", help="a log file; several are put side by side")
    parser.add_argument("--csv", metavar="PREFIX", help="write PREFIX.train.csv and PREFIX.test.csv")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw loss and accuracy: .png, .svg, .pdf")


def run(args: argparse.Namespace, output: Output) -> int:
    """Read the logs, show and write what they say."""
    from blobmem.logs.plot import plot
    from blobmem.logs.reading import read_log
    from blobmem.logs.tables import write_csv

    logs = [read_log(path) for path in args.logs]
    for log in logs:
        _show(log, output)
    if args.csv is not None:
        for name in write_csv(logs, args.csv):
            output.event("csv", f"table: {name}", path=name)
    if args.plot is not None:
        try:
            plot(logs, args.plot)
        except ImportError as error:
            output.error(str(error))
            return 1
        output.event("plot", f"curves: {os.fspath(args.plot)}", path=args.plot)
    return 0


def _show(log: Log, output: Output) -> None:
    rows = []
    for series in log.series():
        iteration, value = series.last
        best = series.best
        shown = ["", ""] if best is None else [f"{best[1]:.6g}", str(best[0])]
        rows.append([series.title, str(len(series.points)), f"{value:.6g}", str(iteration), *shown])
    columns = ["", "reports", "last", "at\niteration", "best", "at\niteration"]
    output.table(log.name, columns, rows)
