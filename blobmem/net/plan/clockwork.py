"""Compiled: a pass as it runs on three streams, where what is copied out has its bytes until that is done; and a search
by it for when those copies begin that come, and where updates run.
"""

from __future__ import annotations

import math

import numpy as np

from blobmem.net.plan.kernels import draw
from blobmem.ops.host.compiled import kernel, part

Ints = np.ndarray
Floats = np.ndarray

OUT, IN = 1, 2
"""Kinds of steps that copy."""

OVER = 100.0
"""How many times as long as all takes what has no room counts, in parts of the room."""

SHORT = 0.01
"""What part counts of the time that is missing for copies to be done a while before their bytes are used."""

HELD = 0.3
"""How much longer than all takes it counts if all of the room were in use all the while."""

NEAR, FAR = 8, 60
"""What moves does by no more than so many steps, or so many; or to any other."""

DRAWN = 1 << 30
"""Numbers that are drawn are below that."""


Steps = tuple[Ints, Floats, Ints, Ints, Ints, Ints, Ints]
"""Of each step: what it is, its ms, and the bytes that it takes; where the rows of arrays begin that it may be the last
to use, with an end, and those rows; and the same of copies that it waits for."""

Arrays = tuple[Ints, Ints, Ints]
"""Of each array its bytes, how many steps may be the last to use it, and that which copies it out last, or -1."""

Updates = tuple[Ints, Ints, Ints, Ints, Ints]
"""Of each update that may run elsewhere the step, and the first before which it may; where the rows of steps begin that
go with it, with an end, and those rows, in order; and of each step that brings what it uses its number, -1 of others.
"""


@part
def _order(to: Ints, order: Ints, count: Ints) -> None:
    """The steps in order, where each goes before another one or behind the last, or stays."""
    count[:] = 0
    for step in range(to.size):
        count[to[step] + 1] += 1
    for step in range(to.size):
        count[step + 1] += count[step]
    for stays in range(2):  # what goes there comes before what is there
        for step in range(to.size):
            if (to[step] == step) == (stays == 1):
                order[count[to[step]]] = step
                count[to[step]] += 1


@part
def _copied(begin: float, ms: float, other: float, both: float) -> float:
    """When a copy ends that takes so many ms alone, and `both` times as long while the link is busy the other way,
    until `other`."""
    shared = min(ms * both, max(0.0, other - begin))
    return begin + shared + (ms - shared / both)


@part
def _run(
    steps: Steps, arrays: Arrays, turn: int, to: Ints, rooms: Ints, both: float, slack: float, order: Ints,
    count: Ints, queue: Ints, users: Ints, begins: Floats, ends: Floats, gone: Ints,
) -> tuple[float, float, float, float]:  # fmt: skip
    """`run`, into the last of the arrays; and the bytes for which there was no room, the ms that are missing for all
    copies to be done so much before their bytes are used, and the sum of the bytes in use behind each step, but for
    what leaves."""
    kind, ms, takes, lasts, last_of, waits, waited = steps
    size, number, copy = arrays
    _order(to, order, count)
    clock, out, come, over, short, held = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    used, left, head, tail, turned = 0, 0, 0, 0, False
    gone[:] = order.size
    ends[:] = 0.0  # of what comes later nobody waits
    users[:] = number
    for at in range(order.size):
        step = order[at]
        if to[step] >= turn and not turned:
            clock, turned = max(clock, out, come), True
        begin = clock
        if kind[step] == OUT:
            begin = max(begin, out)
        elif kind[step] == IN:
            begin = max(begin, come)
        for row in range(waits[step], waits[step + 1]):
            done = ends[waited[row]]
            if kind[step] != OUT and kind[step] != IN:
                short += max(0.0, slack - max(0.0, begin - done))
            begin = max(begin, done)
        while takes[step] and used + takes[step] > rooms[to[step]] and head < tail:
            array = queue[head]
            done = ends[copy[array]]
            short += max(0.0, slack - max(0.0, begin - done))
            begin, gone[array] = max(begin, done), at
            used -= size[array]
            left -= size[array]
            head += 1
        if takes[step]:
            used += takes[step]
            over += max(0, used - rooms[to[step]])
        if kind[step] == OUT:
            end = out = _copied(begin, ms[step], come, both)
        elif kind[step] == IN:
            end = come = _copied(begin, ms[step], out, both)
        else:
            end = clock = begin + ms[step]
        begins[step], ends[step] = begin, end
        for row in range(lasts[step], lasts[step + 1]):
            array = last_of[row]
            users[array] -= 1
            if users[array]:
                continue
            if copy[array] < 0:
                used -= size[array]
                continue
            place = tail
            while place > head and ends[copy[queue[place - 1]]] > ends[copy[array]]:
                queue[place] = queue[place - 1]
                place -= 1
            queue[place] = array
            left += size[array]
            tail += 1
        held += used - left
    return max(clock, out, come), over, short, held


@kernel
def run(
    steps: Steps, arrays: Arrays, turn: int, to: Ints, rooms: Ints, both: float
) -> tuple[float, Floats, Floats, Ints, Ints]:
    """The steps by a clock, each stream in order; what leaves has its bytes until it is gone, and others want them.

    Args:
        steps, arrays: as above.
        turn: the first step of backward, which begins when all of forward has ended.
        to: before which step each goes, or how many there are if behind them; itself, if it stays.
        rooms: bytes that there are in each step, and behind them.
        both: how many times as long copies take while the link is busy the other way.

    Returns: the ms that all take; when each step begins, and ends; their order; and before which of that somebody has
    the bytes of each array that leaves, or how many steps there are.
    """
    begins, ends, count = np.empty(to.size), np.empty(to.size), np.empty(to.size + 2, np.int64)
    order, gone = np.empty_like(to), np.empty_like(arrays[0])
    queue, users = np.empty_like(gone), np.empty_like(gone)
    ms, _, _, _ = _run(steps, arrays, turn, to, rooms, both, 0.0, order, count, queue, users, begins, ends, gone)
    return ms, begins, ends, order, gone


@part
def _latest(step: int, to: Ints, updates: Updates) -> int:
    """Before which step one that brings something goes at last: where it is, or that which it is for goes."""
    at, _, _, _, brings = updates
    if brings[step] < 0:
        return step
    update = at[brings[step]]
    return to[update] if to[update] > update else min(step, to[update])


@part
def _go(number: int, there: int, to: Ints, updates: Updates) -> None:
    """Have an update run before that step, and all that goes with it; what it uses comes before."""
    at, least, own, others, brings = updates
    update = at[number]
    there = min(max(there, least[number]), to.size)
    for row in range(own[number], own[number + 1]):
        there += others[row] == there < update  # what stays in a place comes behind what goes there
    to[update] = there
    for row in range(own[number], own[number + 1]):
        each = others[row]
        if brings[each] == number:
            to[each] = min(to[each], _latest(each, to, updates))
        else:
            to[each] = each if there == update else (max(each, there) if there > update else there)


@part
def _copy(source: Ints, target: Ints) -> None:
    for at in range(source.size):
        target[at] = source[at]


@part
def _try(moving: Ints, first: Ints, to: Ints, updates: Updates, state: Ints) -> bool:
    """Have one of those moving, which is drawn, go elsewhere; whether it does."""
    index, how = draw(state, moving.size), draw(state, 4)
    step, number = moving[index], index - (moving.size - updates[0].size)
    was = to[step]
    near = (1 - 2 * draw(state, 2)) * (1 + draw(state, NEAR)) if how == 0 else draw(state, 2 * FAR + 1) - FAR
    if number >= 0:
        least = updates[1][number]
        _go(number, was + near if how < 2 else least + draw(state, to.size - least + 1), to, updates)
        return to[step] != was
    most, other, others = _latest(step, to, updates), step, was
    if how < 2:
        there = was + near
    elif how == 2:
        there = first[step] + draw(state, most - first[step] + 1)
    else:  # it changes places with another
        other = moving[draw(state, moving.size)]
        if first[other] < 0:
            return False
        there = others = to[other]
        to[other] = min(max(was, first[other]), _latest(other, to, updates))
    to[step] = min(max(there, first[step]), most)
    return to[step] != was or to[other] != others


@kernel
def annealed(
    steps: Steps, arrays: Arrays, turn: int, to: Ints, moving: Ints, first: Ints, updates: Updates, rooms: Ints,
    both: float, slack: float, tries: int, heat: float, seed: int,
) -> Ints:  # fmt: skip
    """Before which step each of those `moving` goes for all to take least time: by simulated annealing (Kirkpatrick,
    Gelatt and Vecchi, "Optimization by simulated annealing", Science 220, 1983) from `to` on, with so many tries. Other
    arguments as for `run`.

    Args:
        moving: what brings something, and behind that updates, in their order.
        first: of each that brings, the first step before which it may go, at last where it is or what it is for goes;
            -1 of others.
        updates: as above.
        slack: ms by which copies should be done before their bytes are used.
        heat: ms by which what is tried at first may mostly be worse.
        seed: of what is drawn.
    """
    begins, ends, count = np.empty(to.size), np.empty(to.size), np.empty(to.size + 2, np.int64)
    order, gone = np.empty_like(to), np.empty_like(arrays[0])
    queue, users = np.empty_like(gone), np.empty_like(gone)
    room = max(1, rooms.max())
    state, to, other, best, least, now = np.full(1, seed), to.copy(), to.copy(), to.copy(), math.inf, math.inf
    for tried in range(tries):
        if tried and not _try(moving, first, other, updates, state):
            continue
        ms, over, short, held = _run(
            steps, arrays, turn, other, rooms, both, slack, order, count, queue, users, begins, ends, gone
        )
        cost = ms * (1 + OVER * over / room + HELD * held / (room * to.size)) + SHORT * short
        worse = (cost - now) / (heat * (1 - tried / tries))
        if worse <= 0 or draw(state, DRAWN) < DRAWN * math.exp(-worse):
            now = cost
            _copy(other, to)
            if cost < least:
                least = cost
                _copy(other, best)
        else:
            _copy(to, other)
    return best
