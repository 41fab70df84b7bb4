"""Traces are what Perfetto takes: on one track slices lie within each other or apart."""

import json
from pathlib import Path

import pytest

from blobmem.timeline import Row, Timeline, timelines, write_trace

MODELS = Path(__file__).parents[2] / "models"


def written(found, path):
    write_trace(found, path)
    return json.loads(path.read_text())["traceEvents"]


def depth(events):
    """Of the slices of one track; they are asserted to nest."""
    around, deepest = [], 0
    for event in events:
        while around and around[-1] <= event["ts"]:
            around.pop()
        end = event["ts"] + event["dur"]
        assert not around or end <= around[-1]
        around.append(end)
        deepest = max(deepest, len(around))
    return deepest


@pytest.fixture(params=["lenet", "squeezenet"])
def found(request, monkeypatch):
    monkeypatch.chdir(MODELS.parent)
    return timelines(MODELS / request.param / "solver.prototxt")["planned"]


def test_slices_are_the_rows(found, tmp_path):
    events = written(found, tmp_path / "trace.json")
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(names.values()) == [timeline.net for timeline in found]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [event for event in events if event["ph"] == "X"]
    for pid, timeline in enumerate(found, start=1):
        mine = [e for e in slices if e["pid"] == pid]
        assert [(e["name"], e["ts"], e["dur"]) for e in mine if threads[pid, e["tid"]] == "calls"] == [
            (label, at, 1) for at, label in enumerate(timeline.calls)
        ]
        arrays = [
            (e["name"], threads[pid, e["tid"]], e["ts"], e["ts"] + e["dur"] - 1, e["args"]["bytes"], e["args"]["offset"])
            for e in mine if threads[pid, e["tid"]] != "calls"
        ]  # fmt: skip
        rows = [(row.name, row.purpose, row.first, row.last, row.nbytes, row.offset) for row in timeline.rows]
        assert sorted(arrays) == sorted(rows)
        counted = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == pid]
        assert counted == [*timeline.loads(), 0]
    for track in threads:
        assert 1 <= depth([e for e in slices if (e["pid"], e["tid"]) == track]) <= 100


def test_copies_are_on_tracks_of_their_own(evicting, tmp_path):
    events = written([evicting], tmp_path / "trace.json")
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    for out, name in ((True, "copies away"), (False, "copies back")):
        found = [e for e in events if e["ph"] == "X" and tracks[e["tid"]] == name]
        assert depth(found) == 1
        assert [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in found] == [
            (copy.name, copy.begin, pytest.approx(copy.end)) for copy in evicting.copies if copy.out is out
        ]


def test_no_track_is_deeper_than_can_be_shown(tmp_path):
    rows = [Row(f"r{n}", "data", (1,), 4, "l", n, 999 - n, 512 * n) for n in range(250)]
    events = written([Timeline("net", ["l: op"] * 1000, rows, 0)], tmp_path / "trace.json")
    arrays = [e for e in events if e["ph"] == "X" and e["cat"] == "data"]
    depths = [depth([e for e in arrays if e["tid"] == tid]) for tid in sorted({e["tid"] for e in arrays})]
    assert depths == [100, 100, 50]
