"""Evicted arrays that a plan has come just before they are needed come sooner, where there is room, so that they are
there in time; and updates of evicted state run elsewhere, where there is room for them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from blobmem.net.plan.fitting import room_of
from blobmem.net.plan.moments import Clock, lingering
from blobmem.net.plan.movable import movable
from blobmem.net.plan.places import draft
from blobmem.net.plan.state import content_of, copies_state, with_moved
from blobmem.net.plan.times import COPIES, Times, least_ms, reckon
from blobmem.net.plan.uses import Remade, moved
from blobmem.net.plan.ways import Made
from blobmem.net.schedule import Unit
from blobmem.ops.call import Call

if TYPE_CHECKING:
    from blobmem.net.net import Net

PARTS = (0.985, 0.98, 0.97, 0.96, 0.95, 0.93, 0.91, 0.88, 0.84, 0.8)
"""What part of the room arrays may take, in plans that are compared, until they have places: gaps take the rest."""

Moves = Mapping[int, int]
"""From where to before which call others go, among those of forward and behind them those of backward."""

WORK, MORE = 30_000_000, 300_000_000
"""So many steps does a search for when copies begin look at, and another one from the best plan on. A number, not a
time, so that plans repeat."""

TRIES = 500_000
"""Nor does it try more ways than so many."""

HEAT = 2e-4
"""What part of a pass's time it may mostly take longer by what the first of these tries at first."""

HOPE = 1.001
"""How many times as long as if nothing waited a plan has to take for copies that come sooner to be a help."""


def sooner(net: Net, made: Made, most_ms: float = math.inf) -> Made:
    """The calls, with what is evicted fetched before it is needed, so that it is there in time where there is room that
    early, and updates of state where there is room for all that they need, if that takes less time. What takes
    `most_ms` or more by the clock is not laid out."""
    return min(made, _annealed(net, made, None, min(most_ms, made.ms)) or made, key=attrgetter("ms"))


def refined(net: Net, made: Made, heat: float) -> Made:
    """The calls that `sooner` has found, with what comes sooner, and updates, looked for longer from there on; such a
    part of the time is in place of `HEAT`."""
    if made.before is None or made.recipe.moves is None:
        return made
    return min(made, _annealed(net, made.before, made.recipe.moves[1], made.ms, heat) or made, key=attrgetter("ms"))


def _annealed(net: Net, made: Made, begun: Moves | None, most_ms: float, heat: float = HEAT) -> Made | None:
    """The calls with what fetches, and updates, before where they are in these or elsewhere, in as much of the room as
    their arrays have places in; on from where that has `begun`, if it has, and longer. None if that takes no less than
    `most_ms`, or there are no places."""
    net._have(made)
    room, times, (starts, stops) = room_of(net, made), Times(net.device), _bounds(made)
    drawn = made.places.lasting(range(len(stops)))
    clock = Clock(drawn, times, movable(drawn))
    across = net.updates_in_backward
    late = _late(clock, room) if across else []
    first = _earliest(clock.steps, clock.turn, across, late)
    to, best = np.arange(len(stops)), None
    to[late] = clock.turn
    if not (first or late or clock.updates) or least_ms(made.places, times) * HOPE >= most_ms:
        return None
    number = {start: at for at, start in enumerate(starts)}
    for at, before in (begun or {}).items():
        if at in number:
            to[number[at]] = number[before]
    work = WORK if begun is None else MORE
    for part in PARTS:
        tight = int(part * room)
        to = clock.annealed(first, to, tight, min(TRIES, work // len(stops)), heat)
        if clock.run(tight, to).ms >= most_ms:
            break
        goes = ((at, before) for at, before in enumerate(to) if before != at)
        moves = {call: starts[before] for at, before in goes for call in range(starts[at], stops[at])}
        net._have(made)
        tried = with_moves(net, made, (tight, room), times, moves)
        if tried is not None and tried.ms < most_ms:
            best, most_ms = tried, tried.ms
    return best


def with_moves(net: Net, made: Made, rooms: tuple[int, int], times: Times, moves: Moves) -> Made | None:
    """The calls, with these moved, if all has places in the second of the rooms; arrays stay until they have left where
    the loads are no more than the first."""
    tight, room = rooms
    if not moves:
        return None
    calls, position = with_moved([*made.forward, *made.backward], moves)
    before = len(made.forward)
    turn = before + sum((to < before) - (at < before) for at, to in moves.items())
    forward, backward = calls[:turn], calls[turn:]
    schedules = net._scheduled(forward, backward, made.passing)
    drawn = draft(net, schedules, made.kept)
    drawn.enough = room
    drawn = lingering(drawn, times, tight)
    if drawn.layout.nbytes > room:
        return None
    remade, ms = _with_crossing(moved(made.remade, position), forward), reckon(drawn, times).ms
    recipe = made.recipe._replace(moves=(tight, moves))
    return dataclasses.replace(
        made, forward=forward, backward=backward, remade=remade, bound=schedules, drawn=drawn, ms=ms, recipe=recipe,
        before=made,
    )  # fmt: skip


def _with_crossing(remade: Sequence[Remade], forward: Sequence[Call]) -> list[Remade]:
    """The same, with what forward fetches among that on which what is made anew relies, without what backward sends
    away."""
    fetched = {each.operand(0).memory: [at] for at, each in enumerate(forward) if each.op == "fetch"}
    of_forward = [[at for at in each.makers if at < len(forward)] for each in remade]
    both = zip(remade, of_forward, strict=True)
    return [each._replace(makers=[*makers, *fetched.get(each.array.memory, ())]) for each, makers in both]


def _bounds(made: Made) -> tuple[list[int], list[int]]:
    """The position of each step's first call, behind those of forward those of backward, and of all calls the end; and
    where each step ends."""
    forward, backward = made.places.units
    bounds = [(each.start, each.stop) for each in forward]
    bounds += [(len(made.forward) + each.start, len(made.forward) + each.stop) for each in backward]
    starts, stops = zip(*bounds, strict=True)
    return [*starts, stops[-1]], [*stops]


def _late(clock: Clock, room: int) -> list[int]:
    """The steps of forward that copy out what it has used up by then, and for which its end would wait: they may be the
    first of backward."""
    copies = [(at, step.calls[-1]) for at, step in enumerate(clock.steps[: clock.turn]) if step.calls[-1].op in COPIES]
    fetched = {each.attributes["home"] for _, each in copies if each.op == "fetch"}
    used_up = {at for at, last in clock.leaving if at == last}
    found = [at for at, each in copies if at in used_up and each.attributes["home"] not in fetched]
    if not found:
        return []
    ends = clock.run(room).end
    computed = max(np.delete(ends[: clock.turn], [at for at, _ in copies]), default=0.0)
    return [at for at in found if ends[at] > computed]


def _earliest(steps: Sequence[Unit], turn: int, across: bool, late: Sequence[int]) -> Mapping[int, int]:
    """Of each step that fetches, the first before which it may: behind the last way out of that, which is the turn if
    it is late, and in its pass; or, `across`, in forward, but for state that a gradient adds to."""
    result, sent = {}, dict[Any, int]()
    for at, step in enumerate(steps):
        each = step.calls[-1]
        if each.op not in COPIES:
            continue
        content = content_of(each) if copies_state(each) else each.attributes["home"]
        if each.op == "evict":
            sent[content] = turn if at in late else at + 1
        else:
            crosses = across and not (copies_state(each) and each.attributes["sums"])
            result[at] = max(sent.get(content, 0), turn if at >= turn and not crosses else 0)
    return {at: first for at, first in result.items() if first < at}
