"""Logs as tables in text (CSV), a row for each report."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from blobmem.logs.record import Log, Row
from blobmem.proto.files import write_atomic

_FIRST = ("seconds", "loss", "lr", "waited")


def write_csv(logs: Sequence[Log], prefix: str) -> list[str]:
    """Write PREFIX.train.csv and PREFIX.test.csv and return these names.

    Columns: `log` if there are several, `iteration`, in tests `test_net`, then the values. What was not reported is
    empty. Raises NetError if a file cannot be written.
    """
    names = [f"{prefix}.train.csv", f"{prefix}.test.csv"]
    for name, tables in zip(names, ([log.train for log in logs], [log.test for log in logs]), strict=True):
        heads = ["iteration"] if name == names[0] else ["iteration", "test_net"]
        write_atomic(name, _csv(logs, tables, heads).encode())
    return names


def _csv(logs: Sequence[Log], tables: Sequence[Sequence[Row]], heads: Sequence[str]) -> str:
    found = dict.fromkeys(name for rows in tables for row in rows for name in row.values)
    values = [name for name in _FIRST if name in found] + [name for name in found if name not in _FIRST]
    several = len(logs) > 1
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*(["log"] if several else []), *heads, *values])
    for log, rows in zip(logs, tables, strict=True):
        for row in rows:
            cells = [*([log.name] if several else []), row.iteration, *([] if row.net is None else [row.net])]
            writer.writerow([*cells, *(row.values.get(name, "") for name in values)])
    return text.getvalue()
