"""Timelines as one page that needs nothing else, drawn by Bokeh (`pip install 'blobmem[plot]'`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from blobmem.proto.files import PathLike, write_atomic
from blobmem.timeline.rows import Row, Timeline

LABELS = {"planned": "planned: arrays take turns", "unplanned": "unplanned: each has its own place for the whole pass"}

IN_ARENA = ("data", "diffs", "internal", "workspace", "input buffers", "gradients")
"""Purposes of what may take turns, each in its color."""

_MIB = 2**20
_SWITCH = "parts.forEach((part, index) => { part.visible = index == control.active })"


def write_page(schemes: Mapping[str, Sequence[Timeline]], path: PathLike, title: str) -> None:
    """Write what `timelines` gives as HTML that has all its scripts in it; the nets of a scheme are side by side.

    Raises ImportError without Bokeh, NetError if the file cannot be written.
    """
    try:
        from bokeh.embed import file_html
        from bokeh.resources import INLINE
    except ImportError:
        raise ImportError(
            "bokeh, which draws the timeline, is not installed: pip install 'blobmem[plot]'", name="bokeh"
        ) from None
    write_atomic(path, file_html(_page(schemes, title), resources=INLINE, title=title).encode())


def _page(schemes: Mapping[str, Sequence[Timeline]], title: str) -> Any:
    from bokeh.layouts import column
    from bokeh.models import CustomJS, Div, RadioButtonGroup

    parts = [_part(timelines, held=scheme == "unplanned") for scheme, timelines in schemes.items()]
    for part in parts[1:]:
        part.visible = False
    control = RadioButtonGroup(labels=[LABELS[scheme] for scheme in schemes], active=0)
    control.js_on_change("active", CustomJS(args={"control": control, "parts": parts}, code=_SWITCH))
    text = f"<h2>{escape(title)}</h2>Across: the calls of a pass. Up: addresses, in MiB."
    return column(Div(text=text), control, *parts, sizing_mode="stretch_width")


def _part(timelines: Sequence[Timeline], held: bool) -> Any:
    """The nets of one scheme, at one scale; `held` if each array has its place for the whole pass."""
    from bokeh.layouts import column, row
    from bokeh.models import Div, Range1d

    wide = {"sizing_mode": "stretch_width"}
    y_range = Range1d(0, 1.02 * max(timeline.nbytes or 1 for timeline in timelines) / _MIB)
    shown = [_figure(timeline, y_range, held) for timeline in timelines]
    figures = [
        column(figure, _copies(timeline, figure.x_range), **wide) if timeline.copies else figure
        for figure, timeline in zip(shown, timelines, strict=True)
    ]
    tables = [Div(text=_peak_table(timeline), **wide) for timeline in timelines]
    return column(row(figures, **wide), row(tables, **wide), **wide)


def _figure(timeline: Timeline, y_range: Any, held: bool) -> Any:
    from bokeh.models import ColumnDataSource
    from bokeh.palettes import Bright7
    from bokeh.plotting import figure
    from bokeh.transform import factor_cmap

    title = f"{timeline.net}: {_size(timeline.nbytes)}"
    if held:
        title += f", at most {_size(max(timeline.loads()))} in use"
    shown = figure(
        title=title, y_range=y_range, x_range=(0, len(timeline.calls)), height=560, min_width=320,
        sizing_mode="stretch_width", tools="pan,wheel_zoom,box_zoom,reset,save", active_scroll="wheel_zoom",
        y_axis_label="MiB",
    )  # fmt: skip
    shown.toolbar.logo = None
    color = factor_cmap("purpose", Bright7, IN_ARENA)
    # outlined in their own color, so that what is thinner than a pixel is still seen
    look = {"fill_color": color, "line_color": color, "line_width": 0.5, "source": ColumnDataSource(_columns(timeline))}
    if held:
        shown.quad(0, len(timeline.calls), "top", "bottom", fill_alpha=0.2, line_alpha=0, **look)
    used = shown.quad("left", "right", "top", "bottom", fill_alpha=0.75, legend_group="purpose", **look)
    _explain(shown, used, timeline)
    return shown


def _copies(timeline: Timeline, x_range: Any) -> Any:
    """A row for each of the two streams of copies, over the same calls."""
    from bokeh.models import ColumnDataSource, HoverTool
    from bokeh.plotting import figure

    shown = figure(
        y_range=["copies back", "copies away"], x_range=x_range, height=110, min_width=320, toolbar_location=None,
        sizing_mode="stretch_width", tools="",
    )  # fmt: skip
    columns = {
        "name": [copy.name for copy in timeline.copies],
        "nbytes": [copy.nbytes for copy in timeline.copies],
        "mib": [copy.nbytes / _MIB for copy in timeline.copies],
        "stream": ["copies away" if copy.out else "copies back" for copy in timeline.copies],
        "left": [copy.begin for copy in timeline.copies],
        "right": [copy.end for copy in timeline.copies],
        "ms": [copy.ms for copy in timeline.copies],
        "first": [timeline.label(copy.begin) for copy in timeline.copies],
        "last": [timeline.label(copy.end) for copy in timeline.copies],
    }
    bars = shown.hbar(
        "stream", 0.7, "right", "left", line_color="#ffffff", line_width=0.5, source=ColumnDataSource(columns)
    )
    fields = ("name", "bytes", "reckoned", "from", "to")
    texts = ("@name", "@nbytes{0,0} (@mib{0,0.0} MiB)", "@ms{0,0.000} ms", "@first", "@last")
    shown.add_tools(HoverTool(renderers=[bars], tooltips=list(zip(fields, texts, strict=True))))
    shown.xaxis.visible = False
    return shown


def _columns(timeline: Timeline) -> dict[str, list[Any]]:
    # lists, as the names are to be found in the page as text
    rows = timeline.rows
    return {
        "name": [row.name for row in rows],
        "purpose": [row.purpose for row in rows],
        "shape": [_shape(row) for row in rows],
        "nbytes": [row.nbytes for row in rows],
        "mib": [row.nbytes / _MIB for row in rows],
        "layer": [row.layer for row in rows],
        "left": [row.first for row in rows],
        "right": [row.last + 1 for row in rows],
        "first": [timeline.label(row.first) for row in rows],
        "last": [timeline.label(row.last) for row in rows],
        "bottom": [row.offset / _MIB for row in rows],
        "top": [(row.offset + row.nbytes) / _MIB for row in rows],
    }


def _explain(shown: Any, used: Any, timeline: Timeline) -> None:
    """Give a figure names of calls, texts for blocks and a mark at the peak."""
    from bokeh.models import BasicTicker, CustomJSTickFormatter, HoverTool, Span

    shown.xaxis.ticker = BasicTicker(min_interval=1, desired_num_ticks=12)
    names = [label.partition(":")[0] for label in timeline.calls]
    shown.xaxis.formatter = CustomJSTickFormatter(args={"names": names}, code="return names[tick] ?? ''")
    shown.xaxis.major_label_orientation = 0.8
    fields = ("name", "purpose", "shape", "bytes", "layer", "first call", "last call")
    columns = ("@name", "@purpose", "@shape", "@nbytes{0,0} (@mib{0,0.0} MiB)", "@layer", "@first", "@last")
    shown.add_tools(HoverTool(renderers=[used], tooltips=list(zip(fields, columns, strict=True))))
    shown.add_layout(Span(location=timeline.peak() + 0.5, dimension="height", line_dash="dashed", line_width=2))
    if timeline.rows:
        shown.legend.orientation, shown.legend.location = "horizontal", "top_left"
        shown.add_layout(shown.legend[0], "above")  # beside the blocks: they are to be pointed at


def _peak_table(timeline: Timeline) -> str:
    """What is in use at the dashed line, as HTML."""
    peak = timeline.peak()
    live = timeline.live(peak)
    lines = "".join(
        f"<tr><td>{escape(row.name)}<td>{row.purpose}<td>{_shape(row)}<td align=right>{row.nbytes / _MIB:,.2f}"
        f"<td align=right>{row.first}<td align=right>{row.last}"
        for row in live
    )
    return (
        f"<b>The peak (dashed), call {peak} {escape(timeline.calls[peak])}: {_size(sum(row.nbytes for row in live))} "
        f"in {len(live)} arrays</b><div style='max-height: 24em; overflow-y: auto'><table>"
        f"<tr><th>array<th>purpose<th>shape<th>MiB<th>from call<th>to{lines}</table></div>"
    )


def _shape(row: Row) -> str:
    return " x ".join(map(str, row.shape))


def _size(nbytes: int) -> str:
    return f"{nbytes / _MIB:,.1f} MiB"
