"""Curves of logs over iterations, through matplotlib (`pip install 'blobmem[plot]'`)."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import Any

from blobmem.errors import NetError
from blobmem.logs.record import CLOCKS, Log, Series
from blobmem.proto.files import PathLike, write_atomic

_STYLES = ("-", "--", "-.", ":")


def plot(logs: Sequence[Log], path: PathLike) -> None:
    """Write a picture of the logs, one over the other, in the format that the file's name ends with.

    Losses and errors are above; accuracies, and outputs whose names do not tell what they are, below. A log has one
    style of line. Raises ImportError without matplotlib, NetError if it does not know the format or the file cannot be
    written.
    """
    figure = _figure(logs)
    picture = io.BytesIO()
    extension = os.path.splitext(path)[1].removeprefix(".").lower()
    known = figure.canvas.get_supported_filetypes()
    if extension not in known:
        raise NetError(f"{os.fspath(path)}: expected a name that ends with a format: {', '.join(sorted(known))}")
    figure.savefig(picture, format=extension, dpi=150)
    write_atomic(path, picture.getvalue())


def _figure(logs: Sequence[Log]) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(
            "matplotlib, which draws the curves, is not installed: pip install 'blobmem[plot]'", name="matplotlib"
        ) from None
    curves = [(number, log, series) for number, log in enumerate(logs) for series in log.series() if _shown(series)]
    panels = [(title, [c for c in curves if (c[2].direction < 0) is below]) for title, below in _PANELS]
    panels = [(title, drawn) for title, drawn in panels if drawn]
    if not panels:
        raise NetError(f"{logs[0].name}: no loss and no output to plot")
    figure = Figure(figsize=(8, 4 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, drawn) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        for number, log, series in drawn:
            label = series.title if len(logs) == 1 else f"{log.name}: {series.title}"
            marker = "." if len(series.points) < 50 else ""
            axes.plot(*zip(*series.points, strict=True), _STYLES[number % 4], marker=marker, label=label)
        axes.set_xlabel("iteration")
        axes.set_ylabel(title)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    return figure


_PANELS = (("loss", True), ("accuracy and other outputs", False))


def _shown(series: Series) -> bool:
    """All but clocks, rates, and a train net's single output that is the loss again."""
    return series.name not in (*CLOCKS, "lr") and series.name != "output_loss"
