"""A training run as its log tells it: rows of numbers by iteration."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

CLOCKS = ("seconds", "waited")
"""Values that count from the beginning of a run, in seconds."""

_HIGHER = re.compile(r"acc|top[-_]?\d|precision|recall|iou|auc|f1|(^|[^a-z])map([^a-z]|$)", re.IGNORECASE)
_LOWER = re.compile(r"loss|err", re.IGNORECASE)


@dataclass(slots=True)
class Row:
    """What was reported at one iteration: values by name, and the number of the test net (None in training)."""

    iteration: int
    net: int | None = None
    values: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Log:
    """A log's rows, in the order of iterations.

    In training `loss` is the net's, `lr` the learning rate, `seconds` the time since training began, `output_NAME` a
    single output; in tests the names are those of the outputs. A run that went on from a snapshot replaces what was
    reported after that snapshot, and its times add to those before.
    """

    name: str
    train: list[Row] = field(default_factory=list)
    test: list[Row] = field(default_factory=list)
    _restarted: bool = field(default=False, init=False, repr=False)
    _begin: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _last: dict[int | None, int] = field(default_factory=dict, init=False, repr=False)

    def __bool__(self) -> bool:
        return bool(self.train or self.test)

    def restart(self) -> None:
        """Training begins, or goes on: clocks are at 0 again, and the next row says at which iteration."""
        self._restarted = True

    def add(self, row: Row) -> None:
        """Append a row, in place of those of its kind that were reported at its iteration or later."""
        if self._restarted:
            self._restarted = False
            self._forget_after(row.iteration)
        rows = self.train if row.net is None else self.test
        if row.iteration <= self._last.get(row.net, -1):
            rows[:] = [old for old in rows if old.net != row.net or old.iteration < row.iteration]
        for name in CLOCKS:
            if name in row.values:
                row.values[name] += self._begin.get(name, 0.0)
        rows.append(row)
        self._last[row.net] = row.iteration

    def _forget_after(self, iteration: int) -> None:
        """Training goes on from there: leave out what came later, and let clocks add to what they said there."""
        for rows in (self.train, self.test):
            rows[:] = [row for row in rows if row.iteration <= iteration]
        before = self.train if iteration else []  # from iteration 0 it is another training
        self._begin = {name: max((row.values.get(name, 0.0) for row in before), default=0.0) for name in CLOCKS}

    def series(self) -> Iterator[Series]:
        """The values over iterations, by name: of training, then of each test net."""
        groups = {"train": self.train}
        for row in sorted(self.test, key=lambda row: row.net or 0):  # keeps the order of iterations
            groups.setdefault(f"test {row.net}", []).append(row)
        for group, rows in groups.items():
            names = dict.fromkeys(name for row in rows for name in row.values)
            for name in names:
                points = [(row.iteration, row.values[name]) for row in rows if name in row.values]
                yield Series(f"{group} {name.replace('output_', 'output ', 1)}", name, points)


@dataclass(slots=True)
class Series:
    """One value over the iterations: what to call it, its name in the log, its points."""

    title: str
    name: str
    points: list[tuple[int, float]]

    @property
    def direction(self) -> int:
        """1 where more is better (accuracies), -1 where less is (losses, errors), 0 where the name does not tell."""
        if self.name in (*CLOCKS, "lr"):
            return 0
        for text in (self.name.rpartition("/")[2], self.name):  # GoogLeNet has an accuracy loss3/top-1
            if _LOWER.search(text):
                return -1
            if _HIGHER.search(text):
                return 1
        return 0

    @property
    def last(self) -> tuple[int, float]:
        """The iteration and the value reported last."""
        return self.points[-1]

    @property
    def best(self) -> tuple[int, float] | None:
        """The first iteration with the best value, and the value; None where no direction is better, or all is NaN."""
        numbers = [point for point in self.points if not math.isnan(point[1])]
        if not self.direction or not numbers:
            return None
        return max(numbers, key=lambda point: self.direction * point[1])
