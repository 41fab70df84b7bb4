"""What commands print: bars and tables on a terminal, aligned text and key=value lines anywhere else."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

Row = Sequence[str] | str
"""A row's cells, or a heading over the rows below it."""


class Output:
    """Standard output and standard error of one command.

    Attributes:
        terminal: whether standard output is a terminal that can draw.
        log: a file that gets a line for each event, whatever standard output is; or None.
    """

    def __init__(self) -> None:
        self._console = Console(highlight=False, markup=False, soft_wrap=True)
        self._errors = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self._drawing = False
        self.log: TextIO | None = None
        self.terminal = self._console.is_terminal and not self._console.is_dumb_terminal

    def say(self, text: str = "", style: str | None = None) -> None:
        """Print text as it is, to standard output."""
        self._console.print(text, style=style)

    def event(self, event: str, human: str, /, **values: Any) -> None:
        """Say that something happened: `human` on a terminal, one line `event=... key=value ...` anywhere else.

        With nothing for people a terminal shows nothing.
        """
        line = pairs({"event": event, **values})
        if self.log is not None:
            print(line, file=self.log, flush=True)
        if human or not self.terminal:
            self.say(human if self.terminal else line)

    def note(self, text: str) -> None:
        """Print a remark that is not a result: to standard error, or above the bar while one is drawn."""
        console = self._console if self._drawing else self._errors
        console.print(text, style="yellow" if text.startswith("warning:") else None)

    def error(self, text: str) -> None:
        """Print why the command failed, to standard error."""
        self._errors.print(Text.assemble(("blobmem: ", "bold red"), text))

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Row], texts: int = 1) -> None:
        """Print a table; the first `texts` columns are text, the others numbers. Names may have several lines."""
        if self.terminal:
            self._rich_table(title, columns, rows, texts)
        else:
            self.say("\n".join(plain_table(title, columns, rows, texts)))

    def _rich_table(self, title: str, columns: Sequence[str], rows: Sequence[Row], texts: int) -> None:
        from rich import box
        from rich.measure import Measurement
        from rich.table import Table

        table = Table(title=Text(title, "bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for index, name in enumerate(columns):
            table.add_column(Text(name), justify="right" if index >= texts else "left", no_wrap=True)
        for index, row in enumerate(rows):
            if isinstance(row, str):
                if index:
                    table.add_section()
                table.add_row(Text(row, "bold cyan"))
            else:
                table.add_row(*map(Text, row))

        def width() -> int:
            return Measurement.get(self._console, self._console.options.update(width=10_000), table).maximum

        if width() > self._console.width:
            table.show_edge, table.padding = False, (0, 1, 0, 0)
        if width() > self._console.width:
            table.padding = (0, 0, 0, 0)
        if width() > self._console.width:  # the terminal breaks its lines: cut numbers would be worse
            self.say("\n".join(plain_table(title, columns, rows, texts)))
        else:
            self._console.print(table)

    @contextlib.contextmanager
    def progress(self, total: int | None, unit: str, done: int = 0) -> Iterator[Bar]:
        """A bar with speed and time left while the block runs; nothing is drawn except on a terminal.

        A total of None has yet to be told, with `Bar.update`.
        """
        if not self.terminal:
            yield Bar(None, 0)
            return
        # on a narrow terminal the bar gives way, not what stands beside it
        columns = (
            BarColumn(bar_width=30),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            _Speed(unit),
            TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
            TextColumn("left", table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[remark]}", markup=False, table_column=Column(no_wrap=True)),
        )
        with Progress(*columns, console=self._console, transient=True) as progress:
            self._drawing = True
            try:
                yield Bar(progress, progress.add_task("", total=total, completed=done, remark=""))
            finally:
                self._drawing = False


class Bar:
    """A progress bar, or nothing at all."""

    def __init__(self, progress: Progress | None, task: Any) -> None:
        self._progress = progress
        self._task = task

    def update(self, done: int, total: int | None = None, remark: str | None = None) -> None:
        """Show how many steps are done, of how many, and a remark beside it (None: as before)."""
        if self._progress is not None:
            self._progress.update(self._task, completed=done, total=total)
            if remark is not None:
                self._progress.update(self._task, remark=remark)


class _Speed(ProgressColumn):
    """Steps per second, or seconds per step where that is longer."""

    def __init__(self, unit: str) -> None:
        super().__init__(table_column=Column(no_wrap=True))
        self.unit = unit

    def render(self, task: Task) -> Text:
        speed = task.speed
        return Text(f"- {_plural(self.unit)}/s" if not speed else per_second(speed, self.unit))


def per_second(speed: float, unit: str) -> str:
    """A speed for people: "31.2 iterations/s", "4.1 s/iteration"."""
    return f"{speed:.1f} {_plural(unit)}/s" if speed >= 1 or not speed else f"{1 / speed:.1f} s/{unit}"


def _plural(unit: str) -> str:
    return unit + ("es" if unit.endswith(("s", "ch")) else "s")


def mib(nbytes: int) -> str:
    """Bytes in MiB with one decimal; what is not nothing but would read so is "<0.1"."""
    text = f"{nbytes / 2**20:.1f}"
    return "<0.1" if nbytes > 0 and text == "0.0" else text


_PLAIN = re.compile(r"[\w.,:;/+\-()\[\]@%~*]+")


def pairs(values: Mapping[str, Any]) -> str:
    """`key=value key=value`; a float has six digits, a text with spaces or quotes is written as in JSON."""
    return " ".join(f"{key}={_value(value)}" for key, value in values.items())


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Row], texts: int = 1) -> list[str]:
    """The lines of a table in plain text: title, names of columns, a rule, rows."""
    heads = [name.split("\n") for name in columns]
    depth = max(map(len, heads))
    head_rows = [[([""] * (depth - len(head)) + head)[line] for head in heads] for line in range(depth)]
    cells = [*head_rows, *(row for row in rows if not isinstance(row, str))]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]

    def line(row: Sequence[str]) -> str:
        padded = [
            text.rjust(width) if index >= texts else text.ljust(width)
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    body = [row if isinstance(row, str) else line(row) for row in rows]
    return [title, *map(line, head_rows), rule, *body]


def described(values: Mapping[str, Any]) -> str:
    """Numbers in a sentence: "accuracy 0.9712, loss 0.0931"."""
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())
