"""The lines that Caffe's solver logs through glog, from the versions of 2013 to the last."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from blobmem.logs.record import Log, Row

_PREFIX = re.compile(r"[IWEF](?P<date>\d{4}|\d{8}) (?P<time>\d\d:\d\d:\d\d\.\d{1,6})\s+\d+ \S+:\d+\] ")
_NUMBER = r"(?P<value>[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|\.\d+|nan|inf))(?![\w.#])"
_ITERATION = r"(?P<iteration>\d{1,18})"  # beyond some thousands Python refuses digits
_BEGIN = re.compile(r"Solving |Starting Optimization")
_TEST = re.compile(rf"Iteration {_ITERATION}, Testing net \(#(?P<net>\d{{1,18}})\)", re.IGNORECASE)
_LOSS = re.compile(rf"Iteration {_ITERATION}(?: \([^)]*\))?, loss = {_NUMBER}", re.IGNORECASE)
_RATE = re.compile(rf"Iteration {_ITERATION}, lr = {_NUMBER}", re.IGNORECASE)
_OUTPUT = re.compile(rf"(?P<kind>Train|Test) net output #\d+: (?P<name>\S+) = {_NUMBER}", re.IGNORECASE)
_SCORE = re.compile(rf"Test score #(?P<name>\d+): {_NUMBER}", re.IGNORECASE)
_HALF_A_YEAR = timedelta(days=183)


class Glog:
    """Reads Caffe's lines, one at a time, into a log."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._clock = _Clock()
        self._train: Row | None = None
        self._test: Row | None = None
        self._counts: dict[str, int] = {}

    def read(self, line: str) -> None:
        """Take a line in; others than Caffe's are ignored."""
        prefix = _PREFIX.search(line)
        text = line[prefix.end() :] if prefix else line
        if prefix:
            self._clock.show(prefix["date"], prefix["time"])
        text = text.strip()
        if _BEGIN.match(text):
            self._clock.start()
            self._log.restart()
            self._train = self._test = None
        elif match := _TEST.match(text):
            self._begin(Row(int(match["iteration"]), int(match["net"])))
        elif match := _LOSS.match(text):
            self._report(int(match["iteration"]), "loss", float(match["value"]))
        elif match := _RATE.match(text):
            self._report(int(match["iteration"]), "lr", float(match["value"]))
        elif match := _OUTPUT.match(text):
            is_train = match["kind"].lower() == "train"
            self._put(self._train if is_train else self._test, match["name"], float(match["value"]))
        elif match := _SCORE.match(text):  # of 2013, when outputs had numbers for names
            self._put(self._test, f"score{match['name']}", float(match["value"]))

    def _begin(self, row: Row) -> None:
        if self._clock.seconds is not None:
            row.values["seconds"] = self._clock.seconds
        self._log.add(row)
        self._counts = {}
        if row.net is None:
            self._train = row
        else:
            self._test = row

    def _report(self, iteration: int, name: str, value: float) -> None:
        """Loss and rate have lines of their own, whichever comes first: it is the rate in versions of 2013."""
        row = self._train
        if row is None or row.iteration != iteration or name in row.values:
            row = Row(iteration)
            self._begin(row)
        row.values[name] = value

    def _put(self, row: Row | None, name: str, value: float) -> None:
        """An output's value; several values of one output have its name, and are told apart by their order."""
        if row is None:
            return
        name = name if row.net is not None else f"output_{name}"
        seen = self._counts.get(name, 0)
        self._counts[name] = seen + 1
        if seen == 1 and name in row.values:  # it may be another row that has it
            row.values[f"{name}[0]"] = row.values.pop(name)
        row.values[f"{name}[{seen}]" if seen else name] = value


class _Clock:
    """Seconds from stamps that mostly have no year."""

    def __init__(self) -> None:
        self.now: float | None = None
        self._last: datetime | None = None
        self._begin = 0.0

    @property
    def seconds(self) -> float | None:
        """Seconds since the start, or since the first stamp; None without stamps."""
        return None if self.now is None else round(self.now - self._begin, 6)

    def start(self) -> None:
        """Count from the last stamp."""
        self._begin = self.now or 0.0

    def show(self, date: str, time: str) -> None:
        """Take a stamp in; one that is no time of any year is ignored."""
        year = date[:-4]
        try:
            # a leap year, which has all days
            stamp = datetime.strptime(f"{year or 2000}{date[-4:]} {time}", "%Y%m%d %H:%M:%S.%f")
        except ValueError:
            return
        if self._last is None:
            self.now = 0.0
        else:
            step = stamp - self._last
            if not year:
                step = _without_year(self._last, stamp)
            self.now = (self.now or 0.0) + step.total_seconds()
        self._last = stamp


def _without_year(earlier: datetime, later: datetime) -> timedelta:
    """From one stamp to the next. Far back means that a year has ended; a 29 February is only where a stamp is."""
    step = later - earlier
    days = [(stamp.month, stamp.day) for stamp in (earlier, later)]
    if min(days) < (2, 29) < max(days):
        step -= timedelta(days=1) if later > earlier else timedelta(days=-1)
    return step + timedelta(days=365) if step < -_HALF_A_YEAR else step
