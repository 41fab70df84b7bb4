"""Timelines as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from blobmem.proto.files import PathLike, write_atomic
from blobmem.timeline.rows import Row, Timeline

DEEPEST = 100
"""Slices that lie within each other on one track. Perfetto leaves out what is deeper than some hundreds."""

Event = dict[str, Any]


def write_trace(timelines: Sequence[Timeline], path: PathLike) -> None:
    """Write timelines in the Trace Event Format, a process for each net. A call takes a microsecond.

    Raises NetError if the file cannot be written.
    """
    events = [event for pid, timeline in enumerate(timelines, start=1) for event in _events(pid, timeline)]
    write_atomic(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}).encode())


def _events(pid: int, timeline: Timeline) -> Iterator[Event]:
    yield _name("process", pid, 0, timeline.net)
    yield _name("thread", pid, 0, "calls")
    for at, label in enumerate(timeline.calls):
        yield _slice(pid, 0, label, "call", at, at, {})
    for at, load in enumerate((*timeline.loads(), 0)):
        yield {"ph": "C", "pid": pid, "ts": at, "name": "bytes in use", "args": {"bytes": load}}
    tid = 0
    for out, name in ((True, "copies away"), (False, "copies back")):
        copies = [copy for copy in timeline.copies if copy.out is out]
        if copies:
            tid += 1
            yield _name("thread", pid, tid, name)
        for copy in copies:
            yield {
                "ph": "X", "pid": pid, "tid": tid, "ts": copy.begin, "dur": copy.end - copy.begin, "name": copy.name,
                "cat": name, "args": {"bytes": copy.nbytes, "ms": copy.ms},
            }  # fmt: skip
    for purpose in dict.fromkeys(row.purpose for row in timeline.rows):
        for track in _tracks(row for row in timeline.rows if row.purpose == purpose):
            tid += 1
            yield _name("thread", pid, tid, purpose)
            for row in track.rows:
                known = {"shape": list(row.shape), "bytes": row.nbytes, "offset": row.offset, "layer": row.layer}
                yield _slice(pid, tid, row.name, purpose, row.first, row.last, known)


def _name(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": f"{what}_name", "args": {"name": name}}


def _slice(pid: int, tid: int, name: str, category: str, first: int, last: int, args: dict[str, Any]) -> Event:
    place: Event = {"ph": "X", "pid": pid, "tid": tid, "ts": first, "dur": last - first + 1}
    return {**place, "name": name, "cat": category, "args": args}


class _Track:
    """Rows of which each begins after another's end or lies within it: others are no slices of one track.

    Attributes:
        rows: in the order of first use, of two that begin together the longer one first.
    """

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._around: list[Row] = []  # the last one, and those that it lies within

    def takes(self, row: Row) -> bool:
        """Add a row if it can be here."""
        while self._around and self._around[-1].last < row.first:
            self._around.pop()
        if self._around and (row.last > self._around[-1].last or len(self._around) == DEEPEST):
            return False
        self.rows.append(row)
        self._around.append(row)
        return True


def _tracks(rows: Iterable[Row]) -> list[_Track]:
    tracks: list[_Track] = []
    for row in sorted(rows, key=lambda row: (row.first, -row.last)):
        if not any(track.takes(row) for track in tracks):
            tracks.append(_Track())
            tracks[-1].takes(row)
    return tracks
