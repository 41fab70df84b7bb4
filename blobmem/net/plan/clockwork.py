"""Compiled: a pass as it runs on three streams, where what is copied out has its bytes until that is done; and a search
by it for when those copies begin that come.
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
"""How much longer than all takes it counts if what comes early held all of the room all the while."""

NEAR, FAR = 8, 60
"""A copy is moved by less than so many steps, or by no more than so many; or to any other."""

DRAWN = 1 << 30
"""Numbers that are drawn are below that."""


Steps = tuple[Ints, Floats, Ints, Ints, Ints, Ints, Ints, Ints]
"""Of each step: what it is, its ms, the bytes that it takes, and that are free behind it; where its rows of arrays that
leave then begin, with an end, and those rows; and the same of copies that it waits for."""

Leaving = tuple[Ints, Ints]
"""Of each array that leaves its bytes, and the step that copies it out last."""


@part
def _order(to: Ints, order: Ints, count: Ints) -> None:
    """The steps in order, where each goes before another one, or stays."""
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
    steps: Steps, leaving: Leaving, turn: int, to: Ints, rooms: Ints, both: float, slack: float, order: Ints,
    count: Ints, queue: Ints, begins: Floats, ends: Floats, gone: Ints,
) -> tuple[float, float, float]:  # fmt: skip
    """`run`, into the last of the arrays; and the ms that are missing for all copies to be done so much before their
    bytes are used."""
    kind, ms, takes, frees, leaves, left, waits, waited = steps
    size, copy = leaving
    _order(to, order, count)
    clock, out, come, over, short = 0.0, 0.0, 0.0, 0.0, 0.0
    used, head, tail, turned = 0, 0, 0, False
    gone[:] = order.size
    ends[:] = 0.0  # of what comes later nobody waits
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
        used -= frees[step]
        for row in range(leaves[step], leaves[step + 1]):
            place = tail
            while place > head and ends[copy[queue[place - 1]]] > ends[copy[left[row]]]:
                queue[place] = queue[place - 1]
                place -= 1
            queue[place] = left[row]
            tail += 1
    return max(clock, out, come), over, short


@kernel
def run(
    steps: Steps, leaving: Leaving, turn: int, to: Ints, rooms: Ints, both: float
) -> tuple[float, Floats, Floats, Ints, Ints]:
    """The steps by a clock, each stream in order; what leaves has its bytes until it is gone, and others want them.

    Args:
        steps, leaving: as above.
        turn: the first step of backward, which begins when all of forward has ended.
        to: before which step each goes; itself, if it stays.
        rooms: bytes that there are in each step.
        both: how many times as long copies take while the link is busy the other way.

    Returns: the ms that all take; when each step begins, and ends; their order; and before which of that somebody has
    the bytes of each array that leaves, or how many steps there are.
    """
    begins, ends, count = np.empty(to.size), np.empty(to.size), np.empty(to.size + 1, np.int64)
    order, gone, queue = np.empty_like(to), np.empty_like(leaving[0]), np.empty_like(leaving[0])
    ms, _, _ = _run(steps, leaving, turn, to, rooms, both, 0.0, order, count, queue, begins, ends, gone)
    return ms, begins, ends, order, gone


@kernel
def annealed(
    steps: Steps, leaving: Leaving, turn: int, to: Ints, moving: Ints, first: Ints, rooms: Ints, both: float,
    slack: float, tries: int, heat: float, seed: int,
) -> Ints:  # fmt: skip
    """Before which step each of those `moving` goes, not before its `first` nor behind where it is, for all to take
    least time: by simulated annealing (Kirkpatrick, Gelatt and Vecchi, "Optimization by simulated annealing", Science
    220, 1983) from `to` on, with so many tries. Other arguments as for `run`.

    Args:
        slack: ms by which copies should be done before their bytes are used.
        heat: ms by which what is tried at first may mostly be worse.
        seed: of what is drawn.
    """
    begins, ends, count = np.empty(to.size), np.empty(to.size), np.empty(to.size + 1, np.int64)
    order, gone, queue = np.empty_like(to), np.empty_like(leaving[0]), np.empty_like(leaving[0])
    takes, room = steps[2], max(1, rooms.max())
    state, to, best, least, now = np.full(1, seed), to.copy(), to.copy(), math.inf, math.inf
    for tried in range(tries):
        step, other = moving[draw(state, moving.size)], moving[draw(state, moving.size)]
        was, others, how = to[step], to[other], draw(state, 4)
        if how == 0:
            there = was + (1 - 2 * draw(state, 2)) * (1 + draw(state, NEAR))
        elif how == 1:
            there = was + draw(state, 2 * FAR + 1) - FAR
        elif how == 2:
            there = first[step] + draw(state, step - first[step] + 1)
        else:  # they change places
            there = others
            to[other] = min(max(was, first[other]), other)
        to[step] = min(max(there, first[step]), step)
        if tried == 0:
            to[other], to[step] = others, was
        elif to[step] == was and to[other] == others:
            continue
        ms, over, short = _run(steps, leaving, turn, to, rooms, both, slack, order, count, queue, begins, ends, gone)
        held = 0.0
        for each in moving:
            held += (each - to[each]) * takes[each]
        cost = ms * (1 + OVER * over / room + HELD * held / (room * to.size)) + SHORT * short
        worse = (cost - now) / (heat * (1 - tried / tries))
        if worse <= 0 or draw(state, DRAWN) < DRAWN * math.exp(-worse):
            now = cost
            if cost < least:
                least = cost
                for other in range(to.size):
                    best[other] = to[other]
        else:
            to[other], to[step] = others, was
    return best
