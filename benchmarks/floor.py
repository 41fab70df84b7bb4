"""The least time that a training step can take under a limit, whatever is kept, evicted and made anew: beside what was
measured, in a file that `benchmarks/oversubscription.py` has written. Needs no GPU, but SciPy.

    python benchmarks/floor.py benchmarks/results/oversubscription.json
    python benchmarks/floor.py --nets resnet50:256 --limits 8GiB,4GiB

Why it is a bound, by the times of calls (`net.plan.times`), the sizes of arrays, and a link of 55 GB/s each way:

Of every value that a call makes some part is on the device in each moment, from none to all. From one moment to a
later one parts may be made anew, come back from the host or, up to the turn from forward to backward, be copied there.
What is on the device was there before, or came meanwhile. What a call reads is there while it runs, and all that it
runs on is there when it ends, but for inputs that its op may write its output over. A call that needs more than the
limit, alone or beside gradients that were made before and are read later, runs in as few slices of the batch as have
room; when the last of these ends, that much of each is there. A call runs again no more than what it reads is there, or
is made anew. Parameters and what is kept for each come and go as well; they change in each step, so that what is
elsewhere in a moment was copied out since it changed, or is still to come for that. In no moment are there more bytes
than the limit. Between two passes at least the time of the calls, with those that run again, and at least that of the
copies either way.

The least time of all that, a linear programme's, is no more than any mix takes, as each array that it keeps, evicts or
makes anew is there or not. Parts leave more to choose than whole arrays do: a half of one array could be made again and
again of the same half of another. So no more of a value is made behind a moment, from the turn on, than there is then
of what it is made of, or comes back, or is made as well.

Moments are the turn and where runs end that need most bytes, or fewer of these and others where none comes for long, as
state comes and goes where runs need little: the higher bound counts. Small arrays count at the turn alone.

Of what a ReLU made in place of a scaled array its own gradient needs the signs alone, which count for nothing: the
kernel of the batch norm's gradient finds them. Gradients of parameters are made and used up in pieces, and state comes
and goes in such.

Slices of the batch of what has room as a whole are no mix of these, nor are those whose gradients come with the loss,
in forward, nor moments and gradients that are had from what a wide convolution reads (`net.plan.sources`), nor what is
joined of the parts of what it is made of (`net.plan.joins`), nor what leaves during backward but state: a step with
such may take less.

Nor is a step of any such mix faster than the one that was measured without a limit, which does what every other has to
do: there is time between calls, and a GPU that never waits is slower. Where it took less than the sum of its calls,
these are known to take less than their times, and are reckoned as much shorter.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import inputs  # noqa: E402
from benchmarks.gpu import words  # noqa: E402
from benchmarks.mixes import Problem, Run, problem_of  # noqa: E402
from blobmem import devices  # noqa: E402
from blobmem.devices.cuda.predicted import PredictedCuda  # noqa: E402

GPU = "NVIDIA H200"
"""Whose times come with the package; others' are the user's own."""

LINK = 55e9
"""Bytes that a link copies in a second, one way, at its best."""
PER_MS = LINK / 1e3

WORK = 18_000
"""In so many moments by runs the bytes on the device are counted, the turn and the end beside."""

SMALL = 400
"""What takes no more than such a part of the limit counts for nothing in so many moments."""

Terms = Iterable[tuple[Any, float]]
"""Variables, by what they are, and their factors."""


def floor_ms(problem: Problem, limit: int, moments: int | None = None) -> float:
    """At least so long takes a step that never has more than so many bytes on the device: by the turn, the end, and so
    many other moments."""
    turn, end = problem.turn - 1, len(problem.runs) - 1
    nbytes = {run: _nbytes(problem, each) / _slices(problem, each, limit) for run, each in enumerate(problem.runs)}
    fullest = sorted((run for run in nbytes if nbytes[run]), key=lambda run: -nbytes[run])
    most = WORK // len(problem.runs) if moments is None else moments
    spread = _spread(problem, {*fullest[: most // 3], turn, end}, most // 2)
    several = ([turn, end], 1), ([*fullest[:most], turn, end], limit // SMALL), (spread, limit // SMALL)
    return max(_Bound(problem, limit, at, least).least_ms() for at, least in several)


def _spread(problem: Problem, moments: set[int], parts: int) -> list[int]:
    """The ends of these runs, and others, so that no more than such a part of all time is between two, and a run."""
    ms, since, result = sum(run.ms for run in problem.runs), 0.0, list[int]()
    for at, run in enumerate(problem.runs):
        since += run.ms
        if at in moments or since * parts >= ms:
            result.append(at)
            since = 0.0
    return result


def _nbytes(problem: Problem, run: Run) -> int:
    return sum(problem.sizes[value] for value in run.there)


def _slices(problem: Problem, run: Run, limit: int) -> int:
    """Of the batch, in which a run has room beside gradients."""
    return max(1, math.ceil(_nbytes(problem, run) / max(1, limit - run.beside)))


class _Programme:
    """A linear programme: numbers that are 0 or more."""

    def __init__(self) -> None:
        self._columns: dict[Any, int] = {}
        self._rows, self._of, self._factors = list[int](), list[int](), list[float]()
        self._bounds: list[float] = []

    def at_most(self, terms: Terms, bound: float = 0.0) -> None:
        """Let the sum be no more than that."""
        for variable, factor in terms:
            self._rows.append(len(self._bounds))
            self._of.append(self._columns.setdefault(variable, len(self._columns)))
            self._factors.append(factor)
        self._bounds.append(bound)

    def at_least(self, terms: Terms, bound: float = 0.0) -> None:
        """Let the sum be no less than that."""
        self.at_most(_minus(terms), -bound)

    def least(self, costs: Terms) -> float:
        """The least sum."""
        try:
            from scipy.optimize import linprog
            from scipy.sparse import csr_array
        except ImportError as error:
            raise SystemExit(f"SciPy finds floors, which is not there: pip install scipy ({error})") from error

        shape = len(self._bounds), len(self._columns)
        objective = np.zeros(shape[1])
        for variable, factor in costs:
            objective[self._columns[variable]] = factor
        rows = csr_array((self._factors, (self._rows, self._of)), shape=shape)
        found = linprog(objective, A_ub=rows, b_ub=self._bounds, method="highs-ds")
        if found.status:
            raise RuntimeError(f"no floor was found: {found.message}")
        return float(found.fun)


def _sum(*variables: Any, factor: float = 1.0) -> list[tuple[Any, float]]:
    return [(variable, factor) for variable in variables]


def _minus(terms: Terms) -> list[tuple[Any, float]]:
    return [(variable, -factor) for variable, factor in terms]


class _Bound:
    """The linear programme of a problem under a limit, at the ends of some runs, of what has so many bytes or more.

    Variables are tuples: a word, of what it is, and the number of a moment. Of a value "there" is the part that is on
    the device in that moment, "anew", "back" and "sent" those that are made anew, come back and are copied out from the
    one before up to it; "runs" says how often a call runs again. Of state "state", "in" and "out" are the same. "ms" is
    the time. "more" and "made" are what is made anew, and runs, behind the moment.
    """

    def __init__(self, problem: Problem, limit: int, moments: list[int], least: int) -> None:
        self._problem, self._limit, self._programme = problem, limit, _Programme()
        self._moments = sorted({*moments})
        self._count = len(self._moments)
        self._when = [int(at) for at in np.searchsorted(self._moments, range(len(problem.runs)))]  # of runs
        self._turn = self._when[problem.turn - 1]
        self._of_call = [self._when[run] for run, each in enumerate(problem.runs) for _ in each.calls]
        calls = zip(self._of_call, problem.calls, strict=True)
        self._read = {value: at for at, each in calls for value in each.reads}  # for the last time
        self._maker = {value: call for call, each in enumerate(problem.calls) for value in each.makes}
        large = (value for value, size in enumerate(problem.sizes) if size >= least)
        self._born = {value: self._of_call[self._maker[value]] for value in large}
        self._last = self._lasts()
        self._state = [number for number, size in enumerate(problem.state) if size >= least]
        self._again: dict[tuple[int, int], None] = {}  # calls that may run again, and when

    def least_ms(self) -> float:
        """The least time."""
        self._values()
        self._host()
        self._calls()
        for number in self._state:
            self._lasting(number)
        for at in range(self._turn, self._count - 1):
            self._behind(at)
        for at in range(self._count):
            self._bytes(at)
            self._time(at)
        return self._programme.least(_sum(*(("ms", at) for at in range(self._count))))

    def _lasts(self) -> dict[int, int]:
        """When each value may be of use for the last time, for itself or for what is made of it."""
        last = {**self._born}
        for call in reversed(range(len(self._problem.calls))):
            each = self._problem.calls[call]
            at = max([self._of_call[call], *(last[value] for value in each.makes if value in last)])
            last.update((value, max(last[value], at)) for value in each.reads if value in last)
        return last

    def _had(self, value: int, at: int) -> list[tuple[Any, float]] | None:
        """What there is of a value up to a moment; None for all, as its call runs."""
        if self._born[value] == at:
            return None
        return _sum(("there", value, at - 1), *self._anew(value, [at]), *self._back(value, [at]))

    def _anew(self, value: int, moments: Iterable[int]) -> list[Any]:
        """What is made anew of it up to these, where it may be of use."""
        return [("anew", value, at) for at in moments if self._born[value] < at <= self._last[value]]

    def _back(self, value: int, moments: Iterable[int]) -> list[Any]:
        """What comes back of it up to these."""
        return [("back", value, at) for _, _, at in self._anew(value, moments) if self._of_forward(value)]

    def _of_forward(self, value: int) -> bool:
        return self._maker[value] < self._problem.runs[self._problem.turn].calls.start

    def _no_more(self, terms: Terms, value: int, at: int) -> None:
        """Let the sum be no more than there is of a value."""
        had = self._had(value, at)
        self._programme.at_most([*terms, *_minus(had or ())], 1.0 if had is None else 0.0)

    def _values(self) -> None:
        """What is there was there, or came; and is there where a call needs it."""
        for value, born in self._born.items():
            for at in range(born, self._last[value] + 1):
                self._no_more(_sum(("there", value, at)), value, at)
        wanted = {
            (value, at) for at, each in zip(self._of_call, self._problem.calls, strict=True) for value in each.reads
        }
        for value, at in sorted(wanted):
            had = self._had(value, at) if value in self._born else None
            if had is not None:
                self._programme.at_least(had, 1.0)
        for at, moment in enumerate(self._moments):
            run = self._problem.runs[moment]
            part = 1 / _slices(self._problem, run, self._limit)
            for value in run.there:
                if value in self._born:
                    self._programme.at_least(_sum(("there", value, at)), part)

    def _host(self) -> None:
        """What comes back was sent before, up to the turn."""
        for at in range(self._turn + 1):
            for value in self._sent(at):
                self._no_more(_sum(("sent", value, at)), value, at)
        for value, born in self._born.items():
            for back in self._back(value, range(self._count)):
                sent = [("sent", value, at) for at in range(born, min(back[-1], self._turn) + 1)]
                self._programme.at_most([*_sum(back), *_sum(*sent, factor=-1.0)])

    def _sent(self, at: int) -> list[int]:
        """The values of forward that may be copied out up to a moment."""
        here = (value for value, born in self._born.items() if born <= at <= self._last[value])
        return [value for value in here if at <= self._turn and self._of_forward(value)]

    def _calls(self) -> None:
        """What is made anew takes its call, and that what it reads."""
        for value, born in self._born.items():
            call = self._maker[value]
            for anew in self._anew(value, range(born, self._count)):
                self._again[call, anew[-1]] = None
                self._programme.at_most([(anew, 1.0), (("runs", call, anew[-1]), -1.0)])
        for call, at in self._again:
            for value in self._problem.calls[call].reads:
                if value in self._born and self._born[value] < at:
                    self._no_more(_sum(("runs", call, at)), value, at)

    def _behind(self, at: int) -> None:
        """What is made anew behind a moment, all in all, takes what it is made of, all in all."""
        programme, calls = self._programme, dict[int, None]()
        later = range(at + 1, self._count)
        here = {value for value, born in self._born.items() if born <= at < self._last[value]}

        def but(value: int) -> list[tuple[Any, float]]:
            """What there is of a value then, comes back, or is made."""
            return _sum(("there", value, at), ("more", value, at), *self._back(value, later))

        for value in here:
            call, more = self._maker[value], _sum(("more", value, at))
            calls[call] = None
            programme.at_most([*more, *_sum(*self._anew(value, later), factor=-1.0)])
            programme.at_most([*more, (("made", call, at), -1.0)])
            if self._read.get(value, at) > at:
                programme.at_least(but(value), 1.0)
        for call in calls:
            made = _sum(("made", call, at))
            runs = (("runs", call, when) for when in later if (call, when) in self._again)
            programme.at_most([*made, *_sum(*runs, factor=-1.0)])
            for value in self._problem.calls[call].reads:
                if value in here:
                    programme.at_most([*made, *_minus(but(value))])

    def _lasting(self, number: int) -> None:
        """State comes and goes. It is there for calls that need it; and what is elsewhere, and changes in each step,
        was copied out since, or is still to come."""
        programme, calls = self._programme, self._problem.calls
        needed = {at for at, each in zip(self._of_call, calls, strict=True) if number in each.state}
        gradients = [value for each in calls if number in each.updates for value in each.reads]
        changes = [at for at, each in zip(self._of_call, calls, strict=True) if number in each.updates]
        first = max((self._of_call[self._maker[value]] for value in gradients), default=min(changes, default=None))
        for at in range(self._count):
            before = _sum(("state", number, (at - 1) % self._count), ("in", number, at))
            programme.at_most([*_sum(("state", number, at)), *_minus(before)])
            if at in needed:
                programme.at_least(before, 1.0)
            if first is None:
                continue
            there = _sum(("state", number, at))
            to_come = _sum(*(("in", number, other) for other in range(at + 1, self._count)))
            since = [*range(first, self._count), *range(at + 1)] if at < first else [*range(first, at + 1)]
            gone = _sum(*(("out", number, other) for other in since))
            if at < first:
                programme.at_least([*there, *gone], 1.0)
                programme.at_least([*there, *to_come], 1.0)
            else:
                programme.at_least([*there, *gone, *to_come], 1.0)

    def _bytes(self, at: int) -> None:
        sizes, state = self._problem.sizes, self._problem.state
        values = [
            (("there", value, at), sizes[value] / self._limit)
            for value, born in self._born.items()
            if born <= at <= self._last[value]
        ]
        self._programme.at_most(
            [*values, *((("state", each, at), state[each] / self._limit) for each in self._state)], 1.0
        )

    def _time(self, at: int) -> None:
        problem, ms = self._problem, ("ms", at)
        usual = sum(each.ms for run, each in enumerate(problem.runs) if self._when[run] == at)
        again = [(("runs", call, when), problem.calls[call].ms) for call, when in self._again if when == at]
        self._programme.at_least([(ms, 1.0), *_minus(again)], usual)
        values = {("sent", value, at): problem.sizes[value] for value in self._sent(at)}
        self._copies(at, values, "out")
        back = {each: problem.sizes[value] for value in self._born for each in self._back(value, [at])}
        self._copies(at, back, "in")

    def _copies(self, at: int, values: Mapping[Any, int], lasts: str) -> None:
        """The time of copies one way, of these bytes and of state."""
        nbytes = {**values, **{(lasts, each, at): self._problem.state[each] for each in self._state}}
        self._programme.at_least([(("ms", at), 1.0), *((each, -size / PER_MS) for each, size in nbytes.items())])


# -------------------------------------------------------------------- the command


def of_model(model: str, batch: int, math: str, gpu: str) -> Problem:
    """The problem of a model's training step on a GPU whose times are known."""
    dtype = inputs.dtype_of(math)
    device = PredictedCuda(gpu, **({"math": math} if dtype != math else {}))
    solver = inputs.solver_of(inputs.with_inputs(model, batch), device=device, dtype=dtype, memory="train")
    solver.updater.place()
    solver.net.prepare()
    return problem_of(solver.net)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", help="what was measured, to which floors are added")
    parser.add_argument("--nets", type=words, default=[], metavar="NET:BATCH,...")
    parser.add_argument("--math", default="tf32", help="default: %(default)s")
    parser.add_argument("--limits", type=lambda text: [*map(devices.parse_bytes, words(text))], default=[])
    args = parser.parse_args()
    report = json.loads(args.results.read_text()) if args.results else {"results": []}
    given = [
        {"net": model, "batch": int(batch), "math": args.math, "limits": [{"limit": limit} for limit in args.limits]}
        for model, _, batch in (net.partition(":") for net in args.nets)
    ]
    for row in (*report["results"], *given):
        problem = of_model(row["net"], row["batch"], row["math"], row.get("gpu", GPU))
        name = f"{row['net']} {row['batch']} {row['math']}"
        print(f"{name}: {problem.forward:.2f} + {problem.backward:.2f} ms without a limit", flush=True)
        full = row.get("ours", {}).get("ms")
        problem = problem if full is None else problem.within(full)
        for each in row["limits"]:
            ours = each.get("ours", {})
            each["floor_ms"] = max(full or 0.0, floor_ms(problem, ours.get("granted_bytes", each["limit"])))
            took = f", took {ours['ms']:.2f} ms" if "ms" in ours else ""
            print(f"    {each['limit'] / 2**20:.0f} MiB: {each['floor_ms']:.2f} ms at the least{took}", flush=True)
    if args.results:
        args.results.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
