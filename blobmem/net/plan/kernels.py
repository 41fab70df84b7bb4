"""Compiled: arrays put one after another at the lowest offset that is free while they live, and a search for places
below a limit; what choices of what is made anew, or evicted, ask most often; and minimum cuts.

Steps and sizes are int64, sizes and offsets in units of the alignment. All is a function of the arguments alone.
"""

from __future__ import annotations

import numpy as np

from blobmem.ops.host.compiled import kernel, part

Ints = np.ndarray
Floats = np.ndarray
Bools = np.ndarray


HARD = 3
"""How much more an array counts each time that there is no place for it."""


@part
def _happens_before(last: int, first: int) -> bool:
    """Whether an array's last use is over before another's first: on one stream the order of the calls."""
    return last < first


@kernel
def put_all(order: Ints, first: Ints, last: Ints, size: Ints, offset: Ints) -> int:
    """Give each array, in this order, the lowest offset that is free; the total."""
    placed = np.empty((4, order.size), np.int64)
    starts, stops, firsts, lasts = placed[0], placed[1], placed[2], placed[3]  # of those placed, by offset
    total = 0
    for count in range(order.size):
        index = order[count]
        at = 0
        for other in range(count):
            if _happens_before(lasts[other], first[index]) or _happens_before(last[index], firsts[other]):
                continue
            if starts[other] - at >= size[index]:
                break
            at = max(at, stops[other])
        offset[index] = at
        total = max(total, at + size[index])
        slot = count
        while slot > 0 and starts[slot - 1] > at:
            starts[slot], stops[slot] = starts[slot - 1], stops[slot - 1]
            firsts[slot], lasts[slot] = firsts[slot - 1], lasts[slot - 1]
            slot -= 1
        starts[slot], stops[slot] = at, at + size[index]
        firsts[slot], lasts[slot] = first[index], last[index]
    return total


@part
def draw(state: Ints, below: int) -> int:
    """The next number from 0 to `below` of a linear congruential generator (Knuth's MMIX)."""
    state[0] = state[0] * 6364136223846793005 + 1442695040888963407
    return ((state[0] >> 33) & 0x7FFFFFFF) % below


@kernel
def neighbours(first: Ints, last: Ints, starts: Ints) -> Ints:
    """Of each array those that live when it does, which begin there; the end of the last one's comes last."""
    order, place, found = np.argsort(first, kind="mergesort"), starts[:-1].copy(), np.empty(starts[-1], np.int64)
    for at in range(first.size):
        one = order[at]
        for behind in range(at + 1, first.size):
            other = order[behind]
            if _happens_before(last[one], first[other]):
                break
            found[place[one]], found[place[other]] = other, one
            place[one] += 1
            place[other] += 1
    return found


@part
def _draw_offset(
    index: int, size: Ints, offset: Ints, put: Bools, penalty: Ints, starts: Ints, others: Ints, limit: int,
    at: Ints, by: Ints, state: Ints,
) -> tuple[int, int]:  # fmt: skip
    """An offset up to which an array ends by the limit, with the least sum of penalties of those it would lie over; and
    that sum: one of the ends, drawn, of one of the ranges of such offsets."""
    count, cost, most = 0, 0, limit - size[index]
    for row in range(starts[index], starts[index + 1]):
        other = others[row]
        if put[other]:
            low, high = max(0, offset[other] - size[index] + 1), offset[other] + size[other]
            if low == 0:
                cost += penalty[other]
            elif low <= most:
                at[count], by[count] = low, penalty[other]
                count += 1
            if high <= most:
                at[count], by[count] = high, -penalty[other]
                count += 1
    order = np.argsort(at[:count])
    least, found, ways, here, row = cost + 1, 0, 0, 0, 0
    while True:
        while row < count and at[order[row]] == here:
            cost += by[order[row]]
            row += 1
        following = at[order[row]] if row < count else most + 1
        if cost < least:
            least, ways = cost, 0
        if cost == least:
            ways += 1
            if draw(state, ways) == 0:
                found = here if draw(state, 2) else following - 1
        if row == count:
            return found, least
        here = following


@kernel
def put_below(limit: int, size: Ints, offset: Ints, starts: Ints, others: Ints, work: int, seed: int) -> bool:
    """Look for offsets with which all end by the limit, from those that are given on; whether they were found.

    Guided ejection search (Nagata and Bräysy, "A powerful route minimization heuristic for the vehicle routing problem
    with time windows", Operations Research Letters 37, 2009): of those that have no place the one with most bytes times
    how many others live when it does takes one, and those that were there have none then; of which as few as can be,
    each counting `HARD` times as often as it had to do so itself.

    Args:
        limit: the end of the arena.
        size, offset: of each array, none of which is beyond the limit by itself.
        starts, others: as `neighbours` takes and gives them.
        work: how many of these are looked at.
        seed: of what is drawn.
    """
    count, most = size.size, 0
    for index in range(count):
        most = max(most, starts[index + 1] - starts[index])
    put, penalty, waiting = np.empty(count, np.bool_), np.ones(count, np.int64), np.empty(count, np.int64)
    at, by, state, left = np.empty(2 * most, np.int64), np.empty(2 * most, np.int64), np.full(1, seed), 0
    for index in range(count):
        put[index] = offset[index] + size[index] <= limit
        if not put[index]:
            waiting[left] = index
            left += 1
    while left and work > 0:
        hardest, largest = 0, 0
        for each in range(left):
            index = waiting[each]
            hard = size[index] * (1 + starts[index + 1] - starts[index])
            if hard > largest:
                hardest, largest = each, hard
        index, left = waiting[hardest], left - 1
        waiting[hardest] = waiting[left]
        place, cost = _draw_offset(index, size, offset, put, penalty, starts, others, limit, at, by, state)
        offset[index], put[index] = place, True
        penalty[index] += HARD * (cost > 0)
        for row in range(starts[index], starts[index + 1]):
            other = others[row]
            if cost and put[other] and offset[other] < place + size[index] and place < offset[other] + size[other]:
                put[other] = False
                waiting[left] = other
                left += 1
        work -= 4 * (starts[index + 1] - starts[index])
    return left == 0


@kernel
def beyond_turn(
    away: Ints, copy: Ints, leaving: Ints, ready: Ints, coming: Ints, wanted: Ints, turn: float
) -> tuple[float, float]:
    """Milliseconds by which copies out of what is `away` end after the turn, and by which those back, each as late as
    will do, begin before it; back of what is 1 there, others are waited for.

    `copy` are the milliseconds of each. What is `ready` first leaves first, what is `wanted` first comes first: they
    are numbered so in `leaving` and `coming`.
    """
    end, left = turn, 0.0
    for at in range(leaving.size - 1, -1, -1):
        index = leaving[at]
        if away[index]:
            left += copy[index]
            end = max(end, ready[index] + left)
    begin, come = turn, 0.0
    for index in coming:
        if away[index] == 1:
            come += copy[index]
            begin = min(begin, wanted[index] - come)
    return end - turn, turn - begin


@kernel
def max_flow(tails: Ints, heads: Ints, capacities: Ints, nodes: int) -> tuple[int, Ints]:
    """The largest flow from the last node but one to the last one, by Dinic's algorithm, which is the minimum cut; and
    of each node whether it is on the first one's side of that: from 0 on if so, else -1."""
    source, sink, count = nodes - 2, nodes - 1, len(tails)
    to, left = np.empty(2 * count, np.int64), np.zeros(2 * count, np.int64)
    start = np.zeros(nodes + 1, np.int64)  # of each node its edges, those back among them, in `order`
    for edge in range(count):
        to[2 * edge], to[2 * edge + 1], left[2 * edge] = heads[edge], tails[edge], capacities[edge]
        start[tails[edge] + 1] += 1
        start[heads[edge] + 1] += 1
    for node in range(nodes):
        start[node + 1] += start[node]
    order, place = np.empty(2 * count, np.int64), start[:-1].copy()
    for edge in range(2 * count):
        tail = to[edge ^ 1]
        order[place[tail]] = edge
        place[tail] += 1
    flow, path, queue = 0, np.empty(nodes, np.int64), np.empty(nodes, np.int64)
    while True:
        level = np.full(nodes, -1)
        level[source], queue[0], begin, end = 0, source, 0, 1
        while begin < end:
            node = queue[begin]
            begin += 1
            for at in range(start[node], start[node + 1]):
                edge = order[at]
                if left[edge] > 0 and level[to[edge]] < 0:
                    level[to[edge]] = level[node] + 1
                    queue[end] = to[edge]
                    end += 1
        if level[sink] < 0:
            return flow, level
        place = start[:-1].copy()
        depth, node = 0, source
        while True:  # from the source on, as far as levels lead; back where they do not
            if node == sink:
                least = left[path[0]]
                for at in range(depth):
                    least = min(least, left[path[at]])
                flow += least
                for at in range(depth - 1, -1, -1):
                    left[path[at]] -= least
                    left[path[at] ^ 1] += least
                    if left[path[at]] == 0:
                        depth, node = at, to[path[at] ^ 1]
                continue
            while place[node] < start[node + 1]:
                edge = order[place[node]]
                if left[edge] > 0 and level[to[edge]] == level[node] + 1:
                    break
                place[node] += 1
            if place[node] < start[node + 1]:
                path[depth] = edge
                depth += 1
                node = to[edge]
            elif node == source:
                break
            else:
                depth -= 1
                node = to[path[depth] ^ 1]
                place[node] += 1
