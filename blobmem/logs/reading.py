"""Reading logs: lines `event=... key=value ...` of `blobmem train`, and Caffe's, one file of either or of both."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable

from blobmem.errors import NetError
from blobmem.logs.glog import Glog
from blobmem.logs.record import Log, Row
from blobmem.proto.files import PathLike

_PAIR = re.compile(r'([^\s=]+)=("(?:[^"\\]|\\.)*"|\S*)')


def read_log(path: PathLike) -> Log:
    """The log in a file. Lines that say nothing of training are ignored.

    Raises OSError if the file cannot be read, NetError if it has no line about training or tests.
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        log = read_lines(file, os.fspath(path))
    if not log:
        raise NetError(
            f"{os.fspath(path)} has no line of a training run: expected the log of `blobmem train` (--log FILE, or its "
            f"output in a file), or the output of Caffe's train"
        )
    return log


def read_lines(lines: Iterable[str], name: str) -> Log:
    """The log that lines are; false if they hold nothing."""
    log = Log(name)
    glog = Glog(log)
    for line in lines:
        if line.startswith("event="):
            _read_event(line, log)
        else:
            glog.read(line)
    return log


def _read_event(line: str, log: Log) -> None:
    pairs = {name: _plain(value) for name, value in _PAIR.findall(line)}
    event = pairs.pop("event")
    if event == "start":
        log.restart()
    if event not in ("train", "test"):
        return
    try:
        iteration = int(pairs.pop("iteration"))
        net = int(pairs.pop("test_net")) if event == "test" else None
    except (KeyError, ValueError):  # a line that was cut off
        return
    values = {}
    for name, value in pairs.items():
        with contextlib.suppress(ValueError):
            values[name] = float(value)
    if values:
        log.add(Row(iteration, net, values))


def _plain(value: str) -> str:
    """A value without its quotes, if it has any."""
    if value.startswith('"'):
        with contextlib.suppress(ValueError):
            return str(json.loads(value))
    return value
