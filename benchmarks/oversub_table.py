"""The section on less memory than a net needs in docs/benchmarks.md, and the picture of its curves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from html import escape
from typing import Any

from benchmarks.gpu_table import BESIDE, NAMES, machine_of, name_of, number, ratio

MIB, MB = 2**20, 1e6
PICTURE = "pictures/oversubscription.svg"

TEXT = f"""
## Less memory than a net needs

{{commands}}

On {{machine}}. Training steps on constant data: ours is `Solver.step` of a net with `memory="train"`, captured; what it
holds without a limit is the need. PyTorch runs the same net, in the layout in which it is faster, halves by autocast:
plain, the plain step as a CUDA graph, with `save_on_cpu(pin_memory=True)`, and checkpointed, between the layers where
least is alive, in the fewest segments that hold no more than our limit (if none do, in those that hold least). MiB are
peaks, by our statistics and by PyTorch's allocator. {BESIDE}
Where the JSON has `torch_date`, PyTorch's figures are of that date, and ours at a limit of that limit's `date`, if it
has one; the others are of a later one on a card of the same kind. All of a row is of one kind of card.

| net, batch | GPU | math | need, MiB | ours, ms | PyTorch, MiB | ms | captured, MiB | ms | ours / captured |
| --- | --- | --- |{{bars}}
"""
LIMITS = """
The same with limits, or the net's least where that is larger: what is held, MB that leave and come back in a step,
speed against no limit, the two steps taking turns; the floor, which no mix of keeping, evicting before backward and
making anew is faster than in which calls that have room run whole (`benchmarks/floor.py`), nor is the step without a
limit; slices of the batch of what has room are no such mix, nor are those that have their gradients with the loss,
moments and gradients had from what wide convolutions read, what is joined of parts of parts, and what leaves during
backward, and may be. Bold is the fastest of those that hold no more than the limit.

| net, batch | GPU | math | need / limit | limit, MiB | held, MiB | out, MB | in, MB | ours, ms | speed | floor, ms | ours / floor | `save_on_cpu`, MiB | ms | checkpointed, MiB | ms | segments |
| --- | --- | --- |{bars}
"""  # noqa: E501
CURVES = f"""
Items in a second as the batch doubles, at one limit, where PyTorch's ways end as they take more. One without a line
does so from the first batch on, or was not measured (the JSON tells):

```{{image}} {PICTURE}
:alt: Curves of speed over batch size, of ours and of PyTorch's ways, each up to the largest batch within the limit.
:width: 100%
```
"""
SIDES = {
    "ours": ("blobmem", "#4c8eda"), "plain": ("PyTorch", "#777777"), "on_host": ("save_on_cpu", "#e8883a"),
    "checkpointed": ("checkpointed", "#58b368"),
}  # fmt: skip
"""Of each side of a curve its name and its color."""
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 380, 280, 56, 44, 14, 44  # of a panel, and the margins in it


def section(report: dict[str, Any]) -> str:
    """The tables, and the picture if there are curves."""
    rows = report["results"]
    commands = dict.fromkeys(row["command"] for row in (*rows, *report["curves"]))
    machines = "; and on ".join(machine_of({"machine": each}) for each in report["machines"].values())
    text = TEXT.format(
        commands="\n".join(f"- `{command}`" for command in commands), machine=machines, bars=" ---: |" * 7
    )
    there = [row for row in rows if "ms" in row["ours"]]
    text += "".join(f"| {' | '.join(_need(row))} |\n" for row in there)
    text += LIMITS.format(bars=" ---: |" * 14)
    text += "".join(f"| {' | '.join(cells)} |\n" for row in there for cells in _limits(row))
    failed = [f"- {line}\n" for row in (*rows, *report["curves"]) for line in _failed(row)]
    return text + ("\nNot measured:\n\n" + "".join(failed) if failed else "") + (CURVES if report["curves"] else "")


def _need(row: dict[str, Any]) -> list[str]:
    plain, graph = (row.get("torch", {}).get(name, {}) for name in ("plain", "graph"))
    ours = row["ours"]
    cells = (text for side in (ours, plain, graph) for text in (_mib(side), number(side.get("ms"))))
    return [name_of(row), _gpu(row), row["math"], *cells, ratio(ours["ms"], graph.get("ms"))]


def _limits(row: dict[str, Any]) -> Iterator[list[str]]:
    on_host = row.get("torch", {}).get("on_host", {})
    for each in row["limits"]:
        ours, theirs = each["ours"], each.get("checkpointed", {})
        granted = ours.get("granted_bytes", each["limit"])
        fitting = [side["ms"] for side in (ours, on_host, theirs) if side.get("peak_bytes", math.inf) <= granted]
        took = [_bold(side.get("ms"), min(fitting, default=None)) for side in (ours, on_host, theirs)]
        yield [
            name_of(row), _gpu(row), row["math"], number(each["times"], 1),
            number(granted / MIB, 0) + (" (least)" if granted > each["limit"] else ""), _mib(ours),
            *(number(ours[key] / MB, 0) if key in ours else "-" for key in ("out_bytes", "in_bytes")), took[0],
            f"{ours['speed']:.0%}" if "speed" in ours else "-", number(each.get("floor_ms")),
            ratio(ours.get("ms"), each.get("floor_ms")), _mib(on_host), took[1], _mib(theirs), took[2],
            str(theirs.get("segments", "-")),
        ]  # fmt: skip


def _gpu(row: dict[str, Any]) -> str:
    return str(row["gpu"]).removeprefix("NVIDIA ").partition(" ")[0]


def _mib(side: dict[str, Any]) -> str:
    return number(side["peak_bytes"] / MIB, 0) if "peak_bytes" in side else "-"


def _bold(ms: float | None, best: float | None) -> str:
    return f"**{number(ms)}**" if ms is not None and ms == best else number(ms)


def _failed(row: dict[str, Any]) -> Iterator[str]:
    """A line for each figure that could not be had."""
    sides = [(name, side) for name, side in row.items() if name in SIDES] + [*row.get("torch", {}).items()]
    for each in row.get("limits", []):
        sides += [(f"{name}, need / limit {each['times']}", each[name]) for name in SIDES if name in each]
    for name, side in sides:
        if "error" in side:
            yield f"{name_of(row)}, {row['math']}, {name}: {side['error'].splitlines()[0][:200]}"


# -------------------------------------------------------------------- the picture


def picture(curves: list[dict[str, Any]]) -> str:
    """Curves of items in a second over the batch as SVG; each net, math and limit has a panel."""
    panels: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in curves:
        panels.setdefault((row["net"], row["math"], row["limit"]), []).append(row)
    across = min(3, len(panels))
    size = across * WIDTH, -(-len(panels) // across) * HEIGHT + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" '
        f'font-family="system-ui, sans-serif" font-size="12">\n'
        f'<rect width="{size[0]}" height="{size[1]}" rx="8" fill="#ffffff"/>\n'
    ]
    for at, (key, rows) in enumerate(panels.items()):
        x, y = at % across * WIDTH, at // across * HEIGHT
        parts.append(f'<g transform="translate({x} {y})">\n{_panel(*key, sorted(rows, key=_batch))}</g>\n')
    for at, (name, color) in enumerate(SIDES.values()):
        x, y = 20 + at * (size[0] - 20) / len(SIDES), size[1] - 14
        parts.append(f'<circle cx="{x:.0f}" cy="{y - 4}" r="4" fill="{color}"/>')
        parts.append(f'<text x="{x + 9:.0f}" y="{y}" fill="#333333">{name}</text>\n')
    return "".join((*parts, "</svg>\n"))


def _batch(row: dict[str, Any]) -> int:
    return int(row["batch"])


def _panel(net: str, precision: str, limit: int, rows: list[dict[str, Any]]) -> str:
    """One set of axes with a line for each side, of the batches that it takes within the limit."""
    lines = {
        name: [(at, row["batch"] / row[name]["ms"] * 1e3) for at, row in enumerate(rows) if _fits(row.get(name), limit)]
        for name in SIDES
    }
    top = _round(max((speed for line in lines.values() for _, speed in line), default=1))
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(at: float, speed: float) -> tuple[float, float]:
        return LEFT + (at + 0.5) * wide / len(rows), TOP + high * (1 - speed / top)

    title = escape(f"{NAMES.get(net, net)}, {precision}, {limit / 2**30:.3g} GiB")
    parts = [f'<text x="{LEFT}" y="{TOP - 16}" font-size="14" fill="#333333">{title}</text>\n']
    for speed in (0.0, top / 2, top):
        _, y = place(0, speed)
        parts.append(f'<path d="M{LEFT} {y:.1f} h{wide}" stroke="#dddddd"/>')
        parts.append(_label(LEFT - 6, y + 4, f"{speed:g}", "end"))
    parts += [_label(place(at, 0)[0], HEIGHT - BOTTOM + 18, str(row["batch"]), "middle") for at, row in enumerate(rows)]
    parts.append(_label(LEFT + wide / 2, HEIGHT - 8, "batch; up: items in a second", "middle"))
    for name, line in lines.items():
        parts.append(_curve([place(*point) for point in line], SIDES[name][1]))
    return "".join(parts)


def _fits(side: dict[str, Any] | None, limit: int) -> bool:
    return side is not None and "ms" in side and side["peak_bytes"] <= limit


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#333333">{text}</text>\n'


def _curve(points: Iterable[tuple[float, float]], color: str) -> str:
    at = [f"{x:.1f} {y:.1f}" for x, y in points]
    dots = "".join('<circle cx="{}" cy="{}" r="3"/>'.format(*each.split()) for each in at)
    line = f'<path d="M{" L".join(at)}" fill="none" stroke="{color}" stroke-width="2"/>' if at else ""
    return f'{line}<g fill="{color}">{dots}</g>\n'


def _round(value: float) -> float:
    """The next of 1, 1.5, 2, 3, 4, 5, 6, 8 times a power of ten from a value on."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(each * power for each in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if each * power >= value)
