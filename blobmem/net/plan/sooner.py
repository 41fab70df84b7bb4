"""Evicted state that a plan has come just before it is needed comes sooner, where there is room, so that it is there in
time, and so do other arrays that it would wait behind; or its updates run elsewhere, where there is room for them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from blobmem.devices.pages import round_up
from blobmem.memory.views import ALIGNMENT
from blobmem.net.plan.evict import SLACK, lingering, loads
from blobmem.net.plan.fitting import room_of
from blobmem.net.plan.places import draft
from blobmem.net.plan.spaced import Moves, spaced
from blobmem.net.plan.state import content_of, copies_state, with_moved
from blobmem.net.plan.times import COPIES, Times, reckon
from blobmem.net.plan.uses import moved
from blobmem.net.plan.ways import MANY, Made
from blobmem.net.schedule import Unit

if TYPE_CHECKING:
    from blobmem.net.net import Net

SOONER = (0.97, 0.91, 0.83, 0.76)
"""What part of the room arrays may take with state that comes before it is needed, in plans that are compared: gaps
between them take the rest."""

FINER = (0.995, 0.985, 0.97, 0.94, 0.91, 0.87)
"""The same of the best of them."""

FIRST, LAST, AROUND, EVERY = ORDERS = "first", "last", "around", "every"
"""Where there is no room for all to come before it is needed, what is needed first is the first to have it, or what is
needed last; or the first, before arrays that come back anyway and would be in its way on the link; or the first, and
every array that comes back in its turn."""


def sooner(net: Net, made: Made, most_ms: float = math.inf) -> Made:
    """The calls, with state fetched before it is needed, so that it is there in time where there is room that early;
    with its updates where there is room for all that they need, if that takes less time. That is not tried with many
    calls. What takes `most_ms` or more if bytes are always free is not laid out."""
    many = len(made.forward) + len(made.backward) >= MANY
    elsewhere = None if many else _best_of(net, made, (1.0, *SOONER), spaced, {})
    best = made
    for each in (made, elsewhere):
        if each is not None:
            best = min(best, _fetched_sooner(net, each, min(most_ms, best.ms)), key=attrgetter("ms"))
    return best


def refined(net: Net, made: Made) -> Made:
    """The calls that `sooner` has found, with what comes sooner found anew: by when calls begin in the best plan so
    far, with what they wait for, in more parts of the room, and of forward; while that is a help."""
    best, before = made, math.inf
    if made.before is None:
        return made
    while best.ms < before:
        before, begins = best.ms, _begins(made.before, best, Times(net.device))
        known = dict[Any, Made | None]()
        for across in (False, True)[: 1 + net.updates_in_backward]:
            moves = functools.partial(_moves, begins=begins, across=across)
            found = _in_orders(net, made.before, FINER, moves, known, best.ms)
            best = min([best, *found], key=attrgetter("ms"))
    return best


def _fetched_sooner(net: Net, made: Made, most_ms: float) -> Made:
    """The calls, with state fetched before it is needed, in the best of the `ORDERS`, if calls wait for nothing."""
    moves = functools.partial(_moves, begins=_begins(made, made, Times(net.device)))
    return min([made, *_in_orders(net, made, SOONER, moves, {}, most_ms)], key=attrgetter("ms"))


def _in_orders(
    net: Net,
    made: Made,
    parts: Sequence[float],
    moves_of: Callable[..., Moves],
    known: dict[Any, Made | None],
    most_ms: float,
) -> list[Made]:
    """`_best_of` in each of the `ORDERS`, which may come to the same, as is `known`: what may take less than others."""
    result = list[Made]()
    for order in ORDERS:
        found = _best_of(net, made, parts, functools.partial(moves_of, order=order), known, most_ms)
        if found is not None:
            result.append(found)
            most_ms = min(most_ms, found.ms)
    return result


def _begins(made: Made, found: Made, times: Times) -> np.ndarray:
    """When each step of the calls begins, and all ends, in ms, if calls begin as in a plan that was made of them; of
    copies, the call behind them. If the plan is none, as if nothing waited."""
    units = [*chain(*made.places.units)]
    copies = np.array([unit.calls[-1].op in COPIES for unit in units])
    ran = [unit.calls[-1].op not in COPIES for unit in chain(*found.places.units)]
    if found is made or sum(ran) != np.count_nonzero(~copies):
        return np.cumsum([0.0, *(0.0 if unit.calls[-1].op in COPIES else times.ms(unit.calls[-1]) for unit in units)])
    clock = reckon(found.places, times)
    begins = np.full(len(units) + 1, clock.ms)
    begins[:-1][~copies] = clock.begin[ran]
    return np.minimum.accumulate(begins[::-1])[::-1]


def _best_of(
    net: Net,
    made: Made,
    parts: Sequence[float],
    moves_of: Callable[[Made, int, Times], Moves],
    known: dict[Any, Made | None],
    most_ms: float = math.inf,
) -> Made | None:
    """The calls, with those moved that should be for such parts of the room, until less is no better, or hopeless: what
    comes later makes no step begin sooner. None if none may be, or have places then, or may take less than `most_ms`.
    `known` is what moves have come to."""
    room, times, before = room_of(net, made), Times(net.device), math.inf
    best: Made | None = None
    net._have(made)
    for part in parts:
        tight = int(part * room)
        moves = moves_of(made, tight, times)
        same = tight, frozenset(moves.items())
        if same not in known:
            known[same] = with_moves(net, made, (tight, room), times, moves, most_ms)
        found = known[same]
        if found is not None:
            if found.drawn is None:
                break
            best = found if best is None or found.ms < best.ms else best
            most_ms = min(most_ms, found.ms)
            if found.ms >= before:
                break  # gaps are no more what is in the way
            before = found.ms
    return best


def with_moves(
    net: Net, made: Made, rooms: tuple[int, int], times: Times, moves: Moves, most_ms: float = math.inf
) -> Made | None:
    """The calls, with these moved, if all has places in the second of the rooms; arrays stay until they have left where
    the loads are no more than the first. Not drafted if they take `most_ms` or more though bytes were always free."""
    tight, room = rooms
    if not moves:
        return None
    calls, position = with_moved([*made.forward, *made.backward], moves)
    turn = len(made.forward) + sum(to < len(made.forward) <= at for at, to in moves.items())
    forward, backward = calls[:turn], calls[turn:]
    schedules = net._scheduled(forward, backward, made.passing)
    drawn = draft(net, schedules, made.kept)
    drawn.enough = room
    clock = reckon(drawn, times, bytes_free=True)
    if clock.ms >= most_ms:
        return dataclasses.replace(made, drawn=None, ms=clock.ms)
    drawn = lingering(drawn, clock, tight)
    if drawn.layout.nbytes > room:
        return None
    remade, ms = moved(made.remade, position), reckon(drawn, times).ms
    recipe = made.recipe._replace(moves=(*made.recipe.moves, (tight, moves)))
    return dataclasses.replace(
        made, forward=forward, backward=backward, remade=remade, bound=schedules, drawn=drawn, ms=ms, recipe=recipe,
        before=made,
    )  # fmt: skip


def _moves(made: Made, room: int, times: Times, order: str, begins: np.ndarray, across: bool = False) -> Moves:
    """From where to before which call what fetches state is to go, in one of the `ORDERS`.

    Copies follow one another, each as late as will do for calls that begin so; with `across`, some that backward needs
    come in forward.
    """
    load, units = loads(made.places), [*chain(*made.places.units)]
    turn, result = len(made.places.units[0]), dict[int, int]()
    fetches = [at for at, unit in enumerate(units) if unit.calls[-1].op == "fetch"]
    sizes = {at: round_up(units[at].calls[-1].operand(0).view.nbytes, ALIGNMENT) for at in fetches}
    takes = {at: times.copy_ms(size) for at, size in sizes.items()}
    crossing = _crossing(units, turn, load, room, begins, sizes, takes) if across else {}
    for at, step in crossing.items():
        load[step:at] += sizes.pop(at)
        del takes[at]
    wanted, moved = _wanted(units, takes, begins, order == AROUND), set[int]()
    least, before = _earliest(units, turn, order == EVERY), 0
    for at in reversed(sizes) if order == LAST else sizes:
        if order == AROUND and at not in least:
            continue
        step, first = at, max(before, least.get(at, at))
        while step > first and begins[step] > wanted[at] and load[step - 1] + sizes[at] <= room:
            step -= 1
            load[step] += sizes[at]
        while step < at and step in sizes and step not in moved:  # what stays there is needed before
            load[step] -= sizes[at]
            step += 1
        before = 0 if order == LAST else step
        if step < at:
            moved.add(at)
            result[at] = step
    starts = [unit.start + (len(made.forward) if at >= turn else 0) for at, unit in enumerate(units)]
    return {starts[at]: starts[step] for at, step in (result | crossing).items()}


def _crossing(
    units: Sequence[Unit], turn: int, load: np.ndarray, room: int, begins: np.ndarray, sizes: Mapping[int, int],
    takes: Mapping[int, float],
) -> dict[int, int]:  # fmt: skip
    """Before which step of forward what fetches state for backward comes as soon as the link is idle, while there is
    room: what is needed first, and is there when forward ends, as a graph of backward begins when all copies of
    forward's have ended."""
    load, free, least, result = load.copy(), 0.0, _earliest(units, turn, False), dict[int, int]()
    for at in takes:
        fetch, step = units[at].calls[-1], at
        if at >= turn:
            if least.get(at) != turn or fetch.attributes["sums"]:
                continue
            full = np.flatnonzero(load[:at] + sizes[at] > room)
            step = max(int(np.searchsorted(begins, free, "right")) - 1, 0, *(full[-1:] + 1))
        done = max(free, float(begins[step])) + takes[at]
        if at < turn:
            free = done
        elif step < turn and done <= begins[turn]:
            free, result[at] = done, step
            load[step:at] += sizes[at]
    return result


def _wanted(units: Sequence[Unit], takes: Mapping[int, float], begins: np.ndarray, around: bool) -> dict[int, float]:
    """When each copy that comes has to begin, in ms, for all to be in time; with `around`, of state alone, which comes
    before a copy that stays where it is and would be in its way."""
    result, latest, behind = dict[int, float](), math.inf, list[tuple[int, float]]()
    for at, own in reversed([*takes.items()]):
        begin = float(begins[at])
        if not around or copies_state(units[at].calls[-1]):
            result[at] = latest = min(latest, begin - SLACK) - own
            behind.append((at, own))
            continue
        latest = min(latest, begin)
        behind = [each for each in behind if result[each[0]] < begin + own]
        for other, takes_ms in behind:
            result[other] = latest = latest - takes_ms
    return result


def _earliest(units: Sequence[Unit], turn: int, every: bool) -> dict[int, int]:
    """Of each unit that fetches state, or of `every` one that fetches, the first before which it may: behind the last
    way out of that, and in its pass."""
    result, sent = {}, dict[Any, int]()
    for at, unit in enumerate(units):
        each = unit.calls[-1]
        if each.op in COPIES and (every or copies_state(each)):
            content = content_of(each) if copies_state(each) else each.attributes["home"]
            if each.op == "evict":
                sent[content] = at + 1
            else:
                result[at] = max(sent.get(content, 0), turn if at >= turn else 0)
    return result
