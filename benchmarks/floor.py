"""The least time that a training step can take under a limit, whatever is kept, evicted and made anew: beside what was
measured, in a file that `benchmarks/oversubscription.py` has written. Needs no GPU.

    python benchmarks/floor.py benchmarks/results/oversubscription.json
    python benchmarks/floor.py --nets resnet50:256 --limits 8GiB,4GiB

Why it is a bound, by the times of calls (`net.plan.times`), the sizes of arrays, and a link of 55 GB/s each way:

What forward has made and backward needs is on the device when backward begins, or on the host, or nowhere. What is on
the device has at most the limit's bytes. What is on the host was copied there during forward, which takes at least as
long as its calls do, and as that copy does; it comes back during backward, which takes at least as long as that copy.
What is nowhere is made anew in backward: the call that makes it runs once more, and of what that call reads the same
holds in turn. So backward takes at least its own calls' time and that of the calls that run again. What lies beside
these arrays (parameters, their history) may be on the host too, without having left during forward. Of what a ReLU made
in place of a scaled array its own gradient needs the signs alone, which count for nothing: the kernel of the batch
norm's gradient finds them.

The least time of calls that run again, of all mixes with no more than so many bytes elsewhere, is bounded from below by
Lagrange's relaxation: for each price of a byte there is a least sum of what is paid for bytes and of time, a minimum
cut; that sum, less the price of the bytes that there may be, is never more than the time. The highest of these bounds
counts.

Slices of the batch whose gradients come with the loss, in forward, are no mix of these, nor are moments and gradients
that are had from what a wide convolution reads (`net.plan.sources`), nor what is joined of the parts of what it is made
of (`net.plan.joins`): a step with such may take less.

Nor is a step of any such mix faster than the one that was measured without a limit, which does what every other has to
do: there is time between calls, and a GPU that never waits is slower. Where it took less than the sum of its calls,
these are known to take less than their times, and are reckoned as much shorter.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import inputs  # noqa: E402
from benchmarks.gpu import words  # noqa: E402
from blobmem import devices  # noqa: E402
from blobmem.devices.cuda.predicted import PredictedCuda  # noqa: E402
from blobmem.memory import Intent, SyncedMemory  # noqa: E402
from blobmem.net.plan import kernels  # noqa: E402
from blobmem.net.plan.again import Less  # noqa: E402
from blobmem.net.plan.places import draft  # noqa: E402
from blobmem.net.plan.times import Times  # noqa: E402
from blobmem.ops.call import Call  # noqa: E402

GPU = "NVIDIA H200"
"""Whose times come with the package; others' are the user's own."""

LINK = 55e9
"""Bytes that a link copies in a second, one way, at its best."""
PRICES = np.geomspace(1e-11, 1e-6, 40)
"""Of a byte that is not made anew, in ms."""
UNITS = 1e9  # of a capacity, per ms
UNLIMITED = 1 << 60


@dataclass
class Problem:
    """What a step has to do.

    Attributes:
        sizes: bytes of each value.
        makers: of each value, the call that makes it.
        costs: ms of each call of forward.
        reads: the values that each call reads; others are always there.
        needed: the values that backward reads.
        forward, backward: ms of the calls.
        beside: bytes of what else is on the device.
    """

    sizes: list[int] = field(default_factory=list)
    makers: list[int] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    reads: list[list[int]] = field(default_factory=list)
    needed: list[int] = field(default_factory=list)
    forward: float = 0.0
    backward: float = 0.0
    beside: int = 0

    @functools.cached_property
    def sums(self) -> np.ndarray:
        """For each price, the least sum of what is paid for bytes and of the time of calls that run again."""
        network = _network(self)
        return np.array([least_sum(self, price, network) for price in PRICES])

    def within(self, ms: float) -> Problem:
        """The same, with calls so much shorter that without a limit they take no longer than that."""
        part = min(1.0, ms / (self.forward + self.backward))
        costs = [part * each for each in self.costs]
        return replace(self, costs=costs, forward=part * self.forward, backward=part * self.backward)

    def again_ms(self, room: float) -> float:
        """At least so long do calls run again where no more than so many bytes are elsewhere."""
        return max(0.0, float((self.sums - PRICES * room).max()))

    def floor_ms(self, limit: int) -> float:
        """At least so long takes a step that holds no more than so many bytes when backward begins."""
        per_ms = LINK / 1e3

        def ms(away: float) -> float:
            """With so many bytes on the host: first those that need not leave during forward."""
            forward = max(self.forward, (away - self.beside) / per_ms)
            return forward + max(self.backward + self.again_ms(limit - self.beside + away), away / per_ms)

        low, high = 0.0, float(sum(self.sizes) + self.beside)
        while high - low > 1:  # the time is a convex function
            one, other = low + (high - low) / 3, high - (high - low) / 3
            low, high = (low, other) if ms(one) <= ms(other) else (one, high)
        return ms(low)


def problem_of(net: Any) -> Problem:
    """The problem of a net that has not run, whose solver's updates are placed."""
    made = net._made(Less(), 1)
    made.drawn = draft(net, made.schedules, made.kept)
    times, problem = Times(net.device), Problem()
    ahead, behind = made.drawn.units
    pinned = {memory for memory, use in made.drawn.lives.uses.items() if use.pinned}
    sizes = _sizes([*made.forward, *made.backward], pinned)
    now: dict[SyncedMemory, int] = {}  # the value in each memory
    ops: list[str] = []
    again: Callable[[Call], Call] = (lambda call: call) if made.again is None else made.again.call
    for unit in ahead:
        own, whole = unit.calls[: unit.stop - unit.start], unit.calls[-1]
        apart, together = [times.ms(again(call)) for call in own], times.ms(again(whole))
        problem.forward += times.ms(whole)
        for call, ms in zip(own, apart, strict=True):
            # a call by itself takes at least its share of those that run as one
            _add(problem, call, ms * min(1.0, together / (sum(apart) or 1.0)), sizes, now)
            ops.append(str(call.op))
    problem.backward = sum(times.ms(unit.calls[-1]) for unit in behind)
    gone: set[SyncedMemory] = set()
    needed: dict[int, None] = {}
    for call in made.backward:
        for operand in call.present():
            if operand.intent is not Intent.OVERWRITE and operand.memory in now and operand.memory not in gone:
                value = now[operand.memory]
                if not (call.op == "relu_backward" and _has_known_signs(problem, ops, value)):
                    needed[value] = None
        gone.update(operand.memory for operand in call.present() if operand.intent is not Intent.READ)
    problem.needed = [*needed]
    arena = {life.key for life in made.drawn.lives.arena}
    problem.beside = sum(nbytes for memory, nbytes in made.drawn.lives.pinned.items() if memory not in arena)
    return problem


def _has_known_signs(problem: Problem, ops: Sequence[str], value: int) -> bool:
    """Whether a value is what a ReLU made in place of a scaled array."""
    maker = problem.makers[value]
    before = (ops[problem.makers[read]] for read in problem.reads[maker])
    return ops[maker] == "relu_forward" and not {"scale_forward", "batch_norm_forward"}.isdisjoint(before)


def _sizes(calls: Sequence[Call], pinned: Container[SyncedMemory]) -> dict[SyncedMemory, int]:
    """Bytes of each memory that calls use, but for those that are `beside`."""
    sizes: dict[SyncedMemory, int] = {}
    for operand in (operand for call in calls for operand in call.present()):
        view = operand.view
        if view.memory not in pinned:
            sizes[view.memory] = max(sizes.get(view.memory, 0), view.offset + view.nbytes)
    return sizes


def _add(problem: Problem, call: Call, ms: float, sizes: dict[SyncedMemory, int], now: dict[SyncedMemory, int]) -> None:
    """Add a call of forward and what it makes."""
    number, read, written = len(problem.costs), dict[int, None](), dict[SyncedMemory, None]()
    for operand in (operand for operand in call.present() if operand.memory in sizes):
        whole = operand.intent is Intent.OVERWRITE and operand.view.nbytes == sizes[operand.memory]
        if not whole and operand.memory in now:
            read[now[operand.memory]] = None
        if operand.intent is not Intent.READ:
            written[operand.memory] = None
    joins = call.op == "relu_forward" and not {operand.memory for operand in call.present()} - {*written}
    problem.costs.append(0.0 if joins else ms)  # a ReLU in place may run with whatever is before it
    problem.reads.append([*read])
    for memory in written:
        now[memory] = len(problem.sizes)
        problem.sizes.append(sizes[memory])
        problem.makers.append(number)
    kept = call.operands[2] if call.op == "batch_norm_forward" else None
    if kept is not None and kept.memory in now:  # which is the top once more, in another place
        for operand in call.present():
            if operand.memory in written and operand.view.nbytes == kept.view.nbytes:
                now[operand.memory] = now[kept.memory]


# -------------------------------------------------------------------- the minimum cut


def _network(problem: Problem) -> tuple[np.ndarray, ...]:
    """Edges (from, to, kind, of which): from the source to what is needed; from each value to the call that makes it,
    cut if the value is there; from each call to the sink, cut if it runs again; and to what it reads."""
    values, calls = len(problem.sizes), len(problem.costs)
    source, sink = values + calls, values + calls + 1
    edges = [(source, value, 0, 0) for value in problem.needed]
    edges += [(value, values + call, 1, value) for value, call in enumerate(problem.makers)]
    edges += [(values + call, sink, 2, call) for call in range(calls)]
    edges += [(values + call, value, 0, 0) for call, read in enumerate(problem.reads) for value in read]
    return tuple(np.array(column, np.int64) for column in zip(*edges, strict=True)) if edges else ()


def least_sum(problem: Problem, price: float, network: tuple[np.ndarray, ...] | None = None) -> float:
    """The least sum, in ms, of the price of all bytes that are there and of the time of calls that run again, so that
    all that is needed is there or made."""
    tails, heads, kinds, which = network or _network(problem)
    sizes, costs = np.array(problem.sizes, float), np.array(problem.costs)
    capacities = np.full(len(tails), UNLIMITED, np.int64)
    for kind, paid in ((1, sizes * price), (2, costs)):
        capacities[kinds == kind] = (paid[which[kinds == kind]] * UNITS).astype(np.int64)
    nodes = len(sizes) + len(costs) + 2
    flow, _ = kernels.max_flow(tails, heads, capacities, nodes)
    return float(flow) / UNITS


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
            each["floor_ms"] = max(full or 0.0, problem.floor_ms(ours.get("granted_bytes", each["limit"])))
            took = f", took {ours['ms']:.2f} ms" if "ms" in ours else ""
            print(f"    {each['limit'] / 2**20:.0f} MiB: {each['floor_ms']:.2f} ms at the least{took}", flush=True)
    if args.results:
        args.results.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
